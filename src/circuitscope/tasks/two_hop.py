"""Recall in two steps: the value of one pair is the key of another."""

from collections.abc import Mapping
from math import log
from typing import Annotated, ClassVar, Literal

import numpy as np
from jaxtyping import Float
from pydantic import Field, model_validator
from torch import Tensor

from circuitscope.errors import UserError
from circuitscope.section import Added, Unit
from circuitscope.tasks.base import Baseline, register
from circuitscope.tasks.batch import Batch
from circuitscope.tasks.recall import Context, Recall, in_rows, one_token_queries
from circuitscope.tasks.roles import Role
from circuitscope.tasks.streams import I64, distinct, order, stream_key, uniform, words


@register("two_hop")
class TwoHop(Recall):
    """Chains a → b → c as pairs `a b` and `b c` in random order; a query a asks for c, the value of its value.

    a comes from [1, V/3), b from [V/3, 2V/3), c from [2V/3, V). The layout has all 2k pairs, and a query asks for the
    pair that ends its chain. Filler is token 0. With `middle` the query a itself asks for b, and the token 0 behind it
    asks for c: a model that is asked for both learns one step and then the other. A share `direct` of the queries
    is b instead of a: these need one step alone.
    """

    roles = (Role.KEY, Role.VALUE, Role.QUERY, Role.FILLER)
    features = frozenset({"pairs"})
    small: ClassVar = {"length": 24, "pairs": 3, "vocab_size": 60}
    about_roles: ClassVar = {Role.QUERY: "a token of a chain again: the end of the chain is asked for"}
    recipe: ClassVar = {
        "task.examples": None,
        "task.middle": True,
        "task.vocab_size": 96,
        "task.pairs": 3,
        "task.length": 24,
        "train.lr": 5e-3,
        "train.weight_decay": 0.1,
        "train.beta2": 0.95,
        "train.schedule": "constant",
        "train.warmup_steps": 100,
        "train.steps": 1000,
    }

    name: Literal["two_hop"] = "two_hop"
    vocab_size: Annotated[int, Unit("tokens")] = Field(
        default=192, ge=6, lt=2**31, description="size of the vocabulary, a third for each place in a chain"
    )
    length: Annotated[int, Unit("tokens")] = Field(
        default=32, ge=4, le=2**24, description="length L of a sequence; at least 6 · pairs"
    )
    pairs: Annotated[int, Unit("chains")] = Field(
        default=4, ge=1, lt=2**31, description="chains k of two pairs each; less than vocab_size / 3"
    )

    direct: Annotated[float, Added(5, before=0.0), Unit("share of the queries")] = Field(
        default=0.0, ge=0, le=1, description="queries that ask with b, from which c is one step away"
    )
    middle: Annotated[bool, Added(6, before=False)] = Field(
        default=False, description="ask for the middle b of a chain at its query, and for the end c behind it"
    )

    @model_validator(mode="after")
    def _one_way_to_teach(self) -> "TwoHop":
        if self.middle and self.direct:
            raise UserError(f"middle asks every chain for both steps: expected direct 0, got {self.direct:g}")
        return self

    def context_length(self, pairs: int) -> int:
        return 4 * pairs

    def most_pairs(self) -> tuple[int, str]:
        return self.vocab_size // 3 - 1, "vocab_size / 3 - 1"

    @property
    def baselines(self) -> Mapping[str, Baseline]:
        return {"any end of a chain": self._any_end, **super().baselines}

    def _any_end(self, batch: Batch) -> Float[Tensor, " label"]:
        """The share of the context's last tokens of a chain that equal each label; of its middle ones for a middle."""
        where, target = batch.labelled()
        values, first_end = batch.values()[where // batch.tokens.shape[1]], 2 * (self.vocab_size // 3)
        alike = (values >= first_end) == (target >= first_end)[:, None]
        return (values == target[:, None]).double().sum(dim=1) / alike.sum(dim=1)

    def outcomes(self, batch: Batch, logits: Float[Tensor, "label vocab"]) -> dict[str, Float[Tensor, " label"]]:
        """Accuracy; where some answers are one step away, also on those and on the ones that need both steps."""
        found = super().outcomes(batch, logits)
        if not (self.direct or self.middle):
            return found
        right = found[self.metric]
        asked = batch.tokens.flatten()[batch.labelled()[0]]
        near = (asked > 0 if self.middle else asked >= self.vocab_size // 3).to(right.device)
        return {
            **found,
            "accuracy on two steps": right.where(~near, float("nan")),
            "accuracy on one step": right.where(near, float("nan")),
        }

    @property
    def possible_values(self) -> int:
        return self.vocab_size - 2 * (self.vocab_size // 3)

    @property
    def context_free(self) -> float | None:
        """With `middle`, half of the labels are middles, and the place of a label tells which."""
        return (log(self.vocab_size // 3) + log(self.possible_values)) / 2 if self.middle else super().context_free

    def context(self, key: int, examples: I64) -> Context:
        n, k, third = len(examples), self.pairs, self.vocab_size // 3
        a = 1 + distinct(words(stream_key(key, "first"), examples, 2 * k), third - 1)
        b = third + distinct(words(stream_key(key, "second"), examples, 2 * k), third)
        c = 2 * third + distinct(words(stream_key(key, "third"), examples, 2 * k), self.vocab_size - 2 * third)
        keys, values = np.concatenate([a, b], axis=1), np.concatenate([b, c], axis=1)
        at = 2 * order(words(stream_key(key, "pairs"), examples, 2 * k))
        tokens = np.empty((n, 4 * k), dtype=np.int64)
        np.put_along_axis(tokens, at, keys, axis=1)
        np.put_along_axis(tokens, at + 1, values, axis=1)
        roles = in_rows([Role.KEY, Role.VALUE] * (2 * k), n)
        if self.middle:
            asked = np.stack([a, np.zeros_like(a)], axis=2)
            pair = np.broadcast_to(np.stack([np.arange(k), k + np.arange(k)], axis=1), asked.shape)
            both = np.full(asked.shape, Role.QUERY, dtype=np.int8)
            return Context(tokens, roles, at, at + 1, values, asked=asked, asked_roles=both, asked_pair=pair)
        near = uniform(words(stream_key(key, "direct"), examples, k)) < self.direct
        asked = np.where(near, b, a)
        return Context(tokens, roles, at, at + 1, values, **one_token_queries(asked, k + np.arange(k)))
