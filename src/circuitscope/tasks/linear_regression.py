"""Linear functions, learned in context: y = w · x, with w drawn for each sequence, dense or with few nonzero entries.

x1 y1 x2 y2 … xN yN
      ↓       ↓
      y2      yN        (labels, each at its x)
"""

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

import numpy as np
from pydantic import Field, model_validator

from circuitscope.errors import UserError
from circuitscope.section import Unit
from circuitscope.tasks.base import register
from circuitscope.tasks.baselines import Rule, averaging, fitted, least_squares, nearest
from circuitscope.tasks.batch import Batch
from circuitscope.tasks.in_context import Floats, InContext
from circuitscope.tasks.streams import I64, normal, order, stream_key, words

LEAST_SQUARES = {"least squares": Rule(least_squares)}
NEAREST = {"3 nearest neighbours": Rule(nearest(3))}


@register("linear_regression")
class LinearRegression(InContext):
    """In-context linear regression: y = w · x, with w and x standard normal."""

    small: ClassVar = {"dims": 3, "points": 5}
    recipe: ClassVar = {
        "task.dims": 5,
        "task.points": 16,
        "train.lr": 3e-3,
        "train.beta2": 0.95,
        "train.weight_decay": 0.0,
        "train.schedule": "cosine",
        "train.warmup_steps": 100,
        "train.steps": 1500,
    }

    name: Literal["linear_regression"] = "linear_regression"

    @property
    def zero_error(self) -> float:
        return self.dims

    @property
    def rules(self) -> Mapping[str, Rule]:
        return {**LEAST_SQUARES, "averaging": Rule(averaging), **NEAREST}

    def weights_of(self, key: int, examples: I64) -> Floats:
        """w [example, coordinate]; coordinates of later stages of a curriculum are 0."""
        return self.masked(normal(words(stream_key(key, "w"), examples, self.dims)))

    def outputs(self, key: int, examples: I64, x: Floats) -> Floats:
        return (x @ self.weights_of(key, examples)[:, :, None])[:, :, 0]

    def generate(self, key: int, examples: I64) -> Batch:
        x = self.inputs_of(key, examples)
        return self.prompt(x, self.outputs(key, examples, x), weights=self.weights_of(key, examples))


@register("sparse_linear")
class SparseLinear(LinearRegression):
    """In-context linear regression where all but a few entries of w are 0."""

    small: ClassVar = {"dims": 4, "points": 5, "nonzero": 2}

    name: Literal["sparse_linear"] = "sparse_linear"  # type: ignore[assignment]
    points: Annotated[int, Unit("points")] = Field(
        default=101, ge=2, le=2**22, description="points (x, y) of a sequence; the public code has 41"
    )
    nonzero: Annotated[int, Unit("coordinates")] = Field(
        default=3, ge=1, description="entries of w that are kept, at random places"
    )

    @model_validator(mode="after")
    def _few_enough(self) -> "SparseLinear":
        if self.nonzero > self.dims:
            raise UserError(f"nonzero must be at most dims = {self.dims}, got {self.nonzero}")
        return self

    @property
    def zero_error(self) -> float:
        return self.nonzero

    @property
    def rules(self) -> Mapping[str, Rule]:
        return {"lasso": Rule(fitted(_lasso), prompts=2), **LEAST_SQUARES}

    def weights_of(self, key: int, examples: I64) -> Floats:
        w = super().weights_of(key, examples)
        dropped = order(words(stream_key(key, "kept"), examples, self.dims))[:, self.nonzero :]
        np.put_along_axis(w, dropped, 0.0, axis=1)
        return w


def _lasso() -> object:
    from sklearn.linear_model import Lasso

    return Lasso(alpha=0.01, fit_intercept=False, max_iter=10_000)
