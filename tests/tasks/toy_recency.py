"""A task as another package would bring it: which of two marks stood there last? With a role of its own."""

from typing import ClassVar, Literal

import numpy as np
import torch
from pydantic import Field

from circuitscope.tasks import NO_LABEL, Batch, Layout, Role, TokenTask, register
from circuitscope.tasks.streams import I64, below, words

MARK = Role.add("mark", "#F0E442", "one of the two tokens to tell apart")


@register("recency")
class Recency(TokenTask):
    """Marks 1 and 2 come in random order; at the end, after a 0, the last mark is asked for."""

    roles = (MARK, Role.QUERY)
    small: ClassVar = {"length": 6, "vocab_size": 4}

    name: Literal["recency"] = "recency"
    length: int = Field(default=8, ge=2, description="sequence length")

    @property
    def max_length(self) -> int:
        return self.length

    @property
    def chance(self) -> float:
        return 0.5

    def generate(self, key: int, examples: I64) -> Batch:
        tokens = 1 + below(words(key, examples, self.length), 2)
        tokens[:, -1] = 0
        labels = np.full_like(tokens, NO_LABEL)
        labels[:, -1] = tokens[:, -2]
        roles = np.full(tokens.shape, MARK, dtype=np.int8)
        roles[:, -1] = Role.QUERY
        return Batch(torch.from_numpy(tokens), torch.from_numpy(labels), Layout(torch.from_numpy(roles)))
