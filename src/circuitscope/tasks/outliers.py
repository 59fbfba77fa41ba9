"""Linear regression with points that say nothing about w: a share of the pairs (x, y) is replaced.

orthogonal_outlier   both become vectors of a plane that is orthogonal to w
many_outlier         most pairs become the same one: x all ones, y the first unit vector

The loss is taken on the other points alone, as in the public code. `circuitscope evaluate` also measures a model on
clean linear regression, which it has not seen in training.
"""

from abc import abstractmethod
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from circuitscope.errors import UserError
from circuitscope.section import Unit
from circuitscope.tasks.base import Task, register
from circuitscope.tasks.baselines import Rule
from circuitscope.tasks.batch import Batch
from circuitscope.tasks.in_context import Floats
from circuitscope.tasks.linear_regression import LEAST_SQUARES, LinearRegression
from circuitscope.tasks.roles import Role
from circuitscope.tasks.streams import I64, normal, stream_key, uniform, words


class Outliers(LinearRegression):
    """Linear regression of which some pairs are replaced."""

    roles = (Role.INPUT, Role.OUTPUT, Role.OUTLIER)

    points: Annotated[int, Unit("points")] = Field(
        default=101, ge=2, le=2**22, description="points (x, y) of a sequence, outliers among them"
    )
    outliers: Annotated[float, Unit("share of the points")] = Field(
        default=0.2, ge=0, lt=1, description="chance that a pair is replaced"
    )

    @abstractmethod
    def replacements(self, key: int, examples: I64, w: Floats) -> tuple[Floats, Floats]:
        """x and y of outliers, [example, point, coordinate] each, or of a shape that broadcasts to it."""

    @property
    def rules(self) -> Mapping[str, Rule]:
        return {f"{name} on the inliers": rule for name, rule in LEAST_SQUARES.items()}

    @property
    def elsewhere(self) -> Mapping[str, Task]:
        return {"without outliers": LinearRegression(dims=self.dims, points=self.points)}

    def replaced(self, key: int, examples: I64) -> NDArray[np.bool_]:
        """Which points are outliers [example, point]; where all with a label would be, the last is none."""
        drawn = uniform(words(stream_key(key, "replaced"), examples, self.points)) < self.outliers
        drawn[:, -1] &= ~drawn[:, 1:].all(axis=1)
        return np.asarray(drawn)

    def generate(self, key: int, examples: I64) -> Batch:
        w, out = self.weights_of(key, examples), self.replaced(key, examples)
        x = self.inputs_of(key, examples)
        clean = self.prompt(x, self.outputs(key, examples, x), weights=w)
        inputs, labels, roles = (part.numpy() for part in (clean.inputs, clean.labels, clean.layout.roles))
        other_x, other_y = self.replacements(key, examples, w)
        inputs[:, ::2] = np.where(out[:, :, None], other_x, inputs[:, ::2])
        inputs[:, 1::2] = np.where(out[:, :, None], other_y, inputs[:, 1::2])
        labels[:, ::2][out] = np.nan
        roles[np.repeat(out, 2, axis=1)] = Role.OUTLIER
        return self.assembled(inputs, labels, roles, w)


@register("orthogonal_outlier")
class OrthogonalOutlier(Outliers):
    """Linear regression with outliers (a u + b v) / (a² + b²) for x and for y, where u and v are orthogonal to w.

    u and v are standard normal vectors without their part along w; a and b are N(0, 1), drawn apart for x and y.
    """

    small: ClassVar = {"dims": 3, "points": 6, "outliers": 0.5}

    name: Literal["orthogonal_outlier"] = "orthogonal_outlier"  # type: ignore[assignment]
    plane: Literal["sequence", "pair"] = Field(
        default="sequence", description="whether u and v are drawn once per sequence, or for each pair"
    )

    @model_validator(mode="after")
    def _room_beside_w(self) -> "OrthogonalOutlier":
        if self.dims < 2:
            raise UserError(f"dims must be at least 2, or nothing but 0 is orthogonal to w, got {self.dims}")
        return self

    def replacements(self, key: int, examples: I64, w: Floats) -> tuple[Floats, Floats]:
        n, planes = len(examples), 1 if self.plane == "sequence" else self.points
        drawn = normal(words(stream_key(key, "plane"), examples, 2 * planes * self.dims))
        u, v = _orthogonal(self.masked(drawn.reshape(n, planes, 2, self.dims)), w).transpose(2, 0, 1, 3)
        weights = normal(words(stream_key(key, "ab"), examples, 4 * self.points)).reshape(n, self.points, 2, 2, 1)
        x, y = (
            (a * u + b * v) / (a**2 + b**2) for a, b in ((weights[:, :, i, 0], weights[:, :, i, 1]) for i in range(2))
        )
        return x, y


def _orthogonal(vectors: Any, w: Floats) -> Any:
    """Vectors [example, plane, one of two, coordinate] without their part along w."""
    unit = w / np.linalg.norm(w, axis=1, keepdims=True)
    along = np.einsum("npkd,nd->npk", vectors, unit)
    return vectors - along[..., None] * unit[:, None, None]


@register("many_outlier")
class ManyOutlier(Outliers):
    """Linear regression where most pairs are the same outlier: x is all ones, y is the first unit vector."""

    small: ClassVar = {"dims": 3, "points": 6, "outliers": 0.5}
    recipe: ClassVar = {**LinearRegression.recipe, "task.dims": 3, "task.points": 64}

    name: Literal["many_outlier"] = "many_outlier"  # type: ignore[assignment]
    points: Annotated[int, Unit("points")] = Field(
        default=512, ge=2, le=2**22, description="points (x, y) of a sequence, outliers among them"
    )
    outliers: Annotated[float, Unit("share of the points")] = Field(
        default=0.9,
        ge=0,
        lt=1,
        description="chance that a pair is replaced: 0.9 in the paper's table and paragraph; elsewhere it says 0.2 and"
        " 0.5 for all tasks",
    )

    def replacements(self, key: int, examples: I64, w: Floats) -> tuple[Floats, Floats]:
        return np.ones((1, 1, self.dims)), np.eye(1, self.dims)[None]
