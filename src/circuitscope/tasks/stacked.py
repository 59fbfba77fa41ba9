"""Recall where a key and its value share a position, so that nothing has to be bound before it is recalled.

Of a model that fails at MQAR and solves this, one knows that it can recall and cannot bind.
"""

from math import isqrt
from typing import Annotated, ClassVar, Literal

import numpy as np
from pydantic import Field

from circuitscope.section import Unit
from circuitscope.tasks.base import register
from circuitscope.tasks.recall import Context, Recall, in_rows, one_token_queries
from circuitscope.tasks.roles import Role
from circuitscope.tasks.streams import I64, distinct, stream_key, words


@register("stacked_mqar")
class StackedMQAR(Recall):
    """MQAR with a key and its value in one token; a query is the key alone.

    The vocabulary is a product. With s = ⌊√V⌋ − 1 there are s keys (tokens 1 to s), s values (s + 1 to 2s) and s²
    pairs: the pair of key a and value b, counted from 0, is token 2s + 1 + a · s + b. Token 0 is filler. The label
    of a query is the value. Nothing tells a model that two pairs have the same key: its embedding has to learn that.
    """

    roles = (Role.PAIR, Role.QUERY, Role.FILLER)
    features = frozenset({"answers"})
    small: ClassVar = {"length": 14, "pairs": 3, "vocab_size": 81}
    about_roles: ClassVar = {Role.PAIR: "a key and its value in one token, shown as key:value"}
    recipe: ClassVar = {
        "task.examples": None,
        "task.length": 12,
        "model.n_layers": 1,
        "train.lr": 3e-3,
        "train.weight_decay": 0.1,
        "train.schedule": "cosine",
        "train.steps": 600,
    }

    name: Literal["stacked_mqar"] = "stacked_mqar"
    vocab_size: Annotated[int, Unit("tokens")] = Field(
        default=289, ge=4, lt=2**31, description="size V of the vocabulary, for √V - 1 keys and as many values"
    )
    length: Annotated[int, Unit("tokens")] = Field(
        default=32, ge=4, le=2**24, description="length L of a sequence; at least 3 · pairs"
    )

    def context_length(self, pairs: int) -> int:
        return pairs

    def most_pairs(self) -> tuple[int, str]:
        return self._symbols, "√vocab_size - 1"

    @property
    def possible_values(self) -> int:
        return self._symbols

    @property
    def _symbols(self) -> int:
        return isqrt(self.vocab_size) - 1

    def spelled(self, token: int) -> str:
        """A pair as its key and its value, each by the number of the token that it has alone."""
        s = self._symbols
        if not 2 * s < token <= 2 * s + s * s:
            return str(token)
        key, value = divmod(token - 2 * s - 1, s)
        return f"{1 + key}:{s + 1 + value}"

    def context(self, key: int, examples: I64) -> Context:
        k, s, n = self.pairs, self._symbols, len(examples)
        keys = distinct(words(stream_key(key, "keys"), examples, 2 * k), s)
        values = distinct(words(stream_key(key, "values"), examples, 2 * k), s)
        at = np.tile(np.arange(k), (n, 1))
        queries = one_token_queries(1 + keys, np.arange(k))
        return Context(2 * s + 1 + keys * s + values, in_rows([Role.PAIR] * k, n), None, at, s + 1 + values, **queries)
