"""How stable the optimizer of a run is at its resume points, which hold its weights and AdamW's moments."""

from dataclasses import dataclass

import torch
from torch import nn

from circuitscope.analysis.curvature import adam_scale, sharpness, stability_threshold
from circuitscope.config.rate import learning_rate
from circuitscope.runs.run import Run
from circuitscope.training.optimizer import lr_factors


@dataclass(frozen=True)
class Stability:
    """Largest eigenvalues of the Hessian at one resume point, on the batch of the run's first step.

    sharpness       of the Hessian of the training loss
    preconditioned  of P^{-1/2} H P^{-1/2}, as AdamW sees it
    threshold       AdamW's steps grow where `preconditioned` is above it; the rate of the last update determines it
    """

    step: int
    sharpness: float
    preconditioned: float
    threshold: float

    @property
    def ratio(self) -> float:
        """Above 1, AdamW's steps grow along the sharpest direction."""
        return self.preconditioned / self.threshold


def stability_at(run: Run, step: int) -> Stability:
    """Measures one resume point; all resume points of a run are measured on the same examples, its first batch.

    Every run has trained on that batch, so every token in it has second moments. The examples of one batch bend the
    loss more than all examples do: compare the numbers of runs with the same batch size.
    """
    config, point = run.config, run.checkpoints.load_resume_point(step)
    model = run.empty_model()
    model.load_state_dict(point.weights)
    batch = run.batch(0, split="train", size=config.train.batch_size)

    def loss(twin: nn.Module) -> torch.Tensor:
        return config.task.loss(twin, batch)[0]

    second = {name: point.moments[f"second.{name}"] for name, _ in model.named_parameters()}
    scale = adam_scale(second, step, config.train.beta2, lr_factors(model, config.train))
    return Stability(
        step,
        sharpness(model, loss).value,
        sharpness(model, loss, scale=scale).value,
        stability_threshold(learning_rate(step - 1, config.train), config.train.beta1),
    )
