"""The trials of a sweep as cells: what stands on the horizontal axis, what is a line, what is a panel, what is a seed.

The learning rate is the horizontal axis; in a grid with fewer than two rates, the first axis of numbers is. Each model
is a line; in a grid without an axis of models, each value of the first other axis is. Seeds are repeats. Every
combination of the remaining axes is a panel. An axis that follows from the horizontal one or from the lines, because it
is zipped with it, makes no panels. A cell is one line in one panel.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from circuitscope.errors import UserError, unknown
from circuitscope.sweeps.grid import Grid, Trial
from circuitscope.sweeps.results import DONE, ResultsTable, Row

RATE = "train.lr"
_MODELS = ("model", "model.preset", "model.mixers")
SEEDS = ("train.seed", "train.data_seed")
_FORMED = "none"  # in the column missing: both steps formed


@dataclass(frozen=True)
class Cells:
    """The trials of a grid by cell.

    Args:
        x: the axis that is drawn horizontally.
        line: the axis whose values are lines, if there is one.
        panels: the axes whose combinations are panels.
        metric: the task's metric.
        column: the column of the table that `value` holds.
        trials: a row for every trial of the grid, done or not: panel, line and seed as text; x; state, empty if the
            trial is not done; `validation`, by which a rate is chosen, and `value`; the step of the circuit that is
            missing (none, binding, recall, binding and recall, match, values; empty if not measured); the level of
            answering with any value of the context; the steps that the trial should make, and those that it made. A
            number that is not known is nan. The metric of a diverged trial is the task's `worst`: it counts as failing.
        larger_is_better: whether the metric is; an error has no windows, because no threshold holds for all tasks.
    """

    x: str
    line: str | None
    panels: tuple[str, ...]
    metric: str
    column: str
    trials: pd.DataFrame
    larger_is_better: bool = True

    @property
    def by_rate(self) -> bool:
        """Whether the horizontal axis is the learning rate, so that there are windows and a rate to choose."""
        return self.x == RATE

    @property
    def is_metric(self) -> bool:
        """Whether `value` is the task's metric on held-out examples, which has windows and a chance level."""
        return self.column in _columns(self.metric)

    @property
    def x_words(self) -> str:
        """The horizontal axis as people call it."""
        return "learning rate" if self.by_rate else self.x

    @property
    def value_words(self) -> str:
        """The column as people call it: `test accuracy`, and any other by its name."""
        return f"test {self.metric}" if self.column == f"best_test_{self.metric}" else self.column.replace("_", " ")

    @staticmethod
    def of(grid: Grid, results: ResultsTable, column: str | None = None) -> "Cells":
        """The cells of a grid, with a column of its results; by default the metric on test of the best checkpoint."""
        metric = metric_of(grid)
        chosen = column or f"best_test_{metric}"
        rows = [results.rows.get(trial.digest, {}) for trial in grid.trials]
        rows = [row if row.get("state") in DONE else {} for row in rows]
        if not any(rows):
            raise UserError(f"{results.path} has no trial of {grid.name} that is done: there is nothing to draw")
        numbers = {name for row in rows for name, value in row.items() if _is_number(value)}
        if column is not None and column not in numbers:
            raise unknown("column of numbers", column, numbers)
        x, line, panels = _roles(grid)
        fails = _columns(metric)
        trials = [
            {
                "panel": ", ".join(words(axis, trial) for axis in panels),
                "line": _text(trial.values[line]) if line else "",
                "x": float(trial.values[x]),
                "seed": " ".join(_text(trial.values[axis]) for axis in SEEDS if axis in trial.values),
                "state": row.get("state", ""),
                "validation": _number(row, f"best_validation_{metric}", fails, trial.config.task.worst),
                "value": _number(row, chosen, fails, trial.config.task.worst),
                "missing": missing_step(row),
                "chance": trial.config.task.chance if chosen in fails else None,
                "steps": trial.config.train.steps,
                "ended": _number(row, "steps", ()),
                "digest": trial.digest,
            }
            for trial, row in zip(grid.trials, rows, strict=True)
        ]
        frame = pd.DataFrame(trials).astype({"chance": float})
        return Cells(x, line, panels, metric, chosen, frame, grid.trials[0].config.task.larger_is_better)


def metric_of(grid: Grid) -> str:
    """The metric of the tasks of a grid, which must be the same for all."""
    names = list(dict.fromkeys(trial.config.task.metric for trial in grid.trials))
    if len(names) > 1:
        raise UserError(
            f"the tasks of {grid.name} have different metrics, which cannot be compared: {', '.join(names)}"
        )
    return names[0]


def level_words(grid: Grid) -> str:
    """What the level of chance of the tasks of a grid is the metric of."""
    words = dict.fromkeys(trial.config.task.chance_words for trial in grid.trials)
    return " or ".join(word.replace("any value of the context", "any value of the context (1/k)") for word in words)


def _columns(metric: str) -> tuple[str, ...]:
    """The columns of the metric on held-out examples."""
    return tuple(f"{which}_{split}_{metric}" for which in ("best", "last") for split in ("test", "validation"))


def _roles(grid: Grid) -> tuple[str, str | None, tuple[str, ...]]:
    """The horizontal axis, the axis of lines, and the axes of panels."""
    values = {axis: [_text(trial.values[axis]) for trial in grid.trials] for axis in grid.axes}
    varied = [axis for axis in grid.axes if len(set(values[axis])) > 1 and axis not in SEEDS]
    numbers = [axis for axis in varied if all(_is_number(trial.values[axis]) for trial in grid.trials)]
    if not numbers:
        raise UserError(
            f"{grid.name} has no axis to draw along: give {RATE} or another field two numbers or more,"
            f" for example {RATE}: {{log: [1e-4, 1e-2], points: 5}}"
        )
    x = RATE if RATE in numbers else numbers[0]
    others = [axis for axis in varied if axis != x]
    line = next((axis for axis in _MODELS if axis in others), None)
    line = line or next((axis for axis in others if not _follows(values[axis], values[x])), None)
    panels = [axis for axis in others if axis != line and not _follows(values[axis], values[x])]
    return x, line, tuple(axis for axis in panels if line is None or not _follows(values[axis], values[line]))


def _follows(values: Sequence[str], others: Sequence[str]) -> bool:
    """Whether each value of another axis goes with one value of this one only."""
    return len(set(zip(values, others, strict=True))) == len(set(others))


def words(axis: str, trial: Trial) -> str:
    """The value of a trial on an axis as people say it: `pairs 4`."""
    return f"{axis.rpartition('.')[2]} {_text(trial.values[axis])}"


def _text(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else "none" if value is None else str(value)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _number(row: Row, column: str, fails: Sequence[str], worst: float = 0.0) -> float:
    """A number of a row; the worst in the columns of the metric if the trial diverged, nan where there is none."""
    if row.get("state") == "diverged" and column in fails:
        return worst
    value: Any = row.get(column)
    return float(value) if _is_number(value) else math.nan


def missing_step(row: Row) -> str:
    """What a trial's circuit lacks: none, binding, recall, binding and recall, match, values; empty if not measured."""
    if row.get("circuit") not in ("found", "not found"):
        return ""
    missing = str(row.get("missing") or _FORMED)
    return "values" if missing.startswith("values") else missing  # without values, the other steps are missing too
