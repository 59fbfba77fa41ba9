"""(m) Batch generation as a share of a training step, for every task."""

import itertools
import statistics
from collections.abc import Callable

from benchmarks.rows import Row, Section, alternate, duration, spread
from benchmarks.workload import ahead_by, take_step, trainer_of
from circuitscope.config import RunConfig
from circuitscope.tasks import TASKS
from circuitscope.training.trainer import Trainer

_MOST = 0.1
_NOTE = (
    "the run that `circuitscope train --task TASK` makes, with the sizes and the batch of the task's recipe. Ours is"
    " the generation of a batch alone; the other side is the whole step, which makes its batch when it begins, so that"
    " no other thread hides it. The ratio is the share of the step"
)


def measure(quick: bool) -> Section:
    return Section([_row(name, quick) for name in sorted(TASKS)])


def _row(task: str, quick: bool) -> Row:
    rounds, calls = (1, 1) if quick else (15, 5)
    with trainer_of(RunConfig.build(task=task, device="cpu")) as trainer:
        size = f"L {trainer.task.max_length}, batch {trainer.config.train.batch_size}"
        made, whole = alternate([_generation(trainer), _step(trainer)], rounds, calls)
    shares = [a / b for a, b in zip(made, whole, strict=True)]
    return Row(
        f"batch generation in a step, {task}, {size}",
        duration(made),
        duration(whole),
        spread(shares, "{:.2%}"),
        f"at most {_MOST:.0%}",
        statistics.median(shares) <= _MOST,
        _NOTE,
    )


def _generation(trainer: Trainer) -> Callable[[], object]:
    """The next batch of training, from the first on."""
    steps, size = itertools.count(), trainer.config.train.batch_size
    return lambda: trainer.task.batch(next(steps), split="train", size=size, seed=trainer.seed)


def _step(trainer: Trainer) -> Callable[[], None]:
    def step() -> None:
        with ahead_by(0):
            take_step(trainer)

    return step
