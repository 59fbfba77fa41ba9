"""The sizes that are measured, and a trainer of ours ready to take steps at such a size."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from circuitscope.config import RunConfig
from circuitscope.progress import Silent
from circuitscope.runs.run import create_run
from circuitscope.training import ahead
from circuitscope.training.device import set_up
from circuitscope.training.trainer import Trainer


@dataclass(frozen=True)
class Shape:
    """A 2-layer attention model with MLP on MQAR over 8,192 tokens."""

    d_model: int
    length: int
    batch: int
    pairs: int

    def __str__(self) -> str:
        return f"d {self.d_model}, L {self.length}, batch {self.batch}, pairs {self.pairs}"


SHAPES = (Shape(64, 64, 64, 4), Shape(64, 256, 32, 16), Shape(128, 512, 16, 64))


@contextmanager
def temporary_folder() -> Iterator[Path]:
    """A folder that goes away, on the disk where runs are kept: /tmp may be memory, where a sync is free."""
    with tempfile.TemporaryDirectory(prefix=".bench-", dir=Path.cwd()) as folder:
        yield Path(folder)


@contextmanager
def trainer_at(shape: Shape) -> Iterator[Trainer]:
    """A trainer on a temporary run, set up as in a run on the CPU, before its first step."""
    config = RunConfig.build(
        "attention",
        "mqar",
        n_layers=2,
        n_heads=1,
        d_model=shape.d_model,
        length=shape.length,
        pairs=shape.pairs,
        vocab_size=8192,
        batch_size=shape.batch,
        steps=10_000,
        device="cpu",
    )
    with trainer_of(config) as trainer:
        yield trainer


@contextmanager
def trainer_of(config: RunConfig) -> Iterator[Trainer]:
    """A trainer of a config, likewise."""
    device = torch.device("cpu")
    with temporary_folder() as folder, set_up(device, config.train):
        run = create_run(config, root=folder, device="cpu", threads=torch.get_num_threads())
        trainer = Trainer(run, config, device, Silent())
        trainer.build()
        yield trainer


def take_step(trainer: Trainer) -> None:
    """One step as the trainer's own loop takes it: batch, update, and the accuracy on steps that are logged."""
    trainer.update((trainer.step + 1) % trainer.config.train.log_every == 0)
    trainer.step += 1


@contextmanager
def ahead_by(steps: int) -> Iterator[None]:
    """As many batches are made before they are asked for; 0: each when its step begins."""
    before = ahead.AHEAD
    ahead.AHEAD = steps
    try:
        yield
    finally:
        ahead.AHEAD = before
