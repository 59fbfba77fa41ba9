"""What all recall tasks share: a context that binds values to keys, then queries scattered over the rest.

A task says what its context is. Here the queries get their places, and tokens, labels and layout are put together.
"""

from abc import abstractmethod
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from math import log
from typing import Annotated, Any

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from pydantic import Field, model_validator
from torch import Tensor

from circuitscope.errors import UserError
from circuitscope.section import DefaultBy, Unit
from circuitscope.tasks.base import Baseline
from circuitscope.tasks.batch import NO_LABEL, Batch, Layout
from circuitscope.tasks.roles import Role
from circuitscope.tasks.streams import I64, order, stream_key, uniform, words
from circuitscope.tasks.token_task import TokenTask

I8 = NDArray[np.int8]

_ROWS_AT_ONCE = 2048  # bounds the working memory of a large request


@dataclass(frozen=True)
class Context:
    """What some examples bind, and how it can be asked for.

    tokens, roles  [example, pos] of the context
    key_pos        [example, pair], where the keys stand; None if key and value share a position
    value_pos      [example, pair], where the values stand
    values         [example, pair], the tokens that answer with the values
    asked          [example, key, part], the tokens that ask for each key, which stand side by side
    asked_roles    [example, key, part], their roles
    asked_pair     [example, key, part], the pair whose value is the label there; −1 where there is no label
    """

    tokens: I64
    roles: I8
    key_pos: I64 | None
    value_pos: I64
    values: I64
    asked: I64
    asked_roles: I8
    asked_pair: I64


class Recall(TokenTask):
    """The fields and the generator of recall tasks.

    After the context come slots, each as long as a query and one token of filler. As many as there are queries are
    drawn with p_i ∝ a · i^(a−1), i = 1..S (`power` is a), and matched with the keys at random.
    """

    length: Annotated[int, Unit("tokens")] = Field(
        default=64, ge=4, le=2**24, description="length L of a sequence: the context, and a slot for each pair"
    )
    pairs: Annotated[int, Unit("pairs")] = Field(
        default=4, ge=1, lt=2**31, description="keys k that are bound to values at the start of a sequence"
    )
    queries: Annotated[int | None, Unit("queries"), DefaultBy("none: every key, so as many as pairs")] = Field(
        default=None, ge=1, description="how many of the keys are asked for, each once"
    )
    power: float = Field(
        default=0.01,
        gt=0,
        le=64,
        description="exponent a of the chance a · i^(a - 1) that the i-th slot holds a query; 1: all slots alike,"
        " near 0: mostly the first slots",
    )

    @abstractmethod
    def context_length(self, pairs: int) -> int:
        """The positions that a context with so many pairs takes; it grows with them."""

    @abstractmethod
    def most_pairs(self) -> tuple[int, str]:
        """How many pairs the vocabulary allows, and the same as a formula."""

    @abstractmethod
    def context(self, key: int, examples: I64) -> Context:
        """The contexts of the examples."""

    @property
    def slot(self) -> int:
        """The length of a slot: a query of one token, and one of filler."""
        return 2

    @property
    def passes_made(self) -> int:
        """How often a context names each pair."""
        return 1

    @model_validator(mode="after")
    def _enough_room(self) -> "Recall":
        """Refuses sizes that do not fit, with the inequality that they break."""

        def needed(pairs: int) -> int:
            return self.context_length(pairs) + self.slot * pairs

        most = bisect_right(range(1, self.pairs + 1), self.length, key=needed)
        if most < self.pairs:
            raise UserError(
                f"pairs must be at most {most} at length {self.length}, got {self.pairs}; {self.pairs} need a length of"
                f" at least {needed(self.pairs)}"
            )
        most, formula = self.most_pairs()
        if self.pairs > most:
            raise UserError(
                f"pairs must be at most {formula} = {most} at vocab_size {self.vocab_size}, got {self.pairs}"
            )
        if self.queries is not None and self.queries > self.pairs:
            raise UserError(f"queries must be at most pairs = {self.pairs}, got {self.queries}")
        return self

    @property
    def max_length(self) -> int:
        return self.length

    def sizes(self) -> dict[str, int]:
        return {"length": self.length, "pairs": self.pairs}

    @property
    def chance(self) -> float:
        """The accuracy of answering with any value of the context."""
        return 1 / self.pairs

    @property
    def possible_values(self) -> int | None:
        """How many tokens may be a label, if each is one equally often; None where that is not known."""
        return None

    @property
    def context_free(self) -> float | None:
        return None if self.possible_values is None else log(self.possible_values)

    @property
    def baselines(self) -> Mapping[str, Baseline]:
        return {"any value of the context": any_value}

    def generate(self, key: int, examples: I64) -> Batch:
        tokens = np.empty((len(examples), self.length), dtype=np.int64)
        labels = np.full_like(tokens, NO_LABEL)
        roles = np.full(tokens.shape, Role.FILLER, dtype=np.int8)
        placed = []
        for start in range(0, len(examples), _ROWS_AT_ONCE):
            rows = slice(start, start + _ROWS_AT_ONCE)
            placed.append(self._fill(key, examples[rows], tokens[rows], labels[rows], roles[rows]))
        positions = {name: torch.cat([torch.from_numpy(some[name]) for some in placed]) for name in placed[0]}
        layout = Layout(torch.from_numpy(roles), passes=self.passes_made, **positions)
        return Batch(torch.from_numpy(tokens), torch.from_numpy(labels), layout)

    def _fill(self, key: int, examples: I64, tokens: I64, labels: I64, roles: I8) -> dict[str, I64]:
        """Writes examples into arrays [example, pos]; gives the positions of their layout."""
        context = self.context(key, examples)
        n, start = context.tokens.shape
        here = np.arange(n)[:, None]
        slots, chosen = self._queries(key, examples, start)
        tokens[:, :start], roles[:, :start] = context.tokens, context.roles
        tokens[:, start:] = self._filler(key, examples, context)
        at = (start + self.slot * slots[:, :, None] + np.arange(context.asked.shape[2])).reshape(n, -1)
        tokens[here, at] = context.asked[here, chosen].reshape(n, -1)
        roles[here, at] = context.asked_roles[here, chosen].reshape(n, -1)
        pair = context.asked_pair[here, chosen].reshape(n, -1)
        labelled = pair >= 0  # as many in every example
        query_pos, query_pair = at[labelled].reshape(n, -1), pair[labelled].reshape(n, -1)
        labels[here, query_pos] = context.values[here, query_pair]
        keys = {"values": context.values} if context.key_pos is None else {"key_pos": context.key_pos}
        return {"value_pos": context.value_pos, "query_pos": query_pos, "query_pair": query_pair, **keys}

    def _queries(self, key: int, examples: I64, start: int) -> tuple[I64, I64]:
        """The slots of the queries and the key that each asks for, both [example, query].

        To draw q slots with weights p without replacement, it takes the q smallest of Exp(1) / p_i, in order of size.
        """
        count, n_slots = self.queries or self.pairs, (self.length - start) // self.slot
        weight = np.arange(1, n_slots + 1, dtype=np.float64) ** (self.power - 1)
        race = -np.log(uniform(words(stream_key(key, "slots"), examples, n_slots))) / weight
        return _smallest(race, count), self._asked(key, examples, count)

    def _asked(self, key: int, examples: I64, count: int) -> I64:
        """The key that each query asks for, in the order in which their slots were drawn."""
        return order(words(stream_key(key, "order"), examples, self.pairs))[:, :count]

    def _filler(self, key: int, examples: I64, context: Context) -> I64:
        """Tokens for every position after the context [example, pos], of which queries overwrite some: token 0."""
        return np.zeros((len(examples), self.length - context.tokens.shape[1]), dtype=np.int64)


def any_value(batch: Batch) -> Float[Tensor, " label"]:
    """How often an arbitrary value of the context is right at each label: the share of values that equal the label."""
    where, target = batch.labelled()
    values = batch.values()[where // batch.length]
    same = values == target[:, None]
    return (same.all(dim=2) if same.ndim == 3 else same).double().mean(dim=1)


def in_rows(roles: list[Role], n: int) -> I8:
    """The same roles for n examples."""
    return np.tile(np.array(roles, dtype=np.int8), (n, 1))


def one_token_queries(keys: I64, pair: I64) -> dict[str, Any]:
    """The parts of a `Context` that say how to ask with one token per key: keys and pairs are [example, key]."""
    return {
        "asked": keys[:, :, None],
        "asked_roles": np.full((*keys.shape, 1), Role.QUERY, dtype=np.int8),
        "asked_pair": np.broadcast_to(pair, keys.shape)[:, :, None],
    }


def _smallest(x: NDArray[np.float64], count: int) -> I64:
    """The indices of the `count` smallest entries of each row, in increasing order of the entry."""
    if count < x.shape[1]:
        part = np.argpartition(x, count - 1, axis=1)[:, :count]
    else:
        part = np.broadcast_to(np.arange(x.shape[1]), x.shape)
    by_value = np.argsort(np.take_along_axis(x, part, axis=1), axis=1)
    return np.take_along_axis(part, by_value, axis=1)
