"""Echo: random tokens, and at every third position a cue; the answer is the token two positions before it."""

from typing import ClassVar, Literal

import numpy as np
import torch
from pydantic import Field

from circuitscope.tasks import NO_LABEL, Batch, Layout, Role, TokenTask, register
from circuitscope.tasks.streams import I64, below, words

CUE = Role.add("cue", "#E69F00", "asks for the token two positions before")


@register("echo")
class Echo(TokenTask):
    """Say the token two positions back wherever token 0 stands."""

    name: Literal["echo"] = "echo"
    length: int = Field(default=24, ge=6, multiple_of=3, description="sequence length, a multiple of 3")
    roles = (Role.FILLER, CUE)
    small: ClassVar = {"vocab_size": 32, "length": 12}

    @property
    def max_length(self) -> int:
        return self.length

    def generate(self, key: int, examples: I64) -> Batch:
        tokens = 1 + below(words(key, examples, self.length), self.vocab_size - 1)
        labels = np.full_like(tokens, NO_LABEL)
        roles = np.full(tokens.shape, Role.FILLER, dtype=np.int8)
        labels[:, 2::3], tokens[:, 2::3], roles[:, 2::3] = tokens[:, 0::3], 0, CUE
        return Batch(torch.from_numpy(tokens), torch.from_numpy(labels), Layout(torch.from_numpy(roles)))
