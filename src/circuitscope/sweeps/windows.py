"""The learning rate that is chosen on validation, and the window of learning rates under which a model learns.

The window of one seed is the width, in decades, of the rates around the best one whose metric is at or above a
threshold, without a gap. A grid knows the metric at its rates only, so each rate stands for half the way, in the
logarithm, to its neighbours: one passing rate among failing ones has a window of one step of the grid, and no window is
known to better than a step. A second stretch of passing rates, beyond a rate that fails, does not count. The first and
the last rate stand for nothing beyond the grid: if the window reaches one of them, the true window is at least as wide
as the one given. A diverged trial fails. A seed whose trials are not all done has no window.

Intervals are 95% intervals of the mean over seeds, by Student's t; one seed has none. They end where the quantity does:
no window is below 0 or wider than the grid.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pandas as pd

from circuitscope.config import RunConfig
from circuitscope.errors import UserError
from circuitscope.sweeps.cells import Cells
from circuitscope.sweeps.grid import Grid
from circuitscope.sweeps.results import ResultsTable

THRESHOLD = 0.95
_CONFIDENCE = 0.95
_CELL = ["panel", "line"]
_TENTHS = tuple(round(i / 10, 1) for i in range(1, 11))


@dataclass(frozen=True)
class Window:
    """A window in decades, and whether it reaches an end of the grid, so that the true one is at least as wide."""

    decades: float
    at_least: bool


def window(rates: Sequence[float], values: Sequence[float], threshold: float = THRESHOLD) -> Window:
    """The window of one seed, from its metric at each rate; nan if there are fewer than two rates.

    Of equally good rates the smallest is the best one.
    """
    if len(rates) < 2:
        return Window(math.nan, False)
    log, value = zip(*sorted(zip((math.log10(rate) for rate in rates), values, strict=True)), strict=True)
    first = last = value.index(max(value))
    if value[first] < threshold:
        return Window(0.0, False)
    while first > 0 and value[first - 1] >= threshold:
        first -= 1
    while last + 1 < len(value) and value[last + 1] >= threshold:
        last += 1
    low = log[first] if first == 0 else (log[first - 1] + log[first]) / 2
    high = log[last] if last + 1 == len(log) else (log[last] + log[last + 1]) / 2
    return Window(high - low, first == 0 or last + 1 == len(log))


@dataclass(frozen=True)
class Mean:
    """A mean over seeds with its interval; the ends are nan for fewer than two seeds, and where a value is infinite."""

    value: float
    low: float
    high: float
    seeds: int

    @staticmethod
    def of(values: Iterable[float], least: float = -math.inf, most: float = math.inf) -> "Mean":
        """The mean of values that lie between `least` and `most`."""
        from scipy.special import stdtrit

        known = pd.Series(list(values), dtype=float).dropna()
        if len(known) < 2 or not known.abs().max() < math.inf:
            return Mean(float(known.mean()), math.nan, math.nan, len(known))
        reach = float(stdtrit(len(known) - 1, (1 + _CONFIDENCE) / 2) * known.sem())
        value = float(known.mean())
        return Mean(value, max(value - reach, least), min(value + reach, most), len(known))


def choices(cells: Cells) -> pd.DataFrame:
    """For each cell the learning rate with the best mean validation metric over seeds, and its value on test.

    A diverged seed counts as an accuracy of 0, or as an error without bound. Of rates that are equally good, the
    smallest is chosen.
    Columns: panel, line, rate, validation, value, low, high, seeds.
    """
    ends = (0.0, 1.0) if cells.metric == "accuracy" else (-math.inf, math.inf)

    def chosen(trials: pd.DataFrame) -> Iterable[dict[str, Any]]:
        by_rate = trials.groupby("x")["validation"].mean().dropna()  # in the order of the rates
        if len(by_rate):
            best = int(by_rate.argmax() if cells.larger_is_better else by_rate.argmin())  # the first of the best
            rate = float(by_rate.index[best])
            mean = Mean.of(trials[trials["x"] == rate]["value"], *ends)
            yield {"rate": rate, "validation": float(by_rate.iloc[best]), **vars(mean)}

    return _by_cell(cells, cells.trials, chosen, ["rate", "validation", "value", "low", "high", "seeds"])


def windows(cells: Cells, threshold: float = THRESHOLD) -> pd.DataFrame:
    """The window of each cell that has one: panel, line, steps, value, low, high, seeds, at_least, grid_step.

    `at_least` says whether a seed's window reaches an end of the grid; `grid_step` is the widest step of the grid.
    """
    return _windows(cells, cells.trials, threshold)


def windows_by_budget(cells: Cells, grid: Grid, results: ResultsTable, threshold: float = THRESHOLD) -> pd.DataFrame:
    """The windows of shorter runs, by the best validation metric up to their last step; columns as of `windows`.

    The budgets are tenths of the steps where curves.csv has all trials, and otherwise the grid's `fractions`, which
    stand in results.csv. A trial that diverged fails from that step on.
    """
    if not cells.larger_is_better:
        raise UserError(f"no window by budget: windows are of accuracies, and the metric is {cells.metric}")
    if not all(_answers_for_shorter_runs(trial.config) for trial in grid.trials):
        raise UserError(
            "no window by budget: a run answers for shorter ones only with train.schedule constant and a warmup"
            " given in steps (train.warmup_steps)"
        )
    if (cells.trials.groupby(_CELL)["steps"].nunique() > 1).any():
        raise UserError("no window by budget: train.steps differs between the rates of a model")
    metric = cells.metric
    done = cells.trials[cells.trials["state"] != ""]
    curves = {digest: _points(results.curves.get(digest, []), metric) for digest in done["digest"]}
    complete = all(curves.values())
    budgets = _TENTHS if complete else grid.fractions
    if not budgets:
        raise UserError("no window by budget: it needs curves.csv, or a grid with fractions: [0.25, 0.5, 1]")

    def best(trial: Any, budget: float) -> float:
        last = budget * trial.steps
        if trial.state == "" or (trial.state == "diverged" and trial.ended <= last):
            return math.nan if trial.state == "" else 0.0
        if not complete:
            return float(results.rows[trial.digest].get(f"{metric}_at_{budget:g}", math.nan))
        return max((value for step, value in curves[trial.digest] if step <= last), default=math.nan)

    tables = []
    for budget in budgets:
        trials = cells.trials.assign(value=[best(trial, budget) for trial in cells.trials.itertuples()])
        table = _windows(cells, trials, threshold)
        tables.append(table.assign(steps=table["steps"] * budget))
    return pd.concat(tables, ignore_index=True)


def _answers_for_shorter_runs(config: RunConfig) -> bool:
    """Whether the first steps of a run equal those of a run with fewer steps."""
    train = config.train
    return train.schedule == "constant" and (train.warmup_steps is not None or train.warmup == 0)


def _points(curve: Sequence[dict[str, Any]], metric: str) -> list[tuple[int, float]]:
    """The steps of a curve and the metric there."""
    return [(int(point["step"]), float(point[metric])) for point in curve if metric in point]


def _windows(cells: Cells, trials: pd.DataFrame, threshold: float) -> pd.DataFrame:
    def found(cell: pd.DataFrame) -> Iterable[dict[str, Any]]:
        if not cells.larger_is_better:
            return
        complete = [seed for _, seed in cell.groupby("seed", sort=False) if seed["value"].notna().all()]
        several = [window(list(seed["x"]), list(seed["value"]), threshold) for seed in complete]
        several = [one for one in several if not math.isnan(one.decades)]
        if several:
            logs = sorted({math.log10(x) for x in cell["x"]})
            yield {
                "steps": int(cell["steps"].iloc[0]),
                **vars(Mean.of([one.decades for one in several], 0.0, logs[-1] - logs[0])),
                "at_least": any(one.at_least for one in several),
                "grid_step": max(right - left for left, right in pairwise(logs)),
            }

    columns = ["steps", "value", "low", "high", "seeds", "at_least", "grid_step"]
    return _by_cell(cells, trials, found, columns)


def _by_cell(
    cells: Cells,
    trials: pd.DataFrame,
    rows: Callable[[pd.DataFrame], Iterable[dict[str, Any]]],
    columns: Sequence[str],
) -> pd.DataFrame:
    """A table with the rows that each cell gives; without any where the horizontal axis is no learning rate."""
    found = [
        dict(zip(_CELL, cell, strict=True)) | row
        for cell, part in (trials.groupby(_CELL, sort=False) if cells.by_rate else ())
        for row in rows(part)
    ]
    return pd.DataFrame(found, columns=[*_CELL, *columns])
