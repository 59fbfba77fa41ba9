"""How a layer describes itself to the rest of the package: its mixing matrices, its state transition and its state.

A mixer computes z = Φ · v. Φ may be a product of matrices, and what surrounds it (a short conv before the values, a
gate after the product) can be multiplied to it. A `Reading` lists these `Factor`s for one input, from left to right.
Convs that Φ itself is made with, on queries and keys, are listed beside them and multiply nothing. A `Product` is one
factor, or several multiplied, and is built for slices of its units. Scores, decay, circuits, interventions, probes and
figures use readings and nothing else of a layer.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from circuitscope.errors import UserError, unknown
from circuitscope.kernels.edge_sums import EdgeList, EdgeSums, Surroundings

Unit = Literal["head", "channel"]
Matrix = Float[Tensor, "one_or_batch unit dest src"]
Build = Callable[[slice], Tensor]
Profile = Float[Tensor, "batch unit lag"]
OnEdges = Callable[[slice, EdgeList, Surroundings | None], tuple[EdgeSums, EdgeSums | None]]

SLICE_BYTES = 8e6  # size of the matrices built at once: arrays of this size stay in a CPU's cache


@dataclass(frozen=True)
class Factor:
    """One factor of a layer's mixing, for one input.

    Args:
        unit: whether it has one matrix per "head" or per "channel"; `size` is how many there are.
        build: gives, for a slice of the units, the matrix [batch, unit, dest, src] or, if `diagonal`, its diagonal
            [batch, unit, pos]. The batch axis is 1 where all sequences share one matrix.
        shares: its rows are not negative and sum to 1, as in attention.
        causal: it is zero where src > dest; False only for a conv that reads later positions.
        core: it is part of Φ, which stands between `hook_v` and `hook_z`; the product of the core is at `hook_phi`.
        hook: the mixer's hook that carries this factor alone, for example "hook_phi_conv"; "" if there is none.
        without_skip: builds it without its direct term D δ_ij, if it has one.
        profile: gives m(δ), the mean of |M_ij| at i − j = δ, and the same without the skip term. Only for factors
            where this is faster than building the matrix.
        on_edges: gives the sums over edges of its matrix and of its surroundings' product, without building either.
            Only for factors that have a kernel for it.
        taps: its weights by lag [unit, lag], where it is one short causal conv for all sequences.
        reach: how many positions a row reads at most, its own included; None if it reads back to the start.
    """

    name: str
    unit: Unit
    size: int
    build: Build
    shares: bool = False
    diagonal: bool = False
    causal: bool = True
    core: bool = False
    hook: str = ""
    without_skip: Build | None = None
    profile: Callable[[slice], tuple[Profile, Profile]] | None = None
    on_edges: OnEdges | None = None
    taps: Float[Tensor, "unit lag"] | None = None
    reach: int | None = None

    def __repr__(self) -> str:
        return f"Factor({self.name!r}, {self.size} {self.unit}{'s' if self.size > 1 else ''})"


@dataclass(frozen=True)
class Product:
    """A mixing matrix of a layer: one factor, or several multiplied from left to right.

    `hook` is the mixer's hook that carries it, or "" if it cannot be edited as a whole.
    """

    name: str
    factors: tuple[Factor, ...]
    hook: str = ""

    @property
    def size(self) -> int:
        """How many units it has: as many as the factor with the most."""
        return max(factor.size for factor in self.factors)

    @property
    def unit(self) -> Unit:
        """The unit of the factor that has the most units."""
        return "channel" if any(f.unit == "channel" for f in self.factors if f.size == self.size) else "head"

    @property
    def shares(self) -> bool:
        """Whether its rows are shares of 1."""
        return len(self.factors) == 1 and self.factors[0].shares

    @property
    def diagonal(self) -> bool:
        """Whether it moves nothing between positions."""
        return all(factor.diagonal for factor in self.factors)

    @property
    def causal(self) -> bool:
        """Whether no position reads a later one: its entries with src > dest are zero."""
        return all(factor.causal for factor in self.factors)

    @property
    def core(self) -> bool:
        """Whether it is Φ, the matrix at `hook_phi`."""
        return self.hook == "hook_phi"

    @property
    def has_skip(self) -> bool:
        """Whether it contains a direct term D δ_ij."""
        return any(factor.without_skip is not None for factor in self.factors)

    def build(self, units: slice, skip: bool = True) -> Matrix:
        """F_1 · F_2 · … for a slice of the units; diagonals become matrices. The batch axis may be 1.

        A factor with one matrix per head is repeated for the channels of each head.

        Args:
            skip: False leaves out the direct term D δ_ij.
        """
        diagonal, out = True, None
        for factor in self.factors:
            part = _spread_over(factor, units, self.size // factor.size, skip)
            if out is None:
                out, diagonal = part, factor.diagonal
            elif diagonal:
                out, diagonal = (out if factor.diagonal else out[..., :, None]) * part, factor.diagonal
            elif factor.diagonal:
                out = out * part[..., None, :]
            elif len(part) == 1:  # all sequences share one matrix, so one product per channel is enough
                out = torch.einsum("bcij,cjk->bcik", out, part[0])
            else:
                out = out @ part
        assert out is not None
        return torch.diag_embed(out) if diagonal else out


def _spread_over(factor: Factor, units: slice, per_head: int, skip: bool) -> Tensor:
    build = factor.build if skip or factor.without_skip is None else factor.without_skip
    first, last = units.start // per_head, (units.stop - 1) // per_head
    part = build(slice(first, last + 1))
    if part.shape[1] != last + 1 - first:
        raise UserError(
            f"the factor '{factor.name}' says that it has {factor.size} {factor.unit}s,"
            f" and gives {part.shape[1]} for {first} to {last}; its size and its build must agree"
        )
    if per_head == 1:
        return part
    heads = torch.arange(units.start, units.stop, device=part.device) // per_head - first
    return part[:, heads]


class GatedTransition(NamedTuple):
    """A diagonal transition: for state n of a unit, log A_t = time_t · rate_n, with rate ≤ 0.

    The batch axis is 1 if the transition does not depend on the input.
    """

    time: Float[Tensor, "one_or_batch pos unit"]
    rate: Float[Tensor, "unit state"]


class DeltaTransition(NamedTuple):
    """The transition of a delta rule: A_t = e^{g_t} (I − β_t k_t k_tᵀ), without g if nothing decays."""

    k: Float[Tensor, "batch pos head d_key"]
    beta: Float[Tensor, "batch pos head"]
    log_decay: Float[Tensor, "batch pos head"] | None = None


@dataclass(frozen=True)
class State:
    """A recurrent state, which the mixer's hook `hook` carries as [batch, pos, …], and how the layer reads it.

    Args:
        by: the mixer's hook with the vector that reads the state, C or q; "" if no vector of the token does.
        groups: how many such vectors a token has; the heads of a group share one.
        channels_first: the state is [channel, state] and is read over its last axis. Otherwise it is
            [head, state, d_head] and is read over the axis before the last.
    """

    by: str = ""
    groups: int = 1
    channels_first: bool = False
    hook: str = "hook_state"

    def as_heads(self, state: Float[Tensor, "site *axes"]) -> Float[Tensor, "site head inner outer"]:
        """States by site, with the axis that is read over in third place."""
        return state.mT[:, None] if self.channels_first else state

    def from_heads(self, heads: Float[Tensor, "site head inner outer"]) -> Float[Tensor, "site *axes"]:
        """The inverse of `as_heads`."""
        return heads[:, 0].mT if self.channels_first else heads

    def read(self, state: Float[Tensor, "site *axes"], by: Tensor) -> Float[Tensor, "site head outer"]:
        """What is read from states by vectors [site, state] or [site, group, state]: C · h, or q · S.

        With the skip term added, this is z at these sites; a delta rule also divides it by √d_key.
        """
        heads = self.as_heads(state)
        by = by[:, None] if by.ndim == 2 else by
        return torch.einsum("shnd,shn->shd", heads, by.repeat_interleave(heads.shape[1] // by.shape[1], dim=1))


@dataclass(frozen=True)
class Reading:
    """The description that a layer gives of itself for one input.

    Args:
        shape: the shape [batch, pos, …] of that input.
        factors: the factors from left to right, the outermost first; none if there is no Φ (`no_phi` says why).
        no_composed: why the factors cannot all be multiplied; "" if they can.
        transition: the transition of the recurrent state, or a sentence that says why there is none.
        state: the recurrent state that can be read and edited, if there is one.
        beside: matrices that are read and cut by themselves and multiply nothing: the convs and shifts of what Φ is
            made from (queries and keys, B and C), and what Φ says about tokens through such a conv.
    """

    shape: Sequence[int]
    factors: tuple[Factor, ...] = ()
    transition: GatedTransition | DeltaTransition | str = "the layer says nothing of a transition"
    state: State | None = None
    no_phi: str = ""
    no_composed: str = ""
    beside: tuple[Factor, ...] = ()
    _made: dict[str, Product] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __repr__(self) -> str:
        size = f"{self.batch} sequences of {self.length} positions"
        return f"Reading({size}; {self.no_phi or ', '.join(map(repr, (*self.factors, *self.beside)))})"

    @property
    def batch(self) -> int:
        """The number of sequences."""
        return self.shape[0]

    @property
    def length(self) -> int:
        """The number of positions."""
        return self.shape[1]

    @property
    def core(self) -> Product:
        """Φ, the matrix at `hook_phi`. Its name is that of its only factor, or "phi" if it is a product."""
        core = tuple(factor for factor in self.factors if factor.core)
        if not core:
            raise UserError(self.no_phi or "the layer shows no mixing matrix")
        return Product(core[0].name if len(core) == 1 else "phi", core, "hook_phi")

    @property
    def whole(self) -> Product:
        """The most complete matrix: all factors composed, or Φ if they cannot be composed."""
        return self.core if self.no_composed else self.product("composed")

    def products(self, diagonal: bool = False) -> dict[str, Product]:
        """Every matrix worth reading: each factor, Φ if it is a product, all factors composed, and those beside them.

        Args:
            diagonal: include the diagonal factors, which move nothing between positions.
        """
        if not self._made and self.factors:
            every = [_lone(factor) for factor in self.factors]
            self._made.update({p.name: p for p in every} | {self.core.name: self.core})
            if not self.no_composed and len(self.factors) > len(self.core.factors):
                self._made["composed"] = Product("composed", self.factors)
            self._made.update({factor.name: _lone(factor) for factor in self.beside})
        return {name: product for name, product in self._made.items() if diagonal or not product.diagonal}

    @property
    def names(self) -> list[str]:
        """The names that `product` accepts: each factor, "phi", "composed" and those beside; none if there is no Φ."""
        if not self.factors:
            return []
        composed = [] if self.no_composed else ["composed"]
        return [*(f.name for f in self.factors), "phi", *composed, *(f.name for f in self.beside)]

    def product(self, asked: str | Sequence[str]) -> Product:
        """A matrix by name: a factor, "phi", "composed", or several factors, multiplied in the layer's order."""
        if self.no_phi:
            raise UserError(self.no_phi)
        every, names = self.products(diagonal=True), [factor.name for factor in self.factors]
        valid = self.names
        if asked == "composed":
            if self.no_composed:
                raise UserError(self.no_composed)
            return every.get("composed", self.core)
        if asked == "phi":
            return self.core
        chosen = [asked] if isinstance(asked, str) else list(asked)
        if not chosen:
            raise UserError(f"factors is empty; valid: {', '.join(valid)}")
        if len(chosen) == 1 and chosen[0] in ("phi", "composed"):
            return self.product(chosen[0])
        beside = [factor.name for factor in self.beside if factor.name in chosen]
        if beside and len(chosen) == 1:
            return every[chosen[0]]
        if beside:
            raise UserError(
                f"{beside[0]} is part of how Φ is made, so no other factor is multiplied by it; ask for it alone"
            )
        for name in chosen:
            if name not in names:
                raise unknown("factor", name, valid if len(chosen) == 1 else names)
        found = tuple(factor for factor in self.factors if factor.name in chosen)
        if len(found) == 1:
            return every[found[0].name]
        if found == self.core.factors:
            return self.core
        if self.no_composed and not all(factor.core for factor in found):
            raise UserError(self.no_composed)
        return Product("·".join(factor.name for factor in found), found)

    def slices(
        self, product: Product, *, units: int | None = None, skip: bool = True
    ) -> Iterator[tuple[slice, Float[Tensor, "batch unit dest src"]]]:
        """Builds a matrix in slices of its units, with the whole batch axis, about 8 MB at a time.

        Sequences that share one matrix share its memory: their batch axis has stride 0.

        Args:
            units: how many units a slice has; by default as many as fit into 8 MB.
        """
        for part in slices_of(product.size, units or self.units_per_slice):
            yield part, product.build(part, skip).expand(self.batch, -1, self.length, self.length)

    @property
    def units_per_slice(self) -> int:
        """How many units have float32 matrices of about 8 MB together; at least one."""
        return max(1, int(SLICE_BYTES // (4 * max(1, self.batch * self.length**2))))


def slices_of(size: int, step: int) -> Iterator[slice]:
    """Slices of at most `step` units that cover `size` units in order."""
    for start in range(0, size, step):
        yield slice(start, min(start + step, size))


def _lone(factor: Factor) -> Product:
    return Product(factor.name, (factor,), factor.hook)
