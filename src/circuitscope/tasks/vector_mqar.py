"""Multi-query associative recall on vectors: keys and values are points of the unit sphere.

k1 v1 k2 v2 … kn vn | k2 k1 …
                      ↓  ↓
                      v2 v1       (labels)
"""

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

import numpy as np
import torch
from jaxtyping import Float, Int
from pydantic import Field, model_validator
from torch import Tensor

from circuitscope.errors import UserError
from circuitscope.section import Unit
from circuitscope.tasks.base import Baseline, register
from circuitscope.tasks.baselines import answering_zero
from circuitscope.tasks.batch import Batch, Layout
from circuitscope.tasks.in_context import Floats
from circuitscope.tasks.judging import NearestValue
from circuitscope.tasks.roles import Role
from circuitscope.tasks.streams import I64, normal, order, stream_key, words
from circuitscope.tasks.vector_task import VectorTask


@register("vector_mqar")
class VectorMQAR(VectorTask):
    """MQAR with vectors for keys and values: the model answers with the vector that is bound to the query.

    The loss is the squared distance, of which answering 0 has 1. Keys that are asked for are distinct. For scores,
    circuits and knockouts an answer is right if the value that is asked for is the nearest of the context.
    """

    roles = (Role.KEY, Role.VALUE, Role.QUERY)
    features = frozenset({"pairs"})
    small: ClassVar = {"dims": 3, "pairs": 3, "queries": 2}
    recipe: ClassVar = {
        "task.examples": None,
        "task.dims": 8,
        "task.pairs": 4,
        "task.queries": 4,
        "train.lr": 3e-3,
        "train.beta2": 0.95,
        "train.weight_decay": 0.0,
        "train.schedule": "cosine",
        "train.warmup_steps": 100,
        "train.steps": 1200,
        "model.d_model": 32,
    }

    name: Literal["vector_mqar"] = "vector_mqar"
    dims: Annotated[int, Unit("coordinates")] = Field(
        default=20, ge=2, le=2**16, description="dimension d of keys and values"
    )
    pairs: Annotated[int, Unit("pairs")] = Field(
        default=32, ge=1, le=2**22, description="keys n that are bound to values at the start of a sequence"
    )
    queries: Annotated[int, Unit("queries")] = Field(
        default=16, ge=1, description="how many of the keys are asked for, each once; the paper has 4 and 16"
    )
    examples: Annotated[int | None, Unit("examples")] = Field(
        default=300_000,
        ge=1,
        lt=2**40,
        description="size of the training set, gone through in a new order each epoch; none: no example repeats",
    )

    @model_validator(mode="after")
    def _enough_keys(self) -> "VectorMQAR":
        if self.queries > self.pairs:
            raise UserError(f"queries must be at most pairs = {self.pairs}, got {self.queries}")
        return self

    @property
    def max_length(self) -> int:
        return 2 * self.pairs + self.queries

    @property
    def d_input(self) -> int:
        return self.dims

    @property
    def d_output(self) -> int:
        return self.dims

    def sizes(self) -> dict[str, int]:
        return {"pairs": self.pairs, "queries": self.queries, "dims": self.dims}

    @property
    def context_free(self) -> float:
        """The squared distance of answering 0, the mean of all values."""
        return 1.0

    @property
    def baselines(self) -> Mapping[str, Baseline]:
        return {"answering 0": answering_zero, "the mean of the values": _mean}

    def places(self, position: Int[Tensor, " label"]) -> dict[str, Tensor]:
        return {}

    def generate(self, key: int, examples: I64) -> Batch:
        n, k, q = len(examples), self.pairs, self.queries
        keys, values = (_on_sphere(stream_key(key, what), examples, k, self.dims) for what in ("keys", "values"))
        asked = order(words(stream_key(key, "asked"), examples, k))[:, :q]
        inputs = np.empty((n, self.max_length, self.dims), dtype=np.float32)
        inputs[:, : 2 * k : 2], inputs[:, 1 : 2 * k : 2] = keys, values
        inputs[:, 2 * k :] = np.take_along_axis(keys, asked[:, :, None], axis=1)
        labels = np.full(inputs.shape, np.nan, dtype=np.float32)
        labels[:, 2 * k :] = np.take_along_axis(values, asked[:, :, None], axis=1)
        pair, query = np.tile(2 * np.arange(k), (n, 1)), np.tile(2 * k + np.arange(q), (n, 1))
        layout = Layout.of_pairs(self.max_length, key_pos=pair, value_pos=pair + 1, query_pos=query, query_pair=asked)
        return Batch(torch.from_numpy(inputs), torch.from_numpy(labels), layout, judge=NearestValue())


def _on_sphere(key: int, examples: I64, count: int, dims: int) -> Floats:
    """Uniform unit vectors [example, one of `count`, coordinate]."""
    drawn = normal(words(key, examples, count * dims)).reshape(len(examples), count, dims)
    return np.asarray(drawn / np.linalg.norm(drawn, axis=2, keepdims=True))


def _mean(batch: Batch) -> Float[Tensor, " label"]:
    """The error of answering with the mean of the values, 1 − 1/n on average."""
    where, _ = batch.labelled()
    return batch.losses(batch.values().mean(dim=1)[where // batch.length])
