"""What in-context learning tasks share: x1, y1, x2, y2 …, where y is a function of x that is drawn for each sequence.

At every x but the first the model answers with y (the paper has no zero-shot term). y is a number, padded with zeros to
the width of x. Losses are means over the labels; the paper divides their sum by the number of points, one more.
"""

from abc import abstractmethod
from collections.abc import Mapping
from functools import partial
from typing import Annotated, Any, ClassVar

import numpy as np
import torch
from jaxtyping import Int
from numpy.typing import NDArray
from pydantic import Field, PrivateAttr, model_validator
from torch import Tensor

from circuitscope.errors import UserError
from circuitscope.section import Unit
from circuitscope.tasks.base import Baseline, Split
from circuitscope.tasks.baselines import Rule, by_rule
from circuitscope.tasks.batch import Batch, Layout
from circuitscope.tasks.judging import Judge, SquaredError
from circuitscope.tasks.roles import Role
from circuitscope.tasks.streams import I64, normal, stream_key, words
from circuitscope.tasks.vector_task import VectorTask, some_of

Floats = NDArray[np.float64]


class InContext(VectorTask):
    """The fields of in-context learning tasks, their curriculum, and how points become a prompt.

    With a curriculum, training begins with few coordinates of x (the others are 0) and few points, and has one
    coordinate more in each stage; points grow so that both are complete together, or as `more_points` says. Which
    stage it is follows from the step alone. Held-out examples always have all coordinates and points.
    """

    tested_on = 1280
    roles: ClassVar[tuple[Role, ...]] = (Role.INPUT, Role.OUTPUT)

    dims: Annotated[int, Unit("coordinates")] = Field(default=20, ge=1, le=2**16, description="dimension d of x")
    points: Annotated[int, Unit("points")] = Field(
        default=41, ge=2, le=2**22, description="points (x, y) of a sequence, which has two positions for each"
    )
    curriculum: Annotated[int | None, Unit("steps")] = Field(
        default=None, ge=1, lt=10**8, description="steps of each stage of a curriculum; none: no curriculum"
    )
    first_dims: Annotated[int | None, Unit("coordinates")] = Field(
        default=None, ge=1, description="coordinates of x in the first stage of a curriculum; none: dims / 4"
    )
    first_points: Annotated[int | None, Unit("points")] = Field(
        default=None, ge=2, description="points in the first stage of a curriculum; none: points / 4, rounded up"
    )
    more_points: Annotated[int | None, Unit("points")] = Field(
        default=None, ge=1, description="points that each stage adds; none: as many as are needed"
    )
    _active: int | None = PrivateAttr(default=None)  # coordinates of x in this stage

    @property
    @abstractmethod
    def zero_error(self) -> float:
        """The mean squared error of answering 0."""

    @abstractmethod
    def outputs(self, key: int, examples: I64, x: Floats) -> Floats:
        """y [example, point] for x [example, point, coordinate], each example with a function of its own."""

    @property
    def rules(self) -> Mapping[str, Rule]:
        """Simple rules that predict y from the points before it, by name."""
        return {}

    @model_validator(mode="after")
    def _possible_curriculum(self) -> "InContext":
        for name, first, last in (("dims", self.first_dims, self.dims), ("points", self.first_points, self.points)):
            if first is not None and first > last:
                raise UserError(f"first_{name} must be at most {name} = {last}, got {first}")
        return self

    @property
    def max_length(self) -> int:
        return self.points * self.per_point

    @property
    def per_point(self) -> int:
        """The positions of a point."""
        return 2

    @property
    def d_input(self) -> int:
        return self.dims

    @property
    def d_output(self) -> int:
        return 1

    @property
    def judge(self) -> Judge:
        """How answers are judged."""
        return SquaredError(self.zero_error)

    def sizes(self) -> dict[str, int]:
        return {"points": self.points, "dims": self.dims}

    def at_step(self, step: int, split: Split) -> "InContext":
        if self.curriculum is None or split != "train":
            return self
        stage = step // self.curriculum
        dims, points = self.first_dims or max(1, self.dims // 4), self.first_points or max(2, -(-self.points // 4))
        more = self.more_points or -(-(self.points - points) // max(1, self.dims - dims))
        found = self.model_copy(update={"points": min(self.points, points + more * stage)})
        found._active = min(self.dims, dims + stage)
        return found

    @property
    def baselines(self) -> Mapping[str, Baseline]:
        return {name: partial(by_rule, rule) for name, rule in self.rules.items()}

    def places(self, position: Int[Tensor, " label"]) -> dict[str, Tensor]:
        """After 1, 2, 4, 8 … points, after as many as x has coordinates, and after all."""
        seen = position // self.per_point
        return {f"after {n}": seen == n for n in some_of(self.points - 1, (self.dims,))}

    def generate(self, key: int, examples: I64) -> Batch:
        x = self.inputs_of(key, examples)
        return self.prompt(x, self.outputs(key, examples, x))

    def inputs_of(self, key: int, examples: I64) -> Floats:
        """x [example, point, coordinate], standard normal; coordinates of later stages are 0."""
        x = normal(words(stream_key(key, "x"), examples, self.points * self.dims))
        return self.masked(x.reshape(len(examples), self.points, self.dims))

    @property
    def active(self) -> int:
        """How many coordinates of x are in use: all of them, or those of a stage of a curriculum."""
        return self.dims if self._active is None else self._active

    def masked(self, vectors: Floats) -> Floats:
        """Vectors [..., coordinate], in place, with the coordinates of later stages at 0."""
        vectors[..., self.active :] = 0
        return vectors

    def prompt(self, x: Floats, y: Floats, *, weights: Floats | None = None) -> Batch:
        """The batch x1, y1, x2, y2 … with y as the label at each x but the first."""
        n, points, dims = x.shape
        inputs = np.zeros((n, 2 * points, dims), dtype=np.float32)
        inputs[:, ::2], inputs[:, 1::2, 0] = x, y
        labels = np.full((n, 2 * points, 1), np.nan, dtype=np.float32)
        labels[:, 2::2, 0] = y[:, 1:]
        roles = np.tile(np.array([Role.INPUT, Role.OUTPUT], dtype=np.int8), (n, points))
        return self.assembled(inputs, labels, roles, weights)

    def assembled(self, inputs: Any, labels: Any, roles: Any, weights: Floats | None = None) -> Batch:
        """A batch from arrays."""
        return Batch(
            torch.from_numpy(inputs),
            torch.from_numpy(labels),
            Layout(torch.from_numpy(roles)),
            judge=self.judge,
            weights=None if weights is None else torch.from_numpy(weights.astype(np.float32)),
        )
