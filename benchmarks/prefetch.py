"""What it gives to make batches in a background thread: steps of training with and without it, and equal bits."""

from collections.abc import Callable
from contextlib import ExitStack

import torch

from benchmarks.rows import Row, Section, alternate, costs
from benchmarks.workload import SHAPES, Shape, ahead_by, take_step, trainer_at
from circuitscope.training import ahead
from circuitscope.training.trainer import Trainer


def measure(quick: bool) -> Section:
    return Section([_row(shape, quick) for shape in SHAPES[:2]])


def _row(shape: Shape, quick: bool) -> Row:
    rounds, calls = (1, 2) if quick else (25, 40)
    with ExitStack() as opened:
        made_ahead, on_time = (opened.enter_context(trainer_at(shape)) for _ in range(2))
        with_it, without = alternate([_steps(made_ahead, True), _steps(on_time, False)], rounds, calls)
        _check_bits(made_ahead, on_time)
    return costs(
        f"training step with batches made ahead, {shape}",
        with_it,
        without,
        1.01,
        "the other side makes the batch of a step when the step begins; after all steps both have the same weights,"
        " bit for bit",
    )


def _steps(trainer: Trainer, prefetched: bool) -> Callable[[], None]:
    def step() -> None:
        with ahead_by(ahead.AHEAD if prefetched else 0):
            take_step(trainer)

    return step


def _check_bits(one: Trainer, other: Trainer) -> None:
    for name, ours in one.model.state_dict().items():
        if not torch.equal(ours, other.model.state_dict()[name]):
            raise AssertionError(f"{name} differs between batches made ahead and on time")
