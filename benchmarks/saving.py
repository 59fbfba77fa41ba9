"""(b) What saving costs: whole runs with checkpoints against runs without."""

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.rows import Section, alternate, costs
from benchmarks.workload import temporary_folder
from circuitscope.config import RunConfig
from circuitscope.training.trainer import train

_NEVER = 10**7


def measure(quick: bool) -> Section:
    steps, rounds = (12, 1) if quick else (300, 8)
    note = (
        f"wall time of circuitscope.training.trainer.train, including the wait for the disk at the end; {steps}"
        " steps of the default run, all in one process and on the project's disk. A run without saving still writes the"
        " first and last checkpoint and the last resume point; a run with saving writes resume points as by default"
    )
    with temporary_folder() as folder:
        sides = [
            _run(folder, steps, save_every=_NEVER, resume_every=_NEVER),
            _run(folder, steps, save_every=100),
            _run(folder, steps, save_every=10),
        ]
        without, sparse, dense = alternate(sides, rounds)
    return Section(
        [
            costs("run with --save-every 100 against none", sparse, without, 1.02, note),
            costs("run with --save-every 10 against none", dense, without, 1.10, note),
        ]
    )


def _run(folder: Path, steps: int, **saving: Any) -> Callable[[], object]:
    """A real run of the default model, evaluated at its start and end only."""
    config = RunConfig.build(steps=steps, eval_every=_NEVER, **saving)
    label = f"save-{saving['save_every']}"
    numbers = itertools.count()
    return lambda: train(config, root=folder, name=f"{label}-{next(numbers)}")
