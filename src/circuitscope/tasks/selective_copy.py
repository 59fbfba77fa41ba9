"""Selective copying: some tokens among noise, which are to be said again in order."""

from collections.abc import Mapping
from math import log
from typing import Annotated, ClassVar, Literal

import numpy as np
import torch
from pydantic import Field, model_validator

from circuitscope.errors import UserError
from circuitscope.section import Unit
from circuitscope.tasks.base import Baseline, register
from circuitscope.tasks.batch import NO_LABEL, Batch, Layout
from circuitscope.tasks.recall import any_value
from circuitscope.tasks.roles import Role
from circuitscope.tasks.streams import I64, distinct, order, stream_key, words
from circuitscope.tasks.token_task import TokenTask

NOISE, ASK = 0, 1


@register("selective_copy")
class SelectiveCopy(TokenTask):
    """Tokens at random places among noise (token 0); at the end, as many times token 1 asks for them, in their order.

    The tokens of a sequence are distinct, from [2, V). The i-th question has the i-th of them as label.
    """

    roles = (Role.VALUE, Role.QUERY, Role.FILLER)
    features = frozenset({"answers"})
    small: ClassVar = {"length": 20, "copied": 4, "vocab_size": 32}
    about_roles: ClassVar = {Role.VALUE: "a token to copy", Role.QUERY: "the next token to copy is asked for"}
    recipe: ClassVar = {
        "task.examples": None,
        "train.lr": 3e-3,
        "train.weight_decay": 0.1,
        "train.schedule": "cosine",
        "train.steps": 1500,
    }

    name: Literal["selective_copy"] = "selective_copy"
    vocab_size: Annotated[int, Unit("tokens")] = Field(default=32, ge=4, lt=2**31, description="size of the vocabulary")
    length: Annotated[int, Unit("tokens")] = Field(
        default=64, ge=4, le=2**24, description="length L of a sequence, the questions included"
    )
    copied: Annotated[int, Unit("tokens")] = Field(
        default=8, ge=1, description="tokens m to copy; at most length / 2 and vocab_size - 2"
    )

    @model_validator(mode="after")
    def _possible(self) -> "SelectiveCopy":
        for most, formula in ((self.length // 2, "length / 2"), (self.vocab_size - 2, "vocab_size - 2")):
            if self.copied > most:
                raise UserError(f"copied must be at most {formula} = {most}, got {self.copied}")
        return self

    @property
    def max_length(self) -> int:
        return self.length

    def sizes(self) -> dict[str, int]:
        return {"length": self.length, "copied": self.copied}

    @property
    def chance(self) -> float:
        """The accuracy of answering with any of the tokens to copy."""
        return 1 / self.copied

    @property
    def context_free(self) -> float:
        return log(self.vocab_size - 2)

    @property
    def baselines(self) -> Mapping[str, Baseline]:
        return {"any value of the context": any_value}

    def generate(self, key: int, examples: I64) -> Batch:
        n, m, start = len(examples), self.copied, self.length - self.copied
        tokens = np.full((n, self.length), NOISE, dtype=np.int64)
        labels = np.full_like(tokens, NO_LABEL)
        roles = np.full(tokens.shape, Role.FILLER, dtype=np.int8)
        values = 2 + distinct(words(stream_key(key, "values"), examples, 2 * m), self.vocab_size - 2)
        at = np.sort(order(words(stream_key(key, "places"), examples, start))[:, :m], axis=1)
        np.put_along_axis(tokens, at, values, axis=1)
        np.put_along_axis(roles, at, np.int8(Role.VALUE), axis=1)
        tokens[:, start:], labels[:, start:], roles[:, start:] = ASK, values, Role.QUERY
        layout = Layout(
            roles=torch.from_numpy(roles),
            value_pos=torch.from_numpy(at),
            query_pos=torch.arange(start, self.length).expand(n, m),
            query_pair=torch.arange(m).expand(n, m),
        )
        return Batch(torch.from_numpy(tokens), torch.from_numpy(labels), layout)
