"""What a task returns: tokens, labels, and the layout that says which position plays which role."""

from dataclasses import dataclass
from enum import IntEnum

import torch
from jaxtyping import Int, Int8
from torch import Tensor

NO_LABEL = -100


class Role(IntEnum):
    """What a position is for. Values of `Layout.roles`."""

    FILLER = 0
    KEY = 1
    VALUE = 2
    QUERY = 3
    START = 4
    BLOCK = 5


@dataclass(frozen=True)
class Layout:
    """Roles by position, and which positions belong together.

    Pair p of an example is bound as `key_pos[:, p]` → `value_pos[:, p]`; query q asks for pair
    `query_pair[:, q]` at `query_pos[:, q]`. Tasks without pairs leave these None. `period` is the
    block length of repeated sequences: tokens at i and i + period are equal from position 1 on.
    """

    roles: Int8[Tensor, "batch pos"]
    key_pos: Int[Tensor, "batch pair"] | None = None
    value_pos: Int[Tensor, "batch pair"] | None = None
    query_pos: Int[Tensor, "batch query"] | None = None
    query_pair: Int[Tensor, "batch query"] | None = None
    period: int | None = None

    def answer_pos(self) -> Int[Tensor, "batch query"]:
        """Position of the context value each query asks for."""
        if self.value_pos is None or self.query_pair is None:
            raise ValueError("this layout has no key-value pairs")
        return self.value_pos.gather(1, self.query_pair)


@dataclass(frozen=True)
class Batch:
    """Tokens with labels (−100 where there is none) and their layout."""

    tokens: Int[Tensor, "batch pos"]
    labels: Int[Tensor, "batch pos"]
    layout: Layout

    def labelled(self) -> tuple[Int[Tensor, " label"], Int[Tensor, " label"]]:
        """Flat indices (row · length + pos) of labelled positions, and the labels there."""
        flat = self.labels.reshape(-1)
        where = (flat != NO_LABEL).nonzero().squeeze(1)
        return where, flat[where]

    def to(self, device: torch.device | str) -> "Batch":
        """Tokens and labels on `device`; the layout stays on the CPU."""
        return Batch(self.tokens.to(device), self.labels.to(device), self.layout)

    def __len__(self) -> int:
        return len(self.tokens)
