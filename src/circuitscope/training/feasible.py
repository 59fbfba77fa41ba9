"""Whether a run can be trained on this machine: asked before the run exists, and by a dry run."""

import os

import torch

from circuitscope.config import RunConfig
from circuitscope.devices import choose_device
from circuitscope.errors import UserError
from circuitscope.memory import check_fits
from circuitscope.models.accounting import parameters, without_weights
from circuitscope.models.build import build_model
from circuitscope.models.stack import HookedStack
from circuitscope.training.optimizer import lr_factors
from circuitscope.training.trackers import check_trackers

_THREADS = 64  # are allowed anywhere: a run of a larger machine can be repeated on a smaller one
_STATE = 4 * 4  # bytes per parameter: weight, gradient and both moments, in float32


def check_feasible(config: RunConfig) -> torch.device:
    """The device that a run will use; a run that cannot be trained here is refused."""
    device = choose_device(config.train.device)
    most = max(_THREADS, 4 * (os.cpu_count() or 1))
    if (config.train.threads or 1) > most:
        raise UserError(
            f"train.threads: this machine has {os.cpu_count()} CPUs, and more than {most} threads would wait for each"
            f" other; got {config.train.threads}"
        )
    check_trackers(config)
    with without_weights():
        model = build_model(config.model)
    lr_factors(model, config.train)
    _check_memory(config, model, device)
    return device


def _check_memory(config: RunConfig, model: HookedStack, device: torch.device) -> None:
    """Refuses a run that needs more memory than is free.

    The need is counted low (weights with their gradients and moments; what a backward pass keeps at the very least;
    logits at labels), so that nothing is refused that could be trained.
    """
    cfg, task, sizes = config.train, config.task, config.model
    count = parameters(model).total
    weights = _STATE * count
    check_fits(
        weights,
        device,
        f"training {count:,} parameters",
        "use a smaller model: d_model, n_layers, vocab_size, or the sizes of its mixers",
    )
    kept = sizes.n_layers * (4 + (2 * sizes.mlp_ratio if sizes.state_mixer == "mlp" else 0))  # activations per position
    for name, split, size, layers in (
        ("batch_size", "train", cfg.batch_size, kept),
        ("eval_batch_size", "validation", cfg.eval_batch_size, 4),
    ):
        batch = task.batch(0, split=split, size=size, seed=cfg.batch_seed)  # type: ignore[arg-type]
        logits = 4 * len(batch.labelled()[0]) * model.d_out
        activations = 4 * size * task.max_length * sizes.d_model * layers
        check_fits(
            weights + logits + activations,
            device,
            f"a batch of {size:,} sequences of length {task.max_length:,} in this model",
            f"use a smaller train.{name}, length, d_model or vocab_size, or fewer layers",
        )
