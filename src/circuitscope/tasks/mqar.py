"""Multi-query associative recall, and AR, its one-query form.

k1 v1 k2 v2 … kk vk | filler k2 filler … k1 filler …
                              ↓           ↓
                             v2          v1          (labels; the answers are not in the input)
"""

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from pydantic import Field, model_validator
from torch import Tensor

from circuitscope.errors import UserError
from circuitscope.section import DefaultBy, Unit
from circuitscope.tasks.base import Baseline, register
from circuitscope.tasks.batch import NO_LABEL, Batch, Layout
from circuitscope.tasks.roles import Role
from circuitscope.tasks.streams import I64, below, distinct, order, stream_key, uniform, words
from circuitscope.tasks.token_task import TokenTask

_ROWS_AT_ONCE = 2048  # bounds the working memory of a large request


@register("mqar")
class MQAR(TokenTask):
    """k keys bound to k values, then queries scattered over the rest of the sequence.

    Keys are distinct tokens of [1, V/2), values are distinct tokens of [V/2, V). With `shared_vocabulary`
    both come from [1, V), and the 2k tokens of an example are distinct. Every second position after the
    context is a query slot; k distinct slots are drawn with p_i ∝ a · i^(a−1), i = 1..S (`power` is a).
    The label of a query stands at the query's own position.
    """

    roles = (Role.KEY, Role.VALUE, Role.QUERY, Role.FILLER)
    features = frozenset({"pairs"})
    small: ClassVar = {"length": 24, "pairs": 3, "vocab_size": 64}

    name: Literal["mqar"] = "mqar"
    length: Annotated[int, Unit("tokens")] = Field(
        default=64, ge=4, le=2**24, description="length L of a sequence; even, and at least 4 · pairs"
    )
    pairs: Annotated[int, Unit("pairs")] = Field(
        default=4, ge=1, description="key-value pairs k at the start of a sequence; at most vocab_size / 2 - 1"
    )
    queries: Annotated[int | None, Unit("queries"), DefaultBy("none: every key, so as many as pairs")] = Field(
        default=None, ge=1, description="how many of the keys are asked for, each once"
    )
    examples: Annotated[int | None, Unit("examples")] = Field(
        default=20_000,
        ge=1,
        lt=2**40,
        description="size of the training set, gone through in a new order each epoch; none: no example repeats",
    )
    filler: Literal["clean", "random", "zero"] = Field(
        default="clean",
        description="tokens that stand between the queries: random ones that are not keys of the example (clean),"
        " any random tokens (random: about 0.025 false bindings per example at the default size),"
        " or token 0 (zero)",
    )
    shared_vocabulary: bool = Field(
        default=False,
        description="true: keys and values are drawn from one vocabulary; false: keys from its first half, values from"
        " its second",
    )
    power: float = Field(
        default=0.01,
        gt=0,
        le=64,
        description="exponent a of the chance a · i^(a - 1) that the i-th slot holds a query; 1: all slots alike,"
        " near 0: mostly the first slots",
    )
    slots_in_draw_order: bool = Field(
        default=False,
        description="true: the first pair gets the slot drawn first, and so on, as in the public benchmark, so that the"
        " slot reveals the key; false: slots and keys are matched at random",
    )

    @model_validator(mode="after")
    def _possible(self) -> "MQAR":
        if self.length % 2:
            raise UserError(f"length must be even, got {self.length}; try {self.length + 1}")
        if 4 * self.pairs > self.length:
            raise UserError(
                f"pairs must be at most length / 4 = {self.length // 4} at length {self.length}, got {self.pairs}"
            )
        most = self.vocab_size // 2 - 1
        if self.pairs > most:
            raise UserError(
                f"pairs must be at most vocab_size / 2 - 1 = {most} at vocab_size {self.vocab_size}, got {self.pairs}"
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
    def baselines(self) -> Mapping[str, Baseline]:
        return {"any value of the context": any_value}

    def generate(self, key: int, examples: I64) -> Batch:
        n, k, q = len(examples), self.pairs, self.queries or self.pairs
        tokens = np.empty((n, self.length), dtype=np.int64)
        labels = np.full((n, self.length), NO_LABEL, dtype=np.int64)
        roles = np.zeros((n, self.length), dtype=np.int8)
        query_pos = np.empty((n, q), dtype=np.int64)
        query_pair = np.empty((n, q), dtype=np.int64)
        roles[:, 0 : 2 * k : 2] = Role.KEY
        roles[:, 1 : 2 * k : 2] = Role.VALUE
        for start in range(0, n, _ROWS_AT_ONCE):
            rows = slice(start, start + _ROWS_AT_ONCE)
            here = np.arange(min(_ROWS_AT_ONCE, n - start))[:, None]
            keys, values = self._pairs(key, examples[rows])
            slots, asked = self._queries(key, examples[rows], q)
            query_pos[rows], query_pair[rows] = slots, asked
            out = tokens[rows]
            out[:, 0 : 2 * k : 2], out[:, 1 : 2 * k : 2] = keys, values
            out[:, 2 * k :] = self._filler(key, examples[rows], keys)
            out[here, slots] = keys[here, asked]
            labels[rows][here, slots] = values[here, asked]
            roles[rows][here, slots] = Role.QUERY
        context = torch.arange(2 * k).reshape(k, 2)
        layout = Layout(
            roles=torch.from_numpy(roles),
            key_pos=context[:, 0].expand(n, k),
            value_pos=context[:, 1].expand(n, k),
            query_pos=torch.from_numpy(query_pos),
            query_pair=torch.from_numpy(query_pair),
        )
        return Batch(torch.from_numpy(tokens), torch.from_numpy(labels), layout)

    def _pairs(self, key: int, examples: I64) -> tuple[I64, I64]:
        """Keys and values [example, pair]."""
        k, half = self.pairs, self.vocab_size // 2
        if self.shared_vocabulary:
            both = 1 + distinct(words(stream_key(key, "pairs"), examples, 4 * k), self.vocab_size - 1)
            return both[:, :k], both[:, k:]
        keys = distinct(words(stream_key(key, "keys"), examples, 2 * k), half - 1)
        values = distinct(words(stream_key(key, "values"), examples, 2 * k), self.vocab_size - half)
        return 1 + keys, half + values

    def _queries(self, key: int, examples: I64, q: int) -> tuple[I64, I64]:
        """The positions of the queries and the pair that each asks for, both [example, query].

        To draw q slots with weights p without replacement, it takes the q smallest of Exp(1) / p_i, in order of size.
        """
        n_slots = (self.length - 2 * self.pairs) // 2
        weight = np.arange(1, n_slots + 1, dtype=np.float64) ** (self.power - 1)
        race = -np.log(uniform(words(stream_key(key, "slots"), examples, n_slots))) / weight
        slots = _smallest(race, q)
        if self.slots_in_draw_order:
            asked = np.broadcast_to(np.arange(q), slots.shape)
        else:
            asked = order(words(stream_key(key, "order"), examples, self.pairs))[:, :q]
        return 2 * self.pairs + 2 * slots, asked

    def _filler(self, key: int, examples: I64, keys: I64) -> I64:
        """Tokens for every position after the context [example, pos]; queries overwrite some."""
        shape = (len(examples), self.length - 2 * self.pairs)
        if self.filler == "zero":
            return np.zeros(shape, dtype=np.int64)
        w = words(stream_key(key, "filler"), examples, shape[1])
        if self.filler == "random":
            return below(w, self.vocab_size)
        tokens = below(w, self.vocab_size - self.pairs)
        for one_key in np.sort(keys, axis=1).T:  # step over the keys, smallest first
            tokens += tokens >= one_key[:, None]
        return tokens


@register("ar")
class AR(MQAR):
    """Associative recall: MQAR with one query and the small vocabulary of the older task."""

    small: ClassVar = {"length": 16, "pairs": 3}

    name: Literal["ar"] = "ar"  # type: ignore[assignment]
    vocab_size: Annotated[int, Unit("tokens")] = Field(default=50, ge=4, lt=2**31, description="size of the vocabulary")
    queries: Annotated[int, Unit("queries")] = Field(default=1, ge=1, le=1, description="always one in AR")


def any_value(batch: Batch) -> Float[Tensor, " label"]:
    """How often an arbitrary value of the context is right at each label: the share of values that equal the label."""
    if batch.layout.value_pos is None:
        raise ValueError("this layout has no key-value pairs")
    where, target = batch.labelled()
    values = batch.tokens.gather(1, batch.layout.value_pos)[where // batch.tokens.shape[1]]
    return (values == target[:, None]).double().mean(dim=1)


def _smallest(x: NDArray[np.float64], count: int) -> I64:
    """The indices of the `count` smallest entries of each row, in increasing order of the entry."""
    if count < x.shape[1]:
        part = np.argpartition(x, count - 1, axis=1)[:, :count]
    else:
        part = np.broadcast_to(np.arange(x.shape[1]), x.shape)
    by_value = np.argsort(np.take_along_axis(x, part, axis=1), axis=1)
    return np.take_along_axis(part, by_value, axis=1)
