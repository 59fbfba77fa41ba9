"""Whether a run can be trained on this machine: asked before the run exists, and by a dry run."""

import math

import torch

from circuitscope.config import RunConfig
from circuitscope.errors import UserError
from circuitscope.memory import check_fits
from circuitscope.models.hooked_lm import HookedLM
from circuitscope.training.device import choose_device
from circuitscope.training.trackers import check_trackers

_STATE = 4 * 4  # bytes per parameter: weight, gradient and both moments, in float32


def check_feasible(config: RunConfig) -> torch.device:
    """The device that a run will use; a run that cannot be trained here is refused."""
    device = choose_device(config.train.device)
    check_trackers(config)
    try:
        with torch.device("meta"):
            model = HookedLM(config.model)
    except (RuntimeError, OverflowError) as error:  # sizes whose product no tensor can have
        raise UserError(f"a model of these sizes cannot be built: {str(error).splitlines()[0]}") from None
    _check_memory(config, model, device)
    return device


def _check_memory(config: RunConfig, model: HookedLM, device: torch.device) -> None:
    """Refuses a run that needs more memory than is free.

    The need is counted low (weights with their gradients and moments; what a backward pass keeps at the very least;
    logits at labels), so that nothing is refused that could be trained.
    """
    cfg, task, sizes = config.train, config.task, config.model
    parameters = sum(p.numel() for p in model.parameters())
    weights = _STATE * parameters
    check_fits(
        weights,
        device,
        f"training {parameters:,} parameters",
        "use a smaller model: d_model, n_layers, vocab_size, or the sizes of its mixers",
    )
    kept = sizes.n_layers * (4 + (2 * sizes.mlp_ratio if sizes.state_mixer == "mlp" else 0))  # activations per position
    for name, split, size, layers in (
        ("batch_size", "train", cfg.batch_size, kept),
        ("eval_batch_size", "validation", cfg.eval_batch_size, 4),
    ):
        batch = task.batch(0, split=split, size=size, seed=cfg.batch_seed)  # type: ignore[arg-type]
        logits = math.prod((4, len(batch.labelled()[0]), getattr(sizes, "vocab_size", 1)))
        activations = 4 * size * task.max_length * sizes.d_model * layers
        check_fits(
            weights + logits + activations,
            device,
            f"a batch of {size:,} sequences of length {task.max_length:,} in this model",
            f"use a smaller train.{name}, length, d_model or vocab_size, or fewer layers",
        )
