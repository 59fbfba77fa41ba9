"""Repeated random blocks, the sequences on which prefix matching is scored."""

from typing import Annotated, ClassVar, Literal

import numpy as np
import torch
from pydantic import Field, model_validator

from circuitscope.errors import UserError
from circuitscope.section import Unit
from circuitscope.tasks.base import register
from circuitscope.tasks.batch import NO_LABEL, Batch, Layout
from circuitscope.tasks.roles import Role
from circuitscope.tasks.streams import I64, distinct, words
from circuitscope.tasks.token_task import TokenTask


@register("induction")
class Induction(TokenTask):
    """`0 s s … s`: a start token, then a block s of n distinct random tokens, r times.

    From the second repeat on, where the next token can be known, it is the label.
    """

    roles = (Role.START, Role.BLOCK)
    features = frozenset({"period"})
    small: ClassVar = {"block": 6, "repeats": 3, "vocab_size": 64}

    name: Literal["induction"] = "induction"
    block: Annotated[int, Unit("tokens")] = Field(
        default=25, ge=2, le=2**20, description="length n of the block; less than vocab_size"
    )
    repeats: Annotated[int, Unit("blocks")] = Field(
        default=4, ge=2, le=2**20, description="how often the block occurs, r; a sequence has 1 + n · r tokens"
    )

    @model_validator(mode="after")
    def _possible(self) -> "Induction":
        if self.block > self.vocab_size - 1:
            raise UserError(f"block must be at most vocab_size - 1 = {self.vocab_size - 1}, got {self.block}")
        return self

    @property
    def max_length(self) -> int:
        return 1 + self.block * self.repeats

    def sizes(self) -> dict[str, int]:
        return {"block": self.block}

    @classmethod
    def fitting(cls, max_length: int, vocab_size: int) -> "Induction":
        """The longest of these sequences that a model can take: 25 × 4 if it fits."""
        block = min(25, (max_length - 1) // 4, vocab_size - 1)
        if block < 2:
            raise UserError(f"induction sequences need at least 9 positions, the model has {max_length}")
        return cls(block=block, repeats=4, vocab_size=vocab_size)

    def generate(self, key: int, examples: I64) -> Batch:
        block = 1 + distinct(words(key, examples, 2 * self.block), self.vocab_size - 1)
        tokens = np.zeros((len(examples), self.max_length), dtype=np.int64)
        tokens[:, 1:] = np.tile(block, self.repeats)
        labels = np.full_like(tokens, NO_LABEL)
        first = 1 + self.block
        labels[:, first:-1] = tokens[:, first + 1 :]
        roles = np.full(tokens.shape, Role.BLOCK, dtype=np.int8)
        roles[:, 0] = Role.START
        layout = Layout(torch.from_numpy(roles), period=self.block)
        return Batch(torch.from_numpy(tokens), torch.from_numpy(labels), layout)
