"""Networks with one hidden layer, learned in context: y = W2 relu(W1 x); and the same with the hidden layer shown.

x1 y1 x2 y2 …              two_layer_network
x1 s1 y1 x2 s2 y2 …        chain_of_thought: s = relu(W1 x); at x the model answers with s, and at s with y
"""

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

import numpy as np
import torch
from pydantic import Field

from circuitscope.devices import on_cpu
from circuitscope.section import Unit
from circuitscope.tasks.base import Baseline, register
from circuitscope.tasks.baselines import Rule, answering_zero, network
from circuitscope.tasks.batch import Batch
from circuitscope.tasks.in_context import Floats, InContext
from circuitscope.tasks.linear_regression import LEAST_SQUARES, NEAREST
from circuitscope.tasks.measure import Measure
from circuitscope.tasks.roles import Role
from circuitscope.tasks.streams import I64, normal, stream_key, words
from circuitscope.tasks.vector_task import VectorModel, answered

_SCALED = "multiply the hidden layer by √(2 / hidden), as the public code does; the paper's text does not"

_WIDEST = 8  # units and coordinates of a network that is printed


@register("two_layer_network")
class TwoLayerNetwork(InContext):
    """In-context learning of y = W2 relu(W1 x), with standard normal weights."""

    small: ClassVar = {"dims": 3, "points": 5, "hidden": 4}
    recipe: ClassVar = {
        "task.dims": 4,
        "task.points": 24,
        "task.scaled": True,
        "train.lr": 3e-3,
        "train.beta2": 0.95,
        "train.weight_decay": 0.0,
        "train.schedule": "cosine",
        "train.warmup_steps": 100,
        "train.steps": 2000,
    }

    name: Literal["two_layer_network"] = "two_layer_network"
    points: Annotated[int, Unit("points")] = Field(
        default=101, ge=2, le=2**22, description="points (x, y) of a sequence, which has two positions for each"
    )
    hidden: Annotated[int, Unit("units")] = Field(
        default=100, ge=1, le=2**16, description="width h of the hidden layer"
    )
    scaled: bool = Field(default=False, description=_SCALED)

    @property
    def zero_error(self) -> float:
        return hidden_size(self.hidden, self.dims, self.scaled)

    @property
    def rules(self) -> Mapping[str, Rule]:
        return {"a network fitted by Adam": Rule(network, prompts=1, every=10), **LEAST_SQUARES, **NEAREST}

    def function(self, key: int, example: int) -> list[str]:
        return _in_words(key, example, self.dims, self.hidden, self.scaled)

    def outputs(self, key: int, examples: I64, x: Floats) -> Floats:
        return forward(key, examples, x, self.hidden, self.scaled)[1]


@register("chain_of_thought")
class ChainOfThought(InContext):
    """In-context learning of y = W2 s, s = relu(W1 x), where s stands between x and y and is predicted too.

    Labels have the width of s; y is padded with zeros.
    """

    roles = (Role.INPUT, Role.HIDDEN, Role.OUTPUT)
    small: ClassVar = {"dims": 3, "points": 4, "hidden": 2}
    recipe: ClassVar = {
        "task.dims": 4,
        "task.points": 24,
        "task.hidden": 4,
        "task.scaled": True,
        "train.lr": 3e-3,
        "train.beta2": 0.95,
        "train.weight_decay": 0.0,
        "train.schedule": "cosine",
        "train.warmup_steps": 100,
        "train.steps": 2000,
    }

    name: Literal["chain_of_thought"] = "chain_of_thought"
    dims: Annotated[int, Unit("coordinates")] = Field(default=10, ge=1, le=2**16, description="dimension d of x")
    points: Annotated[int, Unit("points")] = Field(
        default=101, ge=2, le=2**22, description="points (x, s, y) of a sequence, which has three positions for each"
    )
    hidden: Annotated[int, Unit("units")] = Field(
        default=8, ge=1, le=2**16, description="width h of s; the paper has 4, 8 and 16"
    )
    scaled: bool = Field(default=False, description=_SCALED)

    @property
    def zero_error(self) -> float:
        return hidden_size(self.hidden, self.dims, self.scaled)

    @property
    def per_point(self) -> int:
        return 3

    @property
    def d_input(self) -> int:
        return max(self.dims, self.hidden)

    @property
    def d_output(self) -> int:
        return self.hidden

    def function(self, key: int, example: int) -> list[str]:
        return _in_words(key, example, self.dims, self.hidden, self.scaled)

    @property
    def baselines(self) -> Mapping[str, Baseline]:
        return {"answering 0": answering_zero}

    def outputs(self, key: int, examples: I64, x: Floats) -> Floats:
        return forward(key, examples, x, self.hidden, self.scaled)[1]

    def generate(self, key: int, examples: I64) -> Batch:
        x = self.inputs_of(key, examples)
        s, y = forward(key, examples, x, self.hidden, self.scaled)
        n, points, dims = x.shape
        inputs = np.zeros((n, 3 * points, self.d_input), dtype=np.float32)
        inputs[:, ::3, :dims], inputs[:, 1::3, : self.hidden], inputs[:, 2::3, 0] = x, s, y
        labels = np.full((n, 3 * points, self.hidden), np.nan, dtype=np.float32)
        labels[:, 3::3], labels[:, 4::3] = s[:, 1:], 0
        labels[:, 4::3, 0] = y[:, 1:]
        roles = np.tile(np.array([Role.INPUT, Role.HIDDEN, Role.OUTPUT], dtype=np.int8), (n, points))
        return self.assembled(inputs, labels, roles)

    @torch.no_grad()
    def measures(self, model: VectorModel, batch: Batch) -> dict[str, Measure]:
        """Also the errors of s and of y apart, and that of the last y where the last s is the model's own."""
        found, answers = super().measures(model, batch), answered(model, batch)
        position = batch.labelled()[0].cpu() % batch.length
        at_s, last = position % 3 == 0, batch.length - 2  # where s is asked for; where the last y is
        own = batch.inputs.to(answers.device, copy=True)
        own[:, last] = 0
        own[:, last, : self.hidden] = answers[(position == last - 1).nonzero().squeeze(1).to(answers.device)]
        alone = Batch(own, batch.labels, batch.layout, batch.judge)
        error, again = on_cpu([batch.losses(answers), batch.losses(answered(model, alone))])
        apart = {
            "error of s": error.where(at_s, float("nan")),
            "error of y": error.where(~at_s, float("nan")),
            "error of the last y": error.where(position == last, float("nan")),
            "error of the last y from the model's own s": again.where(position == last, float("nan")),
        }
        return found | {name: Measure.at_labels(batch, values) for name, values in apart.items()}


def forward(key: int, examples: I64, x: Floats, hidden: int, scaled: bool) -> tuple[Floats, Floats]:
    """s [example, point, hidden] and y [example, point] of a network of each example's own."""
    first, second = layers(key, examples, x.shape[2], hidden)
    s = np.maximum(x @ first, 0) * (np.sqrt(2 / hidden) if scaled else 1.0)
    return s, (s @ second[:, :, None])[:, :, 0]


def layers(key: int, examples: I64, dims: int, hidden: int) -> tuple[Floats, Floats]:
    """W1 transposed [example, coordinate, hidden], and W2 [example, hidden]."""
    first = normal(words(stream_key(key, "W1"), examples, dims * hidden)).reshape(len(examples), dims, hidden)
    return first, normal(words(stream_key(key, "W2"), examples, hidden))


def _in_words(key: int, example: int, dims: int, hidden: int, scaled: bool) -> list[str]:
    """The network of an example, unless it is too large to print."""
    if max(dims, hidden) > _WIDEST:
        return []
    first, second = (part[0] for part in layers(key, np.array([example]), dims, hidden))
    scale = f" · √(2/{hidden})" if scaled else ""
    rows = [" ".join(f"{x:6.2f}" for x in row) for row in [*first.T, second]]
    return [
        f"s = relu(W1 x){scale}, y = W2 s",
        *(f"{'W1' if i == 0 else '':8} {row}" for i, row in enumerate(rows[:-1])),
        f"{'W2':8} {rows[-1]}",
    ]


def hidden_size(hidden: int, dims: int, scaled: bool) -> float:
    """E ‖s‖², which is E y² too: half of E ‖W1 x‖² = hidden · dims, or dims where s is scaled."""
    return dims if scaled else hidden * dims / 2
