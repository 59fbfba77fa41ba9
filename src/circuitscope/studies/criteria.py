"""Judges one criterion of a study by the tables of its grid: in which cells it holds, fails, or is open.

A cell is open while trials are missing that could still change its answer. A trial that diverged has a metric of 0.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from circuitscope.errors import UserError, shown, unknown
from circuitscope.studies.bump import BUMPS, bump
from circuitscope.studies.study import Criterion
from circuitscope.sweeps.grid import Grid, Trial
from circuitscope.sweeps.results import DONE, ResultsTable, Row
from circuitscope.sweeps.windows import THRESHOLD, Mean, window

WINDOW, LACKS_BINDING = "window", "lacks_binding"
Outcome = Literal["holds", "fails", "open", "not run"]

_RATE = "train.lr"
_SEEDS = ("train.seed", "train.data_seed")
Seed = tuple[Any, ...]
Place = tuple[tuple[str, Any], ...]  # the values of the axes that make a cell


@dataclass(frozen=True)
class Cell:
    """One cell: its place, its value for each seed of its trials (nan where it is not known), and what that means.

    With `above: chance`, values are distances to that level. `complete` says that no trial is missing.
    """

    place: Place
    values: dict[Seed, float]
    outcome: Outcome
    complete: bool

    @property
    def label(self) -> str:
        return _label(self.place)

    @property
    def mean(self) -> Mean:
        return Mean.of(self.values.values())


@dataclass(frozen=True)
class Judged:
    """A criterion and its cells."""

    criterion: Criterion
    cells: list[Cell]

    @property
    def outcome(self) -> Outcome:
        """Fails if a cell fails, holds if every cell holds; not run if no cell has a trial."""
        outcomes = {cell.outcome for cell in self.cells}
        if "fails" in outcomes:
            return "fails"
        if outcomes in ({"holds"}, {"not run"}):
            return next(iter(outcomes))
        return "open"

    def short_labels(self) -> list[str]:
        """The label of each cell without the axes on which all cells have the same value."""
        several = {path for path, _ in set().union(*(cell.place for cell in self.cells)) - _shared(self.cells)}
        return [_label(tuple(part for part in cell.place if part[0] in several)) for cell in self.cells]


def judge(criterion: Criterion, grid: Grid, results: ResultsTable) -> Judged:
    """What the table says of a criterion."""
    _check(criterion, grid)
    counted = [trial for trial in grid.trials if _matches(trial, criterion.where)]
    if not counted:
        raise UserError(f"criterion {criterion.name!r}: no trial of {grid.name} has {shown(criterion.where)}")
    known = _Quantities(criterion, results)
    there = _places(grid.trials, criterion)
    cells = []
    for place, trials in _places(counted, criterion).items():
        seeds, other = _seeds(trials), None
        values = known.of(trials, seeds)
        if criterion.than:
            other = there.get(_moved(place, criterion.than))
            if other is None:
                raise UserError(f"criterion {criterion.name!r}: {_label(place)} has no trial with {criterion.than}")
            shared = {seed: value for seed, value in values.items() if seed in _seeds(other)}
            if not shared:
                raise UserError(f"criterion {criterion.name!r}: {_label(place)} shares no seed with {criterion.than}")
            values = _compared(shared, known.of(other, shared), criterion.by)
        elif criterion.than_rates:
            fewer = [trial for trial in trials if trial.config.train.lr in criterion.than_rates]
            values = _compared(values, known.of(fewer, seeds), criterion.by)
        elif criterion.holds_if.above:
            values = _above_chance(values, trials[0], criterion)
        done = [results.done(trial.digest) for trial in (*trials, *(other or ()))]
        cells.append(Cell(place, values, _outcome(criterion, values) if any(done) else "not run", all(done)))
    return Judged(criterion, cells)


class _Quantities:
    """The quantity of a criterion for the trials of a cell, by seed."""

    def __init__(self, criterion: Criterion, results: ResultsTable):
        self.criterion, self.results = criterion, results

    def of(self, trials: list[Trial], seeds: Iterable[Seed]) -> dict[Seed, float]:
        if self.criterion.quantity == WINDOW:
            return {seed: self._window([t for t in trials if _seed(t) == seed]) for seed in seeds}
        if self.criterion.rate == "best":
            trials = self._at_the_best_rate(trials)
        return {seed: self._single([t for t in trials if _seed(t) == seed]) for seed in seeds}

    def _number(self, trial: Trial, column: str) -> float:
        if column in BUMPS:
            return bump(column, trial, self.results.curves.get(trial.digest, []))
        row: Row = self.results.rows.get(trial.digest, {})
        if column == LACKS_BINDING:
            return _lacks_binding(row, self._number(trial, f"best_test_{trial.config.task.metric}"))
        if row.get("state") == "diverged" and column.endswith(f"_{trial.config.task.metric}"):
            return trial.config.task.worst
        if row.get("state") not in DONE:
            return math.nan
        value = row.get(column)
        if isinstance(value, int | float):
            return float(value)
        return math.inf if column.startswith("step_") else math.nan  # it never got that far

    def _single(self, trials: list[Trial]) -> float:
        return self._number(trials[0], self.criterion.quantity) if trials else math.nan

    def _at_the_best_rate(self, trials: list[Trial]) -> list[Trial]:
        """The trials at the rate with the best mean on validation; none while trials are missing."""
        rates: dict[float, list[float]] = {}
        for trial in trials:
            column = f"best_validation_{trial.config.task.metric}"
            rates.setdefault(trial.config.train.lr, []).append(self._number(trial, column))
        means = {rate: sum(values) / len(values) for rate, values in sorted(rates.items())}
        if any(math.isnan(mean) for mean in means.values()):
            return []
        choose = max if trials[0].config.task.larger_is_better else min
        best = choose(means, key=lambda rate: means[rate])  # the smallest of equals, because the rates are in order
        return [trial for trial in trials if trial.config.train.lr == best]

    def _window(self, trials: list[Trial]) -> float:
        values = [self._number(trial, f"best_test_{trial.config.task.metric}") for trial in trials]
        if not trials or any(math.isnan(value) for value in values):
            return math.nan
        return window([trial.config.train.lr for trial in trials], values).decades


def _lacks_binding(row: Row, accuracy: float) -> float:
    """1 if a trial that fails lacks the binding step, 0 if only others; nan if it passes or was not measured."""
    if not accuracy < THRESHOLD or not row.get("circuit"):
        return math.nan
    return float("binding" in str(row.get("missing") or ""))


def _above_chance(values: Mapping[Seed, float], trial: Trial, criterion: Criterion) -> dict[Seed, float]:
    """The distance to what answering with any value of the context would give."""
    task = trial.config.task
    if task.chance is None:
        raise UserError(f"criterion {criterion.name!r}: above: chance, and the task {task.name} has no such level")
    return {seed: value - task.chance for seed, value in values.items()}


def _outcome(criterion: Criterion, values: Mapping[Seed, float]) -> Outcome:
    passes = [criterion.holds_if.holds(value) for value in values.values() if not math.isnan(value)]
    needed = len(values) if criterion.seeds == "every" else criterion.seeds
    if sum(passes) >= needed:
        return "holds"
    can_still_pass = len(values) - (len(passes) - sum(passes))
    return "open" if can_still_pass >= needed else "fails"


def _compared(values: Mapping[Seed, float], others: Mapping[Seed, float], by: str) -> dict[Seed, float]:
    """Ratio or difference seed by seed; something is infinitely more than nothing, and 0 to 0 is not known."""
    if by == "difference":
        return {seed: value - others[seed] for seed, value in values.items()}
    return {seed: _ratio(value, others[seed]) for seed, value in values.items()}


def _ratio(value: float, other: float) -> float:
    """A ratio; inf / inf and 0 / 0 are nan."""
    if other:
        return value / other
    return math.inf if value > 0 else math.nan


def _check(criterion: Criterion, grid: Grid) -> None:
    for path in (*criterion.where, *criterion.than):
        if path not in grid.axes:
            raise unknown(f"axis in criterion {criterion.name!r}", path, grid.axes)
    if criterion.rate == "best" and _RATE not in grid.axes:
        raise UserError(f"criterion {criterion.name!r}: rate: best needs the axis {_RATE} in {grid.name}")
    rates = {trial.config.train.lr for trial in grid.trials}
    for rate in criterion.than_rates:
        if rate not in rates:
            raise UserError(f"criterion {criterion.name!r}: than_rates: {grid.name} has no rate {rate:g}")
    if isinstance(criterion.seeds, int):
        counted = (trial for trial in grid.trials if _matches(trial, criterion.where))
        counts = [len(_seeds(trials)) for trials in _places(counted, criterion).values()]
        if counts and not 1 <= criterion.seeds <= min(counts):
            few = f"a cell of {grid.name} has {min(counts)}"
            raise UserError(f"criterion {criterion.name!r}: seeds: {criterion.seeds}, and {few}")


def _matches(trial: Trial, where: Mapping[str, Any]) -> bool:
    return all(
        trial.values[path] in (wanted if isinstance(wanted, list) else [wanted]) for path, wanted in where.items()
    )


def _seed(trial: Trial) -> Seed:
    return tuple(trial.values[path] for path in _SEEDS if path in trial.values)


def _seeds(trials: Iterable[Trial]) -> list[Seed]:
    """The seeds of some trials, each once; a grid may give some cells more of them than others."""
    return list(dict.fromkeys(_seed(trial) for trial in trials))


def _places(trials: Iterable[Trial], criterion: Criterion) -> dict[Place, list[Trial]]:
    """The trials by cell: by the values of all axes but the seeds, and the rate where one stands for all."""
    left_out = {*_SEEDS, *([_RATE] if criterion.rate == "best" or criterion.quantity == WINDOW else [])}
    found: dict[Place, list[Trial]] = {}
    for trial in trials:
        place = tuple((path, value) for path, value in trial.values.items() if path not in left_out)
        found.setdefault(place, []).append(trial)
    return found


def _shared(cells: Iterable[Cell]) -> set[tuple[str, Any]]:
    """The axes on which all cells have the same value, with that value."""
    return set.intersection(*(set(cell.place) for cell in cells))


def _moved(place: Place, than: Mapping[str, Any]) -> Place:
    return tuple((path, than.get(path, value)) for path, value in place)


def _label(place: Place) -> str:
    return ", ".join(
        f"{path.rpartition('.')[2]} {value:g}" if isinstance(value, float) else f"{path.rpartition('.')[2]} {value}"
        for path, value in place
    )
