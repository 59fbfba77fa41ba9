"""What a task returns: tokens, labels, and the layout, which gives the role of every position."""

from dataclasses import dataclass, fields, replace
from typing import Any

from jaxtyping import Float, Int, Int8
from torch import Tensor

NO_LABEL = -100

Inputs = Int[Tensor, "batch pos"] | Float[Tensor, "batch pos channel"]  # tokens, or vectors
Rows = slice | Int[Tensor, " row"]


@dataclass(frozen=True)
class Layout:
    """The role of every position, and which positions belong together.

    In pair p of an example, the key at `key_pos[:, p]` is bound to the value at `value_pos[:, p]`. Query q
    stands at `query_pos[:, q]` and asks for pair `query_pair[:, q]`. These are None for tasks without pairs.
    `period` is the block length of repeated sequences: tokens at i and i + period are equal from position 1 on.
    """

    roles: Int8[Tensor, "batch pos"]
    key_pos: Int[Tensor, "batch pair"] | None = None
    value_pos: Int[Tensor, "batch pair"] | None = None
    query_pos: Int[Tensor, "batch query"] | None = None
    query_pair: Int[Tensor, "batch query"] | None = None
    period: int | None = None

    def answer_pos(self) -> Int[Tensor, "batch query"]:
        """The position of the context value that each query asks for."""
        if self.value_pos is None or self.query_pair is None:
            raise ValueError("this layout has no key-value pairs")
        return self.value_pos.gather(1, self.query_pair)

    def part(self, rows: Rows) -> "Layout":
        """The layout of some of the examples."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        parts: dict[str, Any] = {name: value[rows] for name, value in values.items() if isinstance(value, Tensor)}
        return replace(self, **parts)


@dataclass(frozen=True)
class Batch:
    """Tokens, their labels (−100 where there is none) and their layout."""

    tokens: Inputs
    labels: Inputs
    layout: Layout

    def labelled(self) -> tuple[Int[Tensor, " label"], Int[Tensor, " label"]]:
        """Flat indices (row · length + pos) of labelled positions, and the labels there."""
        flat = self.labels.reshape(-1)
        where = (flat != NO_LABEL).nonzero().squeeze(1)
        return where, flat[where]

    def part(self, rows: Rows) -> "Batch":
        """Some of the examples, given as a slice or as a tensor of row numbers, with their part of the layout."""
        return Batch(self.tokens[rows], self.labels[rows], self.layout.part(rows))

    def __len__(self) -> int:
        return len(self.tokens)
