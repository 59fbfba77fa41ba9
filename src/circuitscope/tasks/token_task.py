"""Tasks on tokens: the loss is the cross-entropy at labelled positions, the metric the share of right answers."""

from typing import Annotated, Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from pydantic import Field
from torch import Tensor

from circuitscope.devices import on_cpu
from circuitscope.kernels.cross_entropy import linear_cross_entropy
from circuitscope.section import Unit
from circuitscope.tasks.base import Metric, Task
from circuitscope.tasks.batch import Batch


@runtime_checkable
class TokenModel(Protocol):
    """What these tasks need of a model: its unembedding, and what the unembedding reads at given positions."""

    @property
    def W_U(self) -> Float[Tensor, "d_model vocab"]: ...

    def hidden(
        self, tokens: Int[Tensor, "batch pos"], at: Int[Tensor, " label"] | None = None
    ) -> Float[Tensor, "*lead d_model"]: ...


class TokenTask(Task):
    """A task whose inputs and labels are tokens of one vocabulary."""

    inputs = "tokens"
    metric = "accuracy"

    vocab_size: Annotated[int, Unit("tokens")] = Field(
        default=8192, ge=4, lt=2**31, description="size of the vocabulary"
    )

    def needs(self) -> dict[str, int]:
        return {"vocab_size": self.vocab_size, "max_length": self.max_length}

    def loss(self, model: TokenModel, batch: Batch) -> tuple[Float[Tensor, ""], Metric]:
        """The mean cross-entropy of the labels. It makes no logits and no final states at other positions."""
        tokens, where, target = _on_device_of(model, batch)
        weight = model.W_U.T
        hidden = model.hidden(tokens, where)

        def accuracy() -> Float[Tensor, ""]:
            return _accuracy(F.linear(hidden.detach(), weight.detach()), target)

        return linear_cross_entropy(hidden, weight, target), accuracy

    @torch.no_grad()
    def evaluate(self, model: TokenModel, batch: Batch) -> tuple[float, float]:
        tokens, where, target = _on_device_of(model, batch)
        logits = F.linear(model.hidden(tokens, where), model.W_U.T).float()
        loss, accuracy = on_cpu([F.cross_entropy(logits, target), _accuracy(logits, target)])
        return loss.item(), accuracy.item()

    def shown(self, metric: float) -> str:
        return f"accuracy {metric:6.1%}"


def _on_device_of(model: TokenModel, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, flat labelled positions and labels, found on the CPU and then moved to the model's device."""
    device = model.W_U.device
    where, target = batch.labelled()
    return batch.tokens.to(device), where.to(device), target.to(device)


def _accuracy(logits: Float[Tensor, "label vocab"], target: Int[Tensor, " label"]) -> Float[Tensor, ""]:
    return (logits.argmax(-1) == target).float().mean()
