"""The base of every task: a frozen config that makes batches and describes itself to the rest of the package.

A batch is a pure function of its arguments. Training, analysis and figures ask the task for its roles, loss, metric,
the level of answering with any value of the context, and sizes; nothing outside a task's own file knows tasks by name.
"""

import math
from abc import abstractmethod
from collections.abc import Callable, Mapping
from functools import lru_cache
from numbers import Integral
from typing import Annotated, Any, ClassVar, Literal, get_args

import numpy as np
import torch
from jaxtyping import Float
from pydantic import Field, field_validator, model_validator
from torch import Tensor

from circuitscope.errors import UserError, shown, unknown
from circuitscope.memory import check_fits
from circuitscope.registry import Registry
from circuitscope.section import Section, Unit
from circuitscope.tasks.batch import Batch
from circuitscope.tasks.measure import Measure
from circuitscope.tasks.roles import Role
from circuitscope.tasks.streams import I64, order, stream_key, words

_LARGE = 1 << 22  # of so many positions or examples it is worth asking whether they fit into memory
_DRAWN, _ROWS_AT_ONCE = 48, 2048  # bytes per position while so many rows of a batch are drawn, about
_BYTES_PER_EXAMPLE = 32  # while the order of the examples is drawn

Split = Literal["train", "validation", "test"]
Inputs = Literal["tokens", "vectors"]
Feature = Literal["pairs", "answers", "period"]
"""What a layout has: key-value pairs with queries, values that are asked for without keys, or a repeated block."""

Metric = Callable[[], Float[Tensor, ""]]
"""Computes the task's metric when called; this takes time and is not needed at every step."""

Baseline = Callable[[Batch], Float[Tensor, " label"]]
"""The task's metric of a simple rule at each labelled position of a batch; their mean is the rule's score."""


class Task(Section):
    """The fields that every task has. Subclasses add their own and `generate` examples by index.

    A task with `examples=n` trains on n examples, reshuffled in each epoch; with None no example repeats.
    The other splits draw from streams of their own, so they are held out. (Examples can be equal by
    chance, which matters only for tiny vocabularies.)

    roles     the roles that its positions have
    features  what its layouts contain
    inputs    what a model reads: token numbers or vectors
    metric    the name of its metric, which is also the column in metrics.jsonl
    larger_is_better  whether a model is better the larger its metric is, as with an accuracy; not so with an error
    in_nats   whether the loss is a cross-entropy, so that its exponential is a perplexity
    tested_on how many sequences `evaluate` takes by default
    small     options for an example that fits on a screen
    about_roles  what a role means here, where the words of the role itself do not fit
    recipe    values of config fields, such as {"train.steps": 3000}, under which models learn it; they win over the
              recipe of the model, and what is given wins over them (config/recipes.py)
    """

    current_version: ClassVar[int] = 1
    inputs: ClassVar[Inputs]
    metric: ClassVar[str]
    larger_is_better: ClassVar[bool] = True
    in_nats: ClassVar[bool] = False
    tested_on: ClassVar[int] = 3000
    roles: ClassVar[tuple[Role, ...]]
    features: ClassVar[frozenset[Feature]] = frozenset()
    small: ClassVar[Mapping[str, Any]] = {}
    about_roles: ClassVar[Mapping[Role, str]] = {}
    recipe: ClassVar[Mapping[str, Any]] = {}

    name: str
    version: int = Field(default=1, description="version of the task's definition; only the newest can be made")
    examples: Annotated[int | None, Unit("examples")] = Field(
        default=None,
        ge=1,
        lt=2**40,
        description="size of the training set, gone through in a new order each epoch; none: no example repeats",
    )

    @property
    @abstractmethod
    def max_length(self) -> int:
        """The length of the longest sequence that the task makes."""

    @abstractmethod
    def generate(self, key: int, examples: I64) -> Batch:
        """The examples with these indices in the stream `key`."""

    @abstractmethod
    def needs(self) -> dict[str, int]:
        """The smallest sizes of a model that can take this task, by field of its config."""

    @abstractmethod
    def loss(self, model: Any, batch: Batch) -> tuple[Float[Tensor, ""], Metric]:
        """The loss that training minimizes, with its gradient, and the metric on the same batch.

        Both are means over the batch's labels: several ranks compute them on parts of a batch, each weighted by its
        share of `Batch.label_count`.
        """

    @abstractmethod
    def evaluate(self, model: Any, batch: Batch) -> tuple[float, float]:
        """Loss and metric of a model on a held-out batch."""

    def measures(self, model: Any, batch: Batch) -> dict[str, Measure]:
        """What is measured of a model on held-out sequences, by name: the loss, the metric, and what a task adds."""
        alone = [batch.part(slice(i, i + 1)) for i in range(len(batch))]
        found = torch.tensor([self.evaluate(model, one) for one in alone], dtype=torch.float64)
        counts = torch.tensor([one.label_count for one in alone], dtype=torch.float64)
        return {name: Measure(found[:, i] * counts, counts) for i, name in enumerate(("loss", self.metric))}

    def unmeasured(self, model: Any) -> dict[str, str]:
        """What `measures` leaves out because a model does not allow it, by name, with the reason."""
        return {}

    @abstractmethod
    def shown(self, metric: float) -> str:
        """A value of the metric as people read it: `accuracy  97.1%`."""

    def sizes(self) -> dict[str, int]:
        """The sizes that a heading shows, by name."""
        return {"length": self.max_length}

    @property
    def chance(self) -> float | None:
        """The metric of answering with any of the answers that the context offers; None if it offers none.

        It is no bound from below: a model that has not learned to pick from the context scores far less.
        """
        return None

    @property
    def chance_words(self) -> str:
        """What `chance` is the metric of: the first baseline, by its name."""
        return next(iter(self.baselines), "guessing")

    @property
    def context_free(self) -> float | None:
        """The loss of the best answer that ignores the sequence; None where it is not known.

        A model that has only learned which tokens are answers has this loss. No circuit is needed for it.
        """
        return None

    def reached(self, metric: float, level: float) -> bool:
        """Whether a value of the metric is as good as a level, or better."""
        return metric >= level if self.larger_is_better else metric <= level

    @property
    def worst(self) -> float:
        """What a diverged run counts as: an accuracy of 0, or an error without bound."""
        return 0.0 if self.larger_is_better else math.inf

    def at_step(self, step: int, split: Split) -> "Task":
        """The task that makes batch number `step`: itself, or one of an easier stage where it has a curriculum."""
        return self

    @property
    def elsewhere(self) -> "Mapping[str, Task]":
        """Tasks of another distribution on which a model of this one is measured too, by what sets them apart."""
        return {}

    @property
    def bytes_per_position(self) -> int:
        """How much memory a position of a batch takes: its input, label and role."""
        return 17

    @property
    def periods(self) -> range:
        """The lengths that the repeated blocks of its sequences may have; empty if it repeats no blocks."""
        return range(0)

    @property
    def baselines(self) -> Mapping[str, Baseline]:
        """Simple rules to compare a model with, by name."""
        return {}

    @field_validator("name", mode="before")
    @classmethod
    def _with_underscores(cls, value: Any) -> Any:
        own = cls.model_fields["name"].default
        return own if isinstance(value, str) and value.replace("-", "_") == own else value

    def remarks(self, batch: Batch, row: int) -> list[str]:
        """Lines that `circuitscope tasks show` prints below an example: what its tokens alone do not tell."""
        return []

    def function(self, key: int, example: int) -> list[str]:
        """Lines that `circuitscope tasks show` prints above an example: the function that was drawn for it, if any."""
        return []

    @model_validator(mode="after")
    def _known_version(self) -> "Task":
        if self.version != self.current_version:
            raise UserError(
                f"task {self.name} version {self.version} is not known here;"
                f" this release makes version {self.current_version}"
            )
        return self

    def batch(
        self, step: int = 0, *, split: Split = "train", size: int | None = None, seed: int | None = None
    ) -> Batch:
        """Batch number `step` of a split: examples step · size up to (step + 1) · size.

        Args:
            step: which batch, from 0.
            split: "train", "validation" or "test".
            size: examples per batch; 64 by default.
            seed: another seed gives other examples of the same task; 0 by default.
        """
        size = 64 if size is None else size
        if split not in get_args(Split):
            raise unknown("split", split, get_args(Split))
        for name, number in {"step": step, "size": size}.items():
            if not isinstance(number, Integral):
                raise UserError(f"batch: {name} is a whole number, got {shown(number)}; give the split as split=…")
        step, size = int(step), int(size)
        if step < 0 or size < 1 or step * size + size >= 2**63:
            raise UserError(f"batch needs step >= 0, size >= 1 and step · size < 2^63, got step {step} and size {size}")
        self._check_memory(size, split)
        return self.at_step(step, split).generate(*self.address(step, split, size, seed))

    def address(self, step: int, split: Split, size: int, seed: int | None = None) -> tuple[int, I64]:
        """The stream of a batch, and the numbers that its examples have there."""
        key = stream_key(self.name, self.version, split, 0 if seed is None else seed)
        index = step * size + np.arange(size, dtype=np.int64)
        if self.examples is not None and split == "train":
            epoch, place = np.divmod(index, self.examples)
            index = np.concatenate([_shuffled(key, int(e), self.examples)[place[epoch == e]] for e in np.unique(epoch)])
        return key, index

    def _check_memory(self, size: int, split: Split) -> None:
        """Refuses a batch, or an order of the training examples, that memory cannot hold."""
        cpu = torch.device("cpu")
        if size * self.max_length > _LARGE:
            what = f"a batch of {size:,} sequences of length {self.max_length:,}"
            need = (self.bytes_per_position * size + _DRAWN * min(size, _ROWS_AT_ONCE)) * self.max_length
            check_fits(need, cpu, what, "use fewer or shorter sequences")
        if split == "train" and (self.examples or 0) > _LARGE:
            what = f"the order of {self.examples:,} training examples"
            check_fits(
                _BYTES_PER_EXAMPLE * (self.examples or 0), cpu, what, "use fewer examples, or none: never repeat"
            )

    def describe(self) -> dict[str, Any]:
        """The config as plain data."""
        return self.model_dump(mode="json")


TASKS: Registry[type[Task]] = Registry("task", "tasks")
register = TASKS.register


@lru_cache(maxsize=2)
def _shuffled(key: int, epoch: int, n: int) -> I64:
    """The order of the n examples in an epoch."""
    permutation: I64 = order(words(stream_key(key, "epoch", epoch), np.zeros(1, dtype=np.int64), n))[0]
    return permutation
