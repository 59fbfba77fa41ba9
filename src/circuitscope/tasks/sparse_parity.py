"""Sparse parity, learned in context: y is the product of a few coordinates of x in {−1, 1}^d, hidden per sequence."""

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

import numpy as np
import torch
from jaxtyping import Float
from pydantic import Field, model_validator
from torch import Tensor

from circuitscope.errors import UserError
from circuitscope.section import Unit
from circuitscope.tasks.base import Baseline, register
from circuitscope.tasks.batch import Batch
from circuitscope.tasks.in_context import Floats, InContext
from circuitscope.tasks.judging import Judge, Sign
from circuitscope.tasks.streams import I64, below, order, stream_key, words


@register("sparse_parity")
class SparseParity(InContext):
    """In-context learning of the product of k coordinates of x in {−1, 1}^d; the sign of the answer counts."""

    metric = "accuracy"
    larger_is_better = True
    in_nats = True
    small: ClassVar = {"dims": 4, "points": 6}
    recipe: ClassVar = {
        "task.dims": 4,
        "task.points": 16,
        "train.lr": 5e-3,
        "train.beta2": 0.95,
        "train.weight_decay": 0.0,
        "train.schedule": "cosine",
        "train.warmup_steps": 100,
        "train.steps": 1500,
    }

    name: Literal["sparse_parity"] = "sparse_parity"
    dims: Annotated[int, Unit("coordinates")] = Field(default=10, ge=1, le=2**16, description="dimension d of x")
    points: Annotated[int, Unit("points")] = Field(
        default=140, ge=2, le=2**22, description="points (x, y) of a sequence, which has two positions for each"
    )
    factors: Annotated[int, Unit("coordinates")] = Field(
        default=2, ge=1, description="coordinates k whose product is y, drawn for each sequence"
    )

    @model_validator(mode="after")
    def _enough_coordinates(self) -> "SparseParity":
        if self.factors > self.dims:
            raise UserError(f"factors must be at most dims = {self.dims}, got {self.factors}")
        return self

    @property
    def zero_error(self) -> float:
        return 1.0

    @property
    def judge(self) -> Judge:
        return Sign()

    @property
    def chance(self) -> float:
        """The accuracy of guessing."""
        return 0.5

    @property
    def baselines(self) -> Mapping[str, Baseline]:
        return {"guessing": _guessing}

    def scored(self, batch: Batch, answers: Float[Tensor, "label out"]) -> Float[Tensor, " label"]:
        return batch.right(answers)

    def inputs_of(self, key: int, examples: I64) -> Floats:
        signs = below(words(stream_key(key, "x"), examples, self.points * self.dims), 2)
        return self.masked((2 * signs - 1).astype(np.float64).reshape(len(examples), self.points, self.dims))

    def hidden(self, key: int, examples: I64) -> I64:
        """The coordinates that are multiplied [example, factor]."""
        drawn = words(stream_key(key, "hidden"), examples, self.dims)[:, : max(self.active, self.factors)]
        return order(drawn)[:, : self.factors]

    def function(self, key: int, example: int) -> list[str]:
        return [f"y = {' · '.join(f'x{i + 1}' for i in sorted(self.hidden(key, np.array([example]))[0].tolist()))}"]

    def outputs(self, key: int, examples: I64, x: Floats) -> Floats:
        return np.asarray(np.take_along_axis(x, self.hidden(key, examples)[:, None], axis=2).prod(axis=2))


def _guessing(batch: Batch) -> Float[Tensor, " label"]:
    return torch.full((batch.label_count,), 0.5)
