"""Runs that one process trains and two ranks train too: `torchrun two_ranks.py FOLDER`, or `train_all(folder)`."""

import sys
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal
from unittest import mock

import torch

from circuitscope.config import RunConfig
from circuitscope.models.dtype import default_dtype
from circuitscope.models.hooked_lm import HookedLM
from circuitscope.tasks import MQAR, NO_LABEL, TASKS, Batch
from circuitscope.training.trainer import train

SIZES: dict[str, Any] = {
    "length": 16,
    "pairs": 2,
    "vocab_size": 64,
    "d_model": 8,
    "batch_size": 9,
    "eval_batch_size": 8,
    "eval_batches": 3,
    "eval_every": 25,
    "log_every": 5,
    "steps": 50,
    "save_every": 10,
    "resume_every": 100,
    "device": "cpu",
    "threads": 1,
}


class Patchy(MQAR):
    """MQAR without a third of its labels; the first four of every eighteen examples have none at all."""

    name: Literal["patchy"] = "patchy"

    def generate(self, key: int, examples: Any) -> Batch:
        batch = super().generate(key, examples)
        bare = torch.from_numpy(examples % 18 < 4)[:, None] | (batch.tokens % 3 == 0)
        return replace(batch, labels=batch.labels.masked_fill(bare, NO_LABEL))


def unbroken(folder: Path) -> None:
    """A run in float32 that takes a second or two: time for something to happen to another like it."""
    sizes = {**SIZES, "steps": 160, "save_every": 20, "resume_every": 20}
    train(RunConfig.build("attention", "mqar", **sizes), root=folder, name="unbroken")


def _in_float64(dtype: torch.dtype) -> AbstractContextManager[None]:
    return default_dtype(torch.float64)


def _double(*arguments: Any, **options: Any) -> HookedLM:
    return HookedLM(*arguments, **options).double()


def train_all(folder: Path) -> None:
    """50 steps in float64 of attention, Mamba, and attention on a task whose labels are spread unevenly."""
    TASKS.add("patchy", Patchy, __name__)
    with (
        mock.patch("circuitscope.training.device.default_dtype", _in_float64),
        mock.patch("circuitscope.training.trainer.build_model", _double),
    ):
        for name, model, task, own in (
            ("attention", "attention", "mqar", {}),
            ("mamba", "mamba", "mqar", {"n_layers": 1}),
            ("patchy", "attention", "patchy", {"examples": None}),
        ):
            train(RunConfig.build(model, task, **SIZES, **own), root=folder, name=name)


if __name__ == "__main__":
    train_all(Path(sys.argv[1]))
    unbroken(Path(sys.argv[1]))
