"""Multi-query associative recall, and AR, its one-query form.

k1 v1 k2 v2 … kk vk | filler k2 filler … k1 filler …
                              ↓           ↓
                             v2          v1          (labels; the answers are not in the input)

Three fields make it harder: the context comes in several passes, keys are bound again, noise stands between the pairs.
"""

from typing import Annotated, ClassVar, Literal

import numpy as np
from jaxtyping import Float
from pydantic import Field, model_validator
from torch import Tensor

from circuitscope.errors import UserError
from circuitscope.section import Added, Unit
from circuitscope.tasks.base import register
from circuitscope.tasks.batch import Batch
from circuitscope.tasks.recall import Context, Recall, one_token_queries
from circuitscope.tasks.roles import Role
from circuitscope.tasks.streams import I64, below, distinct, order, stream_key, words


@register("mqar")
class MQAR(Recall):
    """k keys bound to k values, then queries scattered over the rest of the sequence.

    Keys are distinct tokens of [1, V/2), values are distinct tokens of [V/2, V). With `shared_vocabulary`
    both come from [1, V), and the tokens of an example's pairs are distinct. Every second position after the
    context is a query slot. The label of a query stands at the query's own position.

    With `passes` p the context is repeated p times, the pairs in a new order each time. With `updates` u (forgetting)
    u of the keys are bound twice, to different values, and the last binding counts; the k + u bindings stand in random
    order. With `noise` so many tokens of a vocabulary of their own, the last V/8 tokens, stand between the pairs.
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
    slots_in_draw_order: bool = Field(
        default=False,
        description="true: the first pair gets the slot drawn first, and so on, as in the public benchmark, so that the"
        " slot reveals the key; false: slots and keys are matched at random",
    )
    passes: Annotated[int, Added(4, before=1), Unit("passes")] = Field(
        default=1, ge=1, le=2**20, description="how often the context names all pairs, in a new order each time"
    )
    updates: Annotated[int, Added(4, before=0), Unit("keys")] = Field(
        default=0,
        ge=0,
        le=2**20,
        description="how many of the keys are bound a second time, to another value; the last binding counts",
    )
    noise: Annotated[int, Added(4, before=0), Unit("tokens")] = Field(
        default=0,
        ge=0,
        le=2**20,
        description="tokens of noise between the pairs, from the last vocab_size / 8 tokens, which are then no values",
    )

    @model_validator(mode="after")
    def _possible(self) -> "MQAR":
        if self.length % 2:
            raise UserError(f"length must be even, got {self.length}; try {self.length + 1}")
        if self.updates > self.pairs:
            raise UserError(f"updates must be at most pairs = {self.pairs}, got {self.updates}")
        if self.updates and self.passes > 1:
            raise UserError(
                f"a context of several passes binds no key again: expected passes 1 or updates 0, got {self.passes} and"
                f" {self.updates}"
            )
        if self.noise and self.vocab_size < 8:
            raise UserError(f"noise needs a vocab_size of at least 8, got {self.vocab_size}")
        return self

    def context_length(self, pairs: int) -> int:
        return 2 * (self.passes * pairs + self.updates) + self.noise

    def most_pairs(self) -> tuple[int, str]:
        half = self.vocab_size // 2
        values = (self._quiet - 1 - self.updates) // 2 if self.shared_vocabulary else self._quiet - half - self.updates
        if values < half - 1:
            return max(0, values), "the values that noise and updates leave"
        return half - 1, "vocab_size / 2 - 1"

    @property
    def passes_made(self) -> int:
        return self.passes

    @property
    def chance(self) -> float:
        """The accuracy of answering with any value of the context, of which updates add some."""
        return 1 / (self.pairs + self.updates)

    @property
    def possible_values(self) -> int:
        return self._quiet - (1 if self.shared_vocabulary else self.vocab_size // 2)

    @property
    def _quiet(self) -> int:
        """The tokens that are not noise."""
        return self.vocab_size - (self.vocab_size // 8 if self.noise else 0)

    def outcomes(self, batch: Batch, logits: Float[Tensor, "label vocab"]) -> dict[str, Float[Tensor, " label"]]:
        """Accuracy; with updates also on the keys that were bound again and on the others."""
        found = super().outcomes(batch, logits)
        if not self.updates:
            return found
        pair = batch.layout.query_pair
        assert pair is not None
        assert batch.layout.query_pos is not None
        right = found[self.metric]
        again = pair.gather(1, batch.layout.query_pos.argsort(dim=1)).flatten() >= self.pairs
        again = again.to(right.device)
        return {
            **found,
            "accuracy on updated keys": right.where(again, float("nan")),
            "accuracy on untouched keys": right.where(~again, float("nan")),
        }

    def context(self, key: int, examples: I64) -> Context:
        k, here = self.pairs, np.arange(len(examples))[:, None]
        keys, values = self._pairs(key, examples)
        bound = np.concatenate([np.tile(np.arange(k), self.passes), np.arange(self.updates)])  # the key of each pair
        last = np.concatenate([k + np.arange(self.updates), np.arange(self.updates, k)])  # the pair of each key
        at = self._key_pos(key, examples)
        tokens = np.empty((len(examples), self.context_length(k)), dtype=np.int64)
        roles = np.full(tokens.shape, Role.FILLER, dtype=np.int8)
        if self.noise:
            w = words(stream_key(key, "noise"), examples, tokens.shape[1])
            tokens[:] = self._quiet + below(w, self.vocab_size - self._quiet)
        tokens[here, at], tokens[here, at + 1] = keys[:, bound], values
        roles[here, at], roles[here, at + 1] = Role.KEY, Role.VALUE
        return Context(tokens, roles, at, at + 1, values, **one_token_queries(keys, last))

    def _pairs(self, key: int, examples: I64) -> tuple[I64, I64]:
        """Keys [example, key] and values [example, pair]; the pairs of an update stand behind those of the keys."""
        k, half, count = self.pairs, self.vocab_size // 2, self.pairs + self.updates
        if self.shared_vocabulary:
            both = 1 + distinct(words(stream_key(key, "pairs"), examples, 2 * (k + count)), self._quiet - 1)
            keys, values = both[:, :k], both[:, k:]
        else:
            keys = 1 + distinct(words(stream_key(key, "keys"), examples, 2 * k), half - 1)
            values = half + distinct(words(stream_key(key, "values"), examples, 2 * count), self._quiet - half)
        return keys, np.tile(values, (1, self.passes))

    def _key_pos(self, key: int, examples: I64) -> I64:
        """Where the key of each pair stands [example, pair]; its value stands behind it."""
        k, n = self.pairs, len(examples)
        place = np.tile(np.arange(k * self.passes + self.updates), (n, 1))  # which pair of the context it is, from 0
        for i in range(1, self.passes):
            place[:, i * k : (i + 1) * k] = i * k + order(words(stream_key(key, "pass", i), examples, k))
        if self.updates:
            place = order(words(stream_key(key, "bindings"), examples, k + self.updates))
            twice = np.sort(np.stack([place[:, : self.updates], place[:, k:]]), axis=0)
            place[:, : self.updates], place[:, k:] = twice
        if not self.noise:
            return 2 * place
        units = order(words(stream_key(key, "between"), examples, place.shape[1] + self.noise))
        before = np.sort(units[:, : place.shape[1]], axis=1)  # how many units stand before each pair
        return np.take_along_axis(before, place, axis=1) + place

    def _asked(self, key: int, examples: I64, count: int) -> I64:
        if self.slots_in_draw_order:
            return np.tile(np.arange(count), (len(examples), 1))
        return super()._asked(key, examples, count)

    def _filler(self, key: int, examples: I64, context: Context) -> I64:
        shape = (len(examples), self.length - context.tokens.shape[1])
        if self.filler == "zero":
            return super()._filler(key, examples, context)
        w = words(stream_key(key, "filler"), examples, shape[1])
        if self.filler == "random":
            return below(w, self.vocab_size)
        tokens = below(w, self.vocab_size - self.pairs)
        for one_key in np.sort(context.asked[:, :, 0], axis=1).T:  # step over the keys, smallest first
            tokens += tokens >= one_key[:, None]
        return tokens


@register("ar")
class AR(MQAR):
    """Associative recall: MQAR with one query and the small vocabulary of the older task."""

    small: ClassVar = {"length": 16, "pairs": 3}

    name: Literal["ar"] = "ar"  # type: ignore[assignment]
    vocab_size: Annotated[int, Unit("tokens")] = Field(default=50, ge=4, lt=2**31, description="size of the vocabulary")
    queries: Annotated[int, Unit("queries")] = Field(default=1, ge=1, le=1, description="always one in AR")
