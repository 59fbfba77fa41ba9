"""The base of every task: a frozen config whose `batch` is a pure function of its arguments."""

from abc import abstractmethod
from functools import lru_cache
from typing import Any, ClassVar, Literal, get_args

import numpy as np
from pydantic import Field, model_validator

from circuitscope.errors import UserError, unknown
from circuitscope.section import Section
from circuitscope.tasks.batch import Batch
from circuitscope.tasks.streams import I64, order, stream_key, words

Split = Literal["train", "validation", "test"]


class Task(Section):
    """Fields every task has. Subclasses add their own and `generate` examples by index.

    A task with `examples=n` trains on n examples, reshuffled each epoch; with None it never repeats.
    The other splits draw from streams of their own, so they are held out (equal examples by chance
    aside, which matters only for tiny vocabularies).
    """

    current_version: ClassVar[int] = 1

    name: str
    version: int = Field(default=1, description="version of the task's definition")
    vocab_size: int = Field(default=8192, ge=4, lt=2**31, description="number of tokens")
    examples: int | None = Field(default=None, ge=1, lt=2**40, description="size of the training set; none: endless")

    @property
    @abstractmethod
    def max_length(self) -> int:
        """Longest sequence the task makes."""

    @abstractmethod
    def generate(self, key: int, examples: I64) -> Batch:
        """The examples with these indices in the stream `key`."""

    @model_validator(mode="after")
    def _known_version(self) -> "Task":
        if self.version != self.current_version:
            raise UserError(
                f"task {self.name} version {self.version} is not known here;"
                f" this release makes version {self.current_version}"
            )
        return self

    def batch(self, step: int, *, split: Split = "train", size: int | None = None, seed: int | None = None) -> Batch:
        """Batch number `step` of a split: examples step · size up to (step + 1) · size.

        Args:
            step: which batch, from 0.
            split: "train", "validation" or "test".
            size: examples in a batch (64 unless told).
            seed: another seed gives other examples of the same task (0 unless told).
        """
        size = 64 if size is None else size
        if split not in get_args(Split):
            raise unknown("split", split, get_args(Split))
        if step < 0 or size < 1 or step * size + size >= 2**63:
            raise UserError(f"batch needs step >= 0, size >= 1 and step · size < 2^63, got step {step} and size {size}")
        key = stream_key(self.name, self.version, split, 0 if seed is None else seed)
        index = step * size + np.arange(size, dtype=np.int64)
        if self.examples is not None and split == "train":
            epoch, place = np.divmod(index, self.examples)
            index = np.concatenate([_shuffled(key, int(e), self.examples)[place[epoch == e]] for e in np.unique(epoch)])
        return self.generate(key, index)

    def describe(self) -> dict[str, Any]:
        """The config as plain data."""
        return self.model_dump(mode="json")


@lru_cache(maxsize=2)
def _shuffled(key: int, epoch: int, n: int) -> I64:
    """Order of the n examples in an epoch."""
    permutation: I64 = order(words(stream_key(key, "epoch", epoch), np.zeros(1, dtype=np.int64), n))[0]
    return permutation
