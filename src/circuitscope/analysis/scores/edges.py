"""Edges of a mixing matrix that a circuit would use: which dest reads which src.

A score is the weight that a matrix puts on such a set, and a knockout removes the same set. So one definition serves
both questions: whether a matrix looks like a circuit, and whether the model uses it.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from circuitscope.analysis.scores.registry import EVERYWHERE, SCORES, edge_score
from circuitscope.arguments import explained
from circuitscope.errors import UserError, described, shown, unknown
from circuitscope.tasks import Layout, Role

STEPS = ("binding", "recall")  # the scores whose edges a circuit may have after the value instead of at it
LATER = (1, 2, 3)  # by so many positions


@dataclass(frozen=True)
class Edges:
    """A set of edges dest ← src in each sequence.

    Edge e runs from `src[e]` to `dest[e]` in sequence `sequence[e]`; `dests` counts the distinct
    destinations of each sequence.
    """

    name: str
    sequence: Int[Tensor, " edge"]
    dest: Int[Tensor, " edge"]
    src: Int[Tensor, " edge"]
    dests: Int[Tensor, " batch"]
    length: int

    @staticmethod
    def of(name: str, mask: Bool[Tensor, "batch dest src"]) -> "Edges":
        """The edges that a mask marks."""
        sequence, dest, src = mask.nonzero(as_tuple=True)
        return Edges(name, sequence, dest, src, mask.any(dim=2).sum(dim=1), mask.shape[1])

    def __repr__(self) -> str:
        return f"Edges({self.name!r}, {len(self.src)} in {len(self.dests)} sequences of {self.length} positions)"

    def to(self, device: torch.device) -> "Edges":
        """The same edges on another device."""
        if device == self.src.device:
            return self
        places = {name: getattr(self, name).to(device) for name in ("sequence", "dest", "src", "dests")}
        return replace(self, **places)

    def part(self, first: int, last: int) -> "Edges":
        """The edges of the sequences from `first` on, up to the one before `last`."""
        here = (self.sequence >= first) & (self.sequence < last)
        places = {name: getattr(self, name)[here] for name in ("dest", "src")}
        return replace(self, sequence=self.sequence[here] - first, dests=self.dests[first:last], **places)

    def mask(self) -> Bool[Tensor, "batch dest src"]:
        """True on the edges."""
        out = torch.zeros(len(self.dests), self.length, self.length, dtype=torch.bool, device=self.src.device)
        out[self.sequence, self.dest, self.src] = True
        return out

    def on(self, matrix: Float[Tensor, "batch head dest src"]) -> Float[Tensor, "edge head"]:
        """Entries of a matrix at the edges."""
        if matrix.shape[0] != len(self.dests) or matrix.shape[2:] != (self.length, self.length):
            raise UserError(
                f"the matrix is {tuple(matrix.shape)}, but the layout has {len(self.dests)} sequences"
                f" of length {self.length}; expected [batch, head, dest, src]"
            )
        return matrix[self.sequence, :, self.dest, self.src]

    def even(self, reach: int | None = None) -> float:
        """The score of a matrix whose rows are even: 1 / n on each of the n positions that a row may read.

        These are the row's own position and those before it or, of a conv, the last `reach` of them.
        """
        lag, allowed = self.dest - self.src, self.dest + 1
        if reach is not None:
            allowed = allowed.clamp(max=reach)
        share = torch.where((lag >= 0) & (lag < allowed), 1 / allowed, 0.0)
        return float(self.total(share[:, None]).mean())

    def total(self, per_edge: Float[Tensor, "edge head"]) -> Float[Tensor, "batch head"]:
        """Σ over the edges of a destination, averaged over the destinations of a sequence."""
        total = per_edge.new_zeros(len(self.dests), per_edge.shape[1]).index_add_(0, self.sequence, per_edge)
        return total / self.dests[:, None].clamp(min=1)


@edge_score("binding", "at a context value, on its key", needs="pairs", shown=EVERYWHERE)
def binding(layout: Layout, offset: int = 0) -> Edges:
    """Every context value ← its own key (recall's previous-token step); with an offset, a later position ← key."""
    value_pos, _ = _pairs(layout, "binding")
    if layout.key_pos is None:
        raise UserError("binding needs keys that stand apart from their values, as in mqar; this layout has none")
    return _between(layout, "binding", value_pos, layout.key_pos, dest_offset=offset)


@edge_score("recall", "at a query, on the bound value", needs="answers", shown=EVERYWHERE)
def recall(layout: Layout, offset: int = 0) -> Edges:
    """Every query ← the value bound to the key it asks for; with an offset, ← so many positions after the value.

    If the context names its pairs in several passes, these are the values of all passes.
    In a mixer with a short conv, key and value may meet after the value: in Mamba often one position later.
    """
    value_pos, query_pos = _pairs(layout, "recall")
    answers = value_pos.gather(1, layout.answering())
    return _between(layout, "recall", query_pos.repeat(1, layout.passes), answers, src_offset=offset)


@edge_score("value", "at a query, on all values", needs="answers", shown=("table", "timeline", "figure"))
def value(layout: Layout, offset: int = 0) -> Edges:
    """Every query ← all values of the context; with an offset, ← so many positions after each value."""
    value_pos, query_pos = _pairs(layout, "value")
    queries, values = query_pos.shape[1], value_pos.shape[1]
    every_query = query_pos[:, :, None].expand(-1, -1, values).flatten(1)
    every_value = value_pos[:, None, :].expand(-1, queries, -1).flatten(1)
    return _between(layout, "value", every_query, every_value, src_offset=offset)


@edge_score("match", "at a query, on the key it asks for", needs="pairs", shown=("table",))
def match(layout: Layout) -> Edges:
    """Every query ← the context key that it asks for.

    A query whose keys go through a conv attends to the value, and the token it matched there is the key: the matrix
    `matched` of such a layer says so.
    """
    _, query_pos = _pairs(layout, "match")
    assert layout.key_pos is not None
    assert layout.query_pair is not None
    return _between(layout, "match", query_pos, layout.key_pos.gather(1, layout.query_pair))


@edge_score("previous_token", "on the position before", shown=("table", "timeline", "figure"))
def previous_token(layout: Layout) -> Edges:
    """i ← i − 1, for i ≥ 1."""
    batch, length = layout.roles.shape
    mask = torch.eye(length, dtype=torch.bool).roll(1, 0)
    mask[0] = False
    return Edges.of("previous_token", mask.expand(batch, -1, -1))


@edge_score("induction", "prefix matching on repeated random blocks", on="repeats", shown=EVERYWHERE)
def induction(layout: Layout) -> Edges:
    """On repeated blocks: every position of repeats 2..r ← the positions after earlier occurrences of its token."""
    return _repeats(layout, "induction", after=1)


@edge_score(
    "induction_new_period",
    "prefix matching on random blocks of a length that training never had",
    on="new period",
    shown=("table", "figure"),
)
def induction_new_period(layout: Layout) -> Edges:
    """The control of `induction`: the same edges, on blocks of another length. A model that copies from a fixed
    distance back scores high on blocks of its own length, and low here."""
    return _repeats(layout, "induction_new_period", after=1)


@edge_score("duplicate", "on earlier occurrences, repeated random blocks", on="repeats")
def duplicate(layout: Layout) -> Edges:
    """On repeated blocks: every position of repeats 2..r ← the earlier occurrences of its token."""
    return _repeats(layout, "duplicate", after=0)


def carry(layout: Layout, offset: int = 0) -> Edges:
    """The position `offset` positions after every context value ← that value."""
    value_pos, _ = _pairs(layout, "carry")
    return _between(layout, "carry", value_pos, value_pos, dest_offset=offset)


def between_roles(layout: Layout, dest: Role | str, src: Role | str) -> Edges:
    """Every position of role `dest` ← every earlier position of role `src`."""
    to, of = _role(dest), _role(src)
    length = layout.roles.shape[1]
    causal = torch.ones(length, length, dtype=torch.bool).tril(-1)
    mask = (layout.roles == to)[:, :, None] & (layout.roles == of)[:, None, :] & causal
    if not mask.any():
        raise UserError(f"no {to.name} of this layout has an earlier {of.name}")
    return Edges.of(f"{to.name}<-{of.name}", mask)


OFFSET: dict[str, Callable[[Layout, int], Edges]] = {
    "recall": recall,
    "value": value,
    "binding": binding,
    "carry": carry,
}


@explained
def named_edges(name: str, layout: Layout) -> Edges:
    """A set of edges by name.

    The name is that of a score; or one of OFFSET, moved by some positions, as in "recall+1"; or "DEST<-SRC" with two
    roles, as in "query<-filler".
    """
    if not isinstance(layout, Layout):
        raise UserError(f"expected a Layout, such as batch.layout, got {described(layout)}")
    if "<-" in name:
        dest, src = name.split("<-", 1)
        return between_roles(layout, dest.strip(), src.strip())
    base, plus, offset = name.partition("+")
    if plus and base in OFFSET and offset.isdecimal():
        length = layout.roles.shape[1]
        if len(offset) > len(str(length)) or int(offset) >= length:
            raise UserError(f"{shown(name)}: an offset must be below the length of the sequences, {length}")
        return OFFSET[base](layout, int(offset))
    known = {score.name: score.edges for score in SCORES.values() if score.edges is not None}
    if name not in known:
        raise unknown("set of edges", name, [*known, *(f"{n}+1" for n in OFFSET), "query<-value"])
    return known[name](layout)


def _role(role: Role | str) -> Role:
    return role if isinstance(role, Role) else Role.named(role)


def _pairs(layout: Layout, name: str) -> tuple[Int[Tensor, "batch pair"], Int[Tensor, "batch query"]]:
    if layout.value_pos is None or layout.query_pos is None:
        raise UserError(f"{name} needs a task with keys, values and queries, such as mqar; this layout has none")
    return layout.value_pos, layout.query_pos


def _between(
    layout: Layout,
    name: str,
    dest: Int[Tensor, "batch edge"],
    src: Int[Tensor, "batch edge"],
    dest_offset: int = 0,
    src_offset: int = 0,
) -> Edges:
    """The edges, moved by the offsets; those that then leave the sequence or are not causal are dropped."""
    batch, length = layout.roles.shape
    dest, src = dest + dest_offset, src + src_offset
    inside = (dest < length) & (src <= dest)
    sequence = torch.arange(batch)[:, None].expand_as(dest)
    mask = torch.zeros(batch, length, length, dtype=torch.bool)
    mask[sequence[inside], dest[inside], src[inside]] = True
    offset = dest_offset + src_offset
    return Edges.of(f"{name}+{offset}" if offset else name, mask)


def _repeats(layout: Layout, name: str, after: int) -> Edges:
    if layout.period is None:
        raise UserError(f"{name} needs repeated blocks: a layout with a period, such as the task induction makes")
    batch, length = layout.roles.shape
    dest, src = torch.arange(length)[:, None], torch.arange(length)[None, :]
    back = dest - src + after
    period, first = (torch.as_tensor(x).reshape(-1, 1, 1) for x in (layout.period, layout.first_block))
    mask = (back > 0) & (back % period == 0) & (src >= first + after)
    return Edges.of(name, mask.expand(batch, -1, -1))
