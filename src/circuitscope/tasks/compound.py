"""Recall by compound keys: a key is two tokens, and neither alone names the value."""

from math import isqrt
from typing import Annotated, ClassVar, Literal

import numpy as np
from pydantic import Field, model_validator

from circuitscope.errors import UserError
from circuitscope.section import Unit
from circuitscope.tasks.base import register
from circuitscope.tasks.recall import Context, Recall, in_rows
from circuitscope.tasks.roles import Role
from circuitscope.tasks.streams import I64, distinct, order, stream_key, words


@register("compound_recall")
class CompoundRecall(Recall):
    """Keys of two tokens from a √k × √k grid: `a b v`, asked for as `a b`; each part occurs in √k keys.

    First parts come from [1, V/3), second parts from [V/3, 2V/3), values from [2V/3, V). The key of a pair, and the
    query, count as standing at their second token, where the label stands. Filler is token 0.
    """

    roles = (Role.KEY, Role.VALUE, Role.QUERY, Role.FILLER)
    features = frozenset({"pairs"})
    small: ClassVar = {"length": 24, "pairs": 4, "vocab_size": 60}
    about_roles: ClassVar = {
        Role.KEY: "one of the two tokens of a key",
        Role.QUERY: "a key again: at its second token the value is asked for",
    }
    recipe: ClassVar = {
        "task.examples": None,
        "train.lr": 5e-3,
        "train.weight_decay": 0.1,
        "train.schedule": "cosine",
        "train.steps": 800,
    }

    name: Literal["compound_recall"] = "compound_recall"
    vocab_size: Annotated[int, Unit("tokens")] = Field(
        default=192, ge=6, lt=2**31, description="size of the vocabulary, a third for each part and for the values"
    )
    length: Annotated[int, Unit("tokens")] = Field(
        default=32, ge=4, le=2**24, description="length L of a sequence; at least 6 · pairs"
    )
    pairs: Annotated[int, Unit("pairs")] = Field(
        default=4, ge=1, lt=2**31, description="keys k, every pair of two parts; a square number"
    )

    @model_validator(mode="after")
    def _square(self) -> "CompoundRecall":
        side = isqrt(self.pairs)
        if side**2 != self.pairs:
            raise UserError(f"pairs must be a square number, got {self.pairs}; try {side**2} or {(side + 1) ** 2}")
        return self

    def context_length(self, pairs: int) -> int:
        return 3 * pairs

    @property
    def slot(self) -> int:
        return 3

    def most_pairs(self) -> tuple[int, str]:
        third = self.vocab_size // 3
        return min((third - 1) ** 2, self.vocab_size - 2 * third), "the smaller of (vocab_size / 3 - 1)² and a third"

    @property
    def possible_values(self) -> int:
        return self.vocab_size - 2 * (self.vocab_size // 3)

    def context(self, key: int, examples: I64) -> Context:
        n, k, side, third = len(examples), self.pairs, isqrt(self.pairs), self.vocab_size // 3
        first = 1 + distinct(words(stream_key(key, "first"), examples, 2 * side), third - 1)
        second = third + distinct(words(stream_key(key, "second"), examples, 2 * side), third)
        values = 2 * third + distinct(words(stream_key(key, "values"), examples, 2 * k), self.vocab_size - 2 * third)
        cell = order(words(stream_key(key, "grid"), examples, k))  # of the grid, for each place of the context
        keys = [np.take_along_axis(first, cell // side, axis=1), np.take_along_axis(second, cell % side, axis=1)]
        at = np.tile(3 * np.arange(k) + 1, (n, 1))
        pair = np.tile(np.arange(k), (n, 1))
        return Context(
            tokens=np.stack([*keys, values], axis=2).reshape(n, 3 * k),
            roles=in_rows([Role.KEY, Role.KEY, Role.VALUE] * k, n),
            key_pos=at,
            value_pos=at + 1,
            values=values,
            asked=np.stack(keys, axis=2),
            asked_roles=np.full((n, k, 2), Role.QUERY, dtype=np.int8),
            asked_pair=np.stack([np.full_like(pair, -1), pair], axis=2),
        )
