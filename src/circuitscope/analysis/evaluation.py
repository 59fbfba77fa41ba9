"""What a trained model scores on held-out examples, by the task's own measures and beside the task's baselines."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd

from circuitscope.arguments import explained
from circuitscope.errors import UserError
from circuitscope.runs.run import Run
from circuitscope.tasks import Batch, Task
from circuitscope.tasks.measure import Measure

MODEL = "the model"
MOST = 100_000  # sequences; a share of answers is then known to 0.3 points
_AT_ONCE = 50  # sequences, so that the logits of many labels fit into memory


@explained
def evaluate(run: Run | str | Path, *, step: int | None = None, sequences: int | None = None) -> pd.DataFrame:
    """The measures of a run's task on its test split, of the model and of the task's baselines.

    Args:
        step: the checkpoint; by default the last.
        sequences: how many examples of the test split, at most 100,000; by default as many as the task says, for most
            3,000.

    Returns:
        One row per measure and answerer: measure, of ("the model" or the name of a baseline), value, low and high (the
        95% interval of the mean when whole sequences are drawn again), sequences. Baselines have the task's metric. A
        task that names others (`Task.elsewhere`) has its metric there as measures of their own.
    """
    run = Run.of(run)
    task, model = run.config.task, run.load(step)
    sequences = task.tested_on if sequences is None else sequences
    if sequences < 2:
        raise UserError(f"an interval needs at least 2 sequences, got {sequences}")
    if sequences > MOST:
        raise UserError(f"evaluate takes at most {MOST:,} sequences, got {sequences:,}")
    found: dict[tuple[str, str], list[Measure]] = {}
    for batch in _batches(run, task, sequences):
        for name, measure in task.measures(model, batch).items():
            found.setdefault((name, MODEL), []).append(measure)
        for name, baseline in task.baselines.items():
            found.setdefault((task.metric, name), []).append(Measure.at_labels(batch, baseline(batch)))
    for where, other in task.elsewhere.items():
        for batch in _batches(run, other, sequences):
            metric = f"{task.metric} {where}"
            found.setdefault((metric, MODEL), []).append(other.measures(model, batch)[other.metric])
            for name, baseline in other.baselines.items():
                found.setdefault((metric, name), []).append(Measure.at_labels(batch, baseline(batch)))
    rows: list[tuple[Any, ...]] = []
    for (name, of), parts in found.items():
        measure = Measure.joined(parts)
        ends = (measure.mean(), *measure.interval())
        rows.append((name, of, *ends))
        if name == "loss" and task.in_nats:
            rows.append(("perplexity", of, *(math.exp(min(x, 700.0)) for x in ends)))
    table = pd.DataFrame(rows, columns=["measure", "of", "value", "low", "high"])
    order = {name: i for i, name in enumerate(dict.fromkeys(table["measure"]))}
    return table.sort_values("measure", key=lambda names: names.map(order), kind="stable", ignore_index=True).assign(
        sequences=sequences
    )


@explained
def left_out(run: Run | str | Path, *, step: int | None = None) -> dict[str, str]:
    """The measures of a run's task that its model does not allow, by name, each with the reason."""
    run = Run.of(run)
    return run.config.task.unmeasured(run.load(step))


def _batches(run: Run, task: Task, sequences: int) -> Iterator[Batch]:
    """The first sequences of the test split of a task, some at a time, with the seed of a run."""
    for number in range(math.ceil(sequences / _AT_ONCE)):
        batch = task.batch(number, split="test", size=_AT_ONCE, seed=run.config.train.batch_seed)
        yield batch.part(slice(0, sequences - number * _AT_ONCE))
