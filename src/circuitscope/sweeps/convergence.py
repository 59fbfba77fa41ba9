"""How soon the models of a sweep learn: the step by which at least half of the seeds have reached a share of accuracy.

A seed that never reaches it counts as later than all others, so the median is known as long as half of the seeds reach
it, and is nan where fewer do. A diverged trial does not reach it. Trials that are not done do not count.
"""

import math
from collections.abc import Sequence

import pandas as pd

from circuitscope.errors import unknown
from circuitscope.sweeps.cells import SEEDS
from circuitscope.sweeps.grid import Grid
from circuitscope.sweeps.results import DONE, ResultsTable
from circuitscope.sweeps.trial import REACHED


def median_steps(grid: Grid, results: ResultsTable, column: str = "step_90") -> pd.DataFrame:
    """The median of a step over seeds, for each combination of the other axes.

    Args:
        column: step_50, step_90, step_95 or step_99: the first step with that validation accuracy, in percent.

    Returns:
        One row per combination: its axes; `seeds`, how many are done; `converged`, how many of them reached the share;
        and the median under the name of the column.
    """
    if column not in REACHED:
        raise unknown("column of steps", column, REACHED)
    axes = [axis for axis in grid.axes if axis not in SEEDS]
    found: dict[tuple[str, ...], list[float]] = {}
    named: dict[tuple[str, ...], dict[str, object]] = {}
    for trial in grid.trials:
        values = {axis: trial.values[axis] for axis in axes}
        cell = tuple(map(str, values.values()))
        named[cell] = values
        row = results.rows.get(trial.digest, {})
        steps = found.setdefault(cell, [])
        if row.get("state") in DONE:
            steps.append(float(row.get(column, math.nan)) if row["state"] == "finished" else math.nan)
    return pd.DataFrame(
        [
            {**named[cell], "seeds": len(steps), "converged": _count(steps), column: lower_median(steps)}
            for cell, steps in found.items()
        ]
    )


def lower_median(steps: Sequence[float]) -> float:
    """The step by which at least half of the seeds are there; nan stands for a seed that never is."""
    if not steps:
        return math.nan
    ordered = sorted(math.inf if math.isnan(step) else step for step in steps)
    middle = ordered[(len(ordered) - 1) // 2]
    return middle if math.isfinite(middle) else math.nan


def _count(steps: Sequence[float]) -> int:
    return sum(not math.isnan(step) for step in steps)
