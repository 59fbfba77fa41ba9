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
from circuitscope.tasks.measure import Measure


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
    in_nats = True

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
            return self.right(batch, F.linear(hidden.detach(), weight.detach())).mean()

        return linear_cross_entropy(hidden, weight, target), accuracy

    @torch.no_grad()
    def evaluate(self, model: TokenModel, batch: Batch) -> tuple[float, float]:
        logits, target = _logits(model, batch)
        loss, accuracy = on_cpu([F.cross_entropy(logits, target), self.right(batch, logits).mean()])
        return loss.item(), accuracy.item()

    @torch.no_grad()
    def measures(self, model: TokenModel, batch: Batch) -> dict[str, Measure]:
        logits, target = _logits(model, batch)
        found = {"loss": F.cross_entropy(logits, target, reduction="none"), **self.outcomes(batch, logits)}
        here = on_cpu(list(found.values()))
        return {name: Measure.at_labels(batch, values) for name, values in zip(found, here, strict=True)}

    def right(self, batch: Batch, logits: Float[Tensor, "label vocab"]) -> Float[Tensor, " label"]:
        """1 at each label where the likeliest token is the right one, and 0 elsewhere; their mean is the metric."""
        _, target = batch.labelled()
        return (logits.argmax(-1) == target.to(logits.device)).float()

    def outcomes(self, batch: Batch, logits: Float[Tensor, "label vocab"]) -> dict[str, Float[Tensor, " label"]]:
        """What `circuitscope evaluate` measures at the labels, by name; nan at labels that do not count for it."""
        return {self.metric: self.right(batch, logits)}

    def shown(self, metric: float) -> str:
        return f"accuracy {metric:6.1%}"

    def spelled(self, token: int) -> str:
        """A token as `circuitscope tasks show` prints it."""
        return str(token)


def _on_device_of(model: TokenModel, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, flat labelled positions and labels, found on the CPU and then moved to the model's device."""
    device = model.W_U.device
    where, target = batch.labelled()
    return batch.tokens.to(device), where.to(device), target.to(device)


def _logits(model: TokenModel, batch: Batch) -> tuple[Float[Tensor, "label vocab"], Int[Tensor, " label"]]:
    tokens, where, target = _on_device_of(model, batch)
    return F.linear(model.hidden(tokens, where), model.W_U.T).float(), target
