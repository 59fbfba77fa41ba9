"""Repeated random blocks, the sequences on which prefix matching is scored."""

from collections.abc import Mapping
from math import log
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import torch
from jaxtyping import Float
from pydantic import Field, model_validator
from torch import Tensor

from circuitscope.errors import UserError
from circuitscope.section import Added, Unit
from circuitscope.tasks.base import Baseline, register
from circuitscope.tasks.batch import NO_LABEL, Batch, Layout
from circuitscope.tasks.roles import Role
from circuitscope.tasks.streams import I64, below, distinct, words
from circuitscope.tasks.token_task import TokenTask


@register("induction")
class Induction(TokenTask):
    """`0 f … f s s … s`: a start token, some other tokens f, then a block s of distinct random tokens over and over.

    From the second repeat on, where the next token can be known, it is the label. The length of the block and the
    place where it begins are drawn for each sequence, so a position alone does not tell where the answer stands: a
    model has to find the earlier occurrence of the token that it reads. With `varied` false every sequence repeats a
    block of one length from position 1 on; prefix matching is scored on such sequences.
    """

    roles = (Role.START, Role.FILLER, Role.BLOCK)
    features = frozenset({"period"})
    small: ClassVar = {"block": 6, "repeats": 3, "vocab_size": 64}
    recipe: ClassVar = {
        "task.examples": None,
        "train.lr": 2e-3,
        "train.weight_decay": 0.1,
        "train.schedule": "cosine",
        "train.steps": 1000,
    }

    name: Literal["induction"] = "induction"
    vocab_size: Annotated[int, Unit("tokens")] = Field(
        default=512, ge=4, lt=2**31, description="size of the vocabulary"
    )
    block: Annotated[int, Unit("tokens")] = Field(
        default=25, ge=2, le=2**20, description="length n of the longest block; less than vocab_size"
    )
    repeats: Annotated[int, Unit("blocks")] = Field(
        default=4,
        ge=2,
        le=2**20,
        description="how often the longest block occurs, r; a sequence has 1 + n · r tokens",
    )
    varied: Annotated[bool, Added(3, before=False)] = Field(
        default=True,
        description="draw for each sequence the length of its block, from a third of n to n, and the number of tokens"
        " before it, up to a third of n; false: every block has length n and begins at position 1",
    )

    @model_validator(mode="after")
    def _possible(self) -> "Induction":
        if self.block > self.vocab_size - 1:
            raise UserError(f"block must be at most vocab_size - 1 = {self.vocab_size - 1}, got {self.block}")
        return self

    @property
    def max_length(self) -> int:
        return 1 + self.block * self.repeats

    @property
    def periods(self) -> range:
        return range(max(2, -(-self.block // 3)) if self.varied else self.block, self.block + 1)

    @property
    def baselines(self) -> Mapping[str, Baseline]:
        return {"any token of the block": _any_token}

    @property
    def context_free(self) -> float:
        return log(self.vocab_size - 1)

    def sizes(self) -> dict[str, int]:
        return {"block": self.block}

    @classmethod
    def fitting(cls, max_length: int, vocab_size: int) -> "Induction":
        """The longest of these sequences that a model can take: 25 × 4 if it fits."""
        block = min(25, (max_length - 1) // 4, vocab_size - 1)
        if block < 2:
            raise UserError(f"induction sequences need at least 9 positions, the model has {max_length}")
        return cls(block=block, repeats=4, varied=False, vocab_size=vocab_size)

    def generate(self, key: int, examples: I64) -> Batch:
        period, before, drawn = self._draw(key, examples)
        at = np.arange(self.max_length - 1) - before[:, None]  # counted from the first block
        tokens = np.zeros((len(examples), self.max_length), dtype=np.int64)
        tokens[:, 1:] = np.take_along_axis(drawn, np.where(at < 0, self.block - 1 - at, at % period[:, None]), axis=1)
        labels = np.full_like(tokens, NO_LABEL)
        labels[:, 1:-1] = np.where(at[:, :-1] >= period[:, None], tokens[:, 2:], NO_LABEL)
        roles = np.full(tokens.shape, Role.START, dtype=np.int8)
        roles[:, 1:] = np.where(at < 0, Role.FILLER, Role.BLOCK)
        blocks: dict[str, Any] = {"period": torch.from_numpy(period), "first_block": torch.from_numpy(1 + before)}
        return Batch(torch.from_numpy(tokens), torch.from_numpy(labels), Layout(torch.from_numpy(roles), **blocks))

    def _draw(self, key: int, examples: I64) -> tuple[I64, I64, I64]:
        """Per example: the length of its block, how many tokens stand before it, and its tokens: block, then others."""
        n, tokens = self.block, self.vocab_size - 1
        if not self.varied:
            fixed = np.full(len(examples), n), np.zeros(len(examples), dtype=np.int64)
            return *fixed, 1 + distinct(words(key, examples, 2 * n), tokens)
        shortest, others = self.periods.start, min(n // 3, tokens - n)
        drawn = words(key, examples, 2 * (n + others) + 2)
        period, before = shortest + below(drawn[:, -2], n - shortest + 1), below(drawn[:, -1], others + 1)
        return period, before, 1 + distinct(drawn[:, :-2], tokens)


def _any_token(batch: Batch) -> Float[Tensor, " label"]:
    """How often a token of the block is the right one if it is chosen blindly."""
    period = torch.as_tensor(batch.layout.period).expand(len(batch))
    return 1 / period[batch.labelled()[0] // batch.length]
