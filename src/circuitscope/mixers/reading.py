"""What a layer says of itself to anybody who looks at it: its mixing matrices, state transition and state.

A mixer is z = Φ · v. Φ may be a product, and what stands around it (a short conv before the values, a gate after
the product) can be multiplied on. A `Reading` lists these `Factor`s from left to right for one input; a `Product`
is one of them or several multiplied, built for slices of its units. Scores, decay, circuits, interventions, probes
and figures ask a reading and nothing else.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from circuitscope.errors import UserError, unknown

Unit = Literal["head", "channel"]
Matrix = Float[Tensor, "one_or_batch unit dest src"]
Build = Callable[[slice], Tensor]
Profile = Float[Tensor, "batch unit lag"]

SLICE_BYTES = 8e6  # of matrices built at once: on a CPU arrays of this size stay in the cache


@dataclass(frozen=True)
class Factor:
    """One factor of a layer's mixing, for one input.

    Args:
        unit: what it has one matrix for: a "head" or a "channel"; `size` counts these.
        build: for a slice of the units the matrix [batch, unit, dest, src] or, where `diagonal`, its diagonal
            [batch, unit, pos]. The batch axis may be 1 where all sequences share one matrix.
        shares: its rows are not negative and sum to 1, as those of attention.
        core: it is part of Φ, what stands between `hook_v` and `hook_z`; the product of the core is at `hook_phi`.
        hook: the mixer's hook that carries this factor alone, where there is one: "hook_phi_conv".
        without_skip: builds it without its direct term D δ_ij, where it has one.
        profile: gives m(δ), the mean of |M_ij| at i − j = δ, and the same without the skip term, where that is
            faster than building the matrix.
    """

    name: str
    unit: Unit
    size: int
    build: Build
    shares: bool = False
    diagonal: bool = False
    core: bool = False
    hook: str = ""
    without_skip: Build | None = None
    profile: Callable[[slice], tuple[Profile, Profile]] | None = None


@dataclass(frozen=True)
class Product:
    """A mixing matrix of a layer: one factor, or several multiplied from left to right.

    `hook` is the mixer's hook that carries it, or "" where it cannot be edited as a whole.
    """

    name: str
    factors: tuple[Factor, ...]
    hook: str = ""

    @property
    def size(self) -> int:
        """How many units it has: those of its finest factor."""
        return max(factor.size for factor in self.factors)

    @property
    def unit(self) -> Unit:
        """The unit of its finest factor."""
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
    def core(self) -> bool:
        """Whether it is Φ, the matrix at `hook_phi`."""
        return self.hook == "hook_phi"

    @property
    def has_skip(self) -> bool:
        """Whether a direct term D δ_ij is in it."""
        return any(factor.without_skip is not None for factor in self.factors)

    def build(self, units: slice, skip: bool = True) -> Matrix:
        """F_1 · F_2 · … for a slice of the units; diagonals become matrices. The batch axis may be 1.

        A factor that lives on heads is repeated over the channels of each head.

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
            elif len(part) == 1:  # one matrix for all sequences: a single product per channel
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
    """A diagonal transition: log A_t of state n of a unit is time_t · rate_n, with rate ≤ 0.

    The batch axis is 1 where the transition does not depend on the input.
    """

    time: Float[Tensor, "one_or_batch pos unit"]
    rate: Float[Tensor, "unit state"]


class DeltaTransition(NamedTuple):
    """The transition of a delta rule: A_t = e^{g_t} (I − β_t k_t k_tᵀ), without g where nothing decays."""

    k: Float[Tensor, "batch pos head d_key"]
    beta: Float[Tensor, "batch pos head"]
    log_decay: Float[Tensor, "batch pos head"] | None


@dataclass(frozen=True)
class State:
    """A recurrent state, at the mixer's hook `hook` [batch, pos, …], and how it is read.

    Args:
        by: the mixer's hook of the vector that reads it, C or q; "" where no vector of the token does.
        groups: how many such vectors a token has; the heads of a group share one.
        channels_first: the state is [channel, state], read over its last axis; otherwise [head, state, d_head], read
            over the axis before the last.
    """

    by: str = ""
    groups: int = 1
    channels_first: bool = False
    hook: str = "hook_state"

    def as_heads(self, state: Float[Tensor, "site *axes"]) -> Float[Tensor, "site head inner outer"]:
        """States by site with the axis that is read over third."""
        return state.mT[:, None] if self.channels_first else state

    def from_heads(self, heads: Float[Tensor, "site head inner outer"]) -> Float[Tensor, "site *axes"]:
        """The way back from `as_heads`."""
        return heads[:, 0].mT if self.channels_first else heads

    def read(self, state: Float[Tensor, "site *axes"], by: Tensor) -> Float[Tensor, "site head outer"]:
        """What is read from states by vectors [site, state] or [site, group, state]: C · h, or q · S.

        Plus the skip term that is z of these sites; a delta rule also divides it by √d_key.
        """
        heads = self.as_heads(state)
        by = by[:, None] if by.ndim == 2 else by
        return torch.einsum("shnd,shn->shd", heads, by.repeat_interleave(heads.shape[1] // by.shape[1], dim=1))


@dataclass(frozen=True)
class Reading:
    """What a layer offers for one input.

    Args:
        shape: [batch, pos, …] of that input.
        factors: from left to right, the outermost first; none where there is no Φ (`no_phi` says why).
        no_composed: why the factors cannot all be multiplied, or "".
        transition: of the recurrent state, or a sentence that says why there is none.
        state: the recurrent state that can be read and edited, where there is one.
    """

    shape: Sequence[int]
    factors: tuple[Factor, ...] = ()
    transition: GatedTransition | DeltaTransition | str = "the layer says nothing of a transition"
    state: State | None = None
    no_phi: str = ""
    no_composed: str = ""
    _made: dict[str, Product] = field(default_factory=dict, init=False, repr=False, compare=False)

    @property
    def batch(self) -> int:
        """How many sequences."""
        return self.shape[0]

    @property
    def length(self) -> int:
        """How many positions."""
        return self.shape[1]

    @property
    def core(self) -> Product:
        """Φ, the matrix at `hook_phi`: called by its one factor's name, or "phi" where it is a product."""
        core = tuple(factor for factor in self.factors if factor.core)
        if not core:
            raise UserError(self.no_phi or "the layer shows no mixing matrix")
        return Product(core[0].name if len(core) == 1 else "phi", core, "hook_phi")

    @property
    def whole(self) -> Product:
        """The matrix that says most: all factors composed, or Φ where they cannot be."""
        return self.core if self.no_composed else self.product("composed")

    def products(self, diagonal: bool = False) -> dict[str, Product]:
        """Every matrix worth reading: each factor, Φ where it is a product, and all factors composed.

        Args:
            diagonal: diagonal factors too, which move nothing between positions.
        """
        if not self._made and self.factors:
            every = [_lone(factor) for factor in self.factors]
            self._made.update({p.name: p for p in every} | {self.core.name: self.core})
            if not self.no_composed and len(self.factors) > len(self.core.factors):
                self._made["composed"] = Product("composed", self.factors)
        return {name: product for name, product in self._made.items() if diagonal or not product.diagonal}

    def product(self, asked: str | Sequence[str]) -> Product:
        """A matrix by name: a factor, "phi", "composed", or names of factors, which multiply in the layer's order."""
        if self.no_phi:
            raise UserError(self.no_phi)
        every, names = self.products(diagonal=True), [factor.name for factor in self.factors]
        valid = [*names, "phi", "composed"]
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
        """A matrix in slices of its units, with the whole batch axis, about 8 MB at a time.

        Sequences that share one matrix share its memory: their batch axis has stride 0.

        Args:
            units: how many units a slice has, in place of the 8 MB.
        """
        step = units or self.units_per_slice
        for start in range(0, product.size, step):
            part = slice(start, min(start + step, product.size))
            yield part, product.build(part, skip).expand(self.batch, -1, self.length, self.length)

    @property
    def units_per_slice(self) -> int:
        """Units whose float32 matrices take about 8 MB; at least one."""
        return max(1, int(SLICE_BYTES // (4 * max(1, self.batch * self.length**2))))


def _lone(factor: Factor) -> Product:
    return Product(factor.name, (factor,), factor.hook)
