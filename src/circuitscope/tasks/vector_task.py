"""Tasks on vectors: a model reads vectors and answers with vectors; the loss is an error at labelled positions."""

from abc import abstractmethod
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from circuitscope.devices import on_cpu
from circuitscope.tasks.base import Metric, Task
from circuitscope.tasks.batch import Batch
from circuitscope.tasks.measure import Measure


@runtime_checkable
class VectorModel(Protocol):
    """What these tasks need of a model: its answers at given positions, row · length + pos."""

    def __call__(
        self, inputs: Float[Tensor, "batch pos channel"], at: Int[Tensor, " label"] | None = None
    ) -> Float[Tensor, "label out"]: ...


class VectorTask(Task):
    """A task whose inputs and labels are vectors. Its batches carry a judge (tasks/judging.py), who gives the loss."""

    inputs = "vectors"
    metric = "error"
    larger_is_better = False

    @property
    @abstractmethod
    def d_input(self) -> int:
        """The width of the inputs."""

    @property
    @abstractmethod
    def d_output(self) -> int:
        """The width of the labels."""

    def needs(self) -> dict[str, int]:
        return {"d_input": self.d_input, "d_output": self.d_output, "max_length": self.max_length}

    @property
    def bytes_per_position(self) -> int:
        return 1 + 4 * (self.d_input + self.d_output)

    def loss(self, model: VectorModel, batch: Batch) -> tuple[Float[Tensor, ""], Metric]:
        """The mean loss of the labels. What a model gives at other positions is not computed."""
        answers = answered(model, batch)
        return batch.losses(answers).mean(), lambda: self.scored(batch, answers.detach()).mean()

    @torch.no_grad()
    def evaluate(self, model: VectorModel, batch: Batch) -> tuple[float, float]:
        answers = answered(model, batch)
        loss, metric = on_cpu([batch.losses(answers).mean(), self.scored(batch, answers).mean()])
        return loss.item(), metric.item()

    @torch.no_grad()
    def measures(self, model: VectorModel, batch: Batch) -> dict[str, Measure]:
        """Loss and metric, and the metric at some of the places among a sequence's labels."""
        answers = answered(model, batch)
        loss, metric = on_cpu([batch.losses(answers), self.scored(batch, answers)])
        found = {"loss": loss, self.metric: metric}
        position = batch.labelled()[0].cpu() % batch.length
        for name, there in self.places(position).items():
            found[f"{self.metric} {name}"] = metric.where(there, float("nan"))
        return {name: Measure.at_labels(batch, values) for name, values in found.items()}

    def scored(self, batch: Batch, answers: Float[Tensor, "label out"]) -> Float[Tensor, " label"]:
        """The metric at each label; here the loss itself."""
        return batch.losses(answers)

    def places(self, position: Int[Tensor, " label"]) -> dict[str, Tensor]:
        """Places at which `circuitscope evaluate` measures the metric apart, by name: which labels stand there."""
        return {}

    def shown(self, metric: float) -> str:
        return f"{self.metric} {metric:8.4f}" if not self.larger_is_better else f"{self.metric} {metric:6.1%}"


def answered(model: VectorModel, batch: Batch) -> Float[Tensor, "label out"]:
    """What a model answers at the labels of a batch, in float32."""
    device = next(iter(model.parameters())).device if isinstance(model, torch.nn.Module) else batch.inputs.device
    return model(batch.inputs.to(device), at=batch.labelled()[0].to(device)).float()


def some_of(count: int, also: Sequence[int] = ()) -> list[int]:
    """1, 2, 4, 8 … up to a count, with the count itself and some others below it, in order."""
    powers = [2**i for i in range(count.bit_length())]
    return sorted({n for n in [*powers, *also, count] if 1 <= n <= count})
