"""Judges one criterion of a study by the tables of its grid: in which cells it holds, fails, or is open.

A cell is open while trials are missing that could still change its answer. A trial that diverged has the worst value of
its metric: an accuracy of 0, or an error without bound. A window of learning rates that reaches an end of its grid may
be wider than it says, and a cell whose answer depends on that is open too.
"""

import math
import operator
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from circuitscope.errors import UserError, shown, unknown
from circuitscope.studies.bump import BUMPS, bump
from circuitscope.studies.study import Criterion
from circuitscope.sweeps.cells import RATE, SEEDS, missing_step
from circuitscope.sweeps.grid import Grid, Trial, check_values, matches
from circuitscope.sweeps.results import DONE, ResultsTable, Row
from circuitscope.sweeps.trial import REACHED
from circuitscope.sweeps.windows import THRESHOLD, Mean, window

WINDOW, LACKS_BINDING = "window", "lacks_binding"
_SHARES = ("accuracy", "legality")  # columns with such a word in their name lie between 0 and 1
Outcome = Literal["holds", "fails", "open", "not run"]

Seed = tuple[Any, ...]
Place = tuple[tuple[str, Any], ...]  # the values of the axes that make a cell


class Value(NamedTuple):
    """What a quantity is by the table, and between which ends the true one lies: apart only for windows cut off."""

    stated: float
    low: float
    high: float

    @staticmethod
    def exact(value: float) -> "Value":
        return Value(value, value, value)


@dataclass(frozen=True)
class Cell:
    """One cell: its place, its value for each seed of its trials (nan where it is not known), and what that means.

    With `above: chance`, values are distances to that level. `complete` says that no trial is missing, `cut_off` that a
    window reaches an end of the grid, so that a value is a bound.
    """

    place: Place
    values: dict[Seed, float]
    outcome: Outcome
    complete: bool
    cut_off: bool = False
    ends: tuple[float, float] = (-math.inf, math.inf)  # between which the values lie by their nature

    @property
    def label(self) -> str:
        return _label(self.place)

    @property
    def mean(self) -> Mean:
        return Mean.of(self.values.values(), *self.ends)


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

    def label(self, cell: Cell) -> str:
        """What makes a cell; of the axes in `than` only those on which it differs from what it is compared with."""
        return self._label(cell, cell.place)

    def short_labels(self) -> list[str]:
        """The label of each cell without the axes on which all cells have the same value."""
        several = {path for path, _ in set().union(*(cell.place for cell in self.cells)) - _shared(self.cells)}
        return [self._label(cell, tuple(p for p in cell.place if p[0] in several)) for cell in self.cells]

    def _label(self, cell: Cell, parts: Place) -> str:
        than = self.criterion.than
        same = {path for path in than if matches({path: than[path]}, dict(cell.place))}
        rest = _label(tuple(part for part in parts if part[0] not in same))
        if than and same == set(than):
            return ", ".join(filter(None, ("what is compared with", rest)))
        return rest or _label(parts)


def judge(criterion: Criterion, grid: Grid, results: ResultsTable) -> Judged:
    """What the table says of a criterion."""
    _check(criterion, grid, results)
    counted = [trial for trial in grid.trials if matches(criterion.where, trial.values)]
    if not counted:
        raise UserError(f"criterion {criterion.name!r}: no trial of {grid.name} has {shown(criterion.where)}")
    known = _Quantities(criterion, results)
    pooled = {*SEEDS, RATE} - criterion.than.keys()
    also = {path: value for path, value in criterion.where.items() if path in pooled}
    there = _places((trial for trial in grid.trials if matches(also, trial.values)), criterion)
    if criterion.than and all(matches(criterion.than, trial.values) for trial in counted):
        raise UserError(f"criterion {criterion.name!r}: every cell is compared with itself alone")
    cells = []
    for place, trials in _places(counted, criterion).items():
        seeds, other = _seeds(trials), None
        values = known.of(trials, seeds)
        if criterion.than:
            beside = _moved(place, criterion.than, there)
            if beside is None:
                raise UserError(f"criterion {criterion.name!r}: {_label(place)} has no trial with {criterion.than}")
            other = there[beside]
            shared = {seed: value for seed, value in values.items() if seed in _seeds(other)}
            if len(shared) < (1 if criterion.seeds == "every" else criterion.seeds):
                few = f"{_label(place)} shares {len(shared)} seeds with {criterion.than}"
                raise UserError(f"criterion {criterion.name!r}: {few}; expected at least {criterion.seeds}")
            values = _compared(shared, known.of(other, shared), criterion.by)
            if beside == place:  # what is compared with itself is known, however wide it is
                values = {seed: Value.exact(value.stated) for seed, value in values.items()}
        elif criterion.than_rates:
            fewer = [trial for trial in trials if trial.config.train.lr in criterion.than_rates]
            if lacking := set(criterion.than_rates) - {trial.config.train.lr for trial in fewer}:
                lacks = f"{_label(place)} lacks the rates {', '.join(f'{rate:g}' for rate in sorted(lacking))}"
                raise UserError(f"criterion {criterion.name!r}: {lacks} of than_rates")
            values = _compared(values, known.of(fewer, seeds), criterion.by)
        elif criterion.holds_if.above:
            values = _above_chance(values, trials[0], criterion)
        done = [results.done(trial.digest, grid.measure) for trial in (*trials, *(other or ()))]
        known_at_all = any(not math.isnan(value.stated) for value in values.values())
        outcome = _outcome(criterion, values) if any(done) or known_at_all else "not run"
        stated = {seed: value.stated for seed, value in values.items()}
        cut_off = any(value.low != value.high for value in values.values() if not math.isnan(value.stated))
        cells.append(Cell(place, stated, outcome, all(done), cut_off, _ends(criterion)))
    return Judged(criterion, cells)


class _Quantities:
    """The quantity of a criterion for the trials of a cell, by seed."""

    def __init__(self, criterion: Criterion, results: ResultsTable):
        self.criterion, self.results = criterion, results

    def of(self, trials: list[Trial], seeds: Iterable[Seed]) -> dict[Seed, Value]:
        if self.criterion.quantity == WINDOW:
            return {seed: self._window([t for t in trials if _seed(t) == seed]) for seed in seeds}
        if self.criterion.rate == "best":
            trials = self._at_the_best_rate(trials)
        return {seed: Value.exact(self._single([t for t in trials if _seed(t) == seed])) for seed in seeds}

    def _number(self, trial: Trial, column: str) -> float:
        row: Row = self.results.rows.get(trial.digest, {})
        metric = trial.config.task.metric
        if row.get("state") not in DONE:
            return math.nan
        if column in BUMPS:
            curve = self.results.curves.get(trial.digest, [])
            whole = bool(curve) and curve[-1]["step"] == row.get("steps")  # a curve that was cut off tells nothing
            return bump(column, trial, curve) if whole else math.nan
        if column == LACKS_BINDING:
            return _lacks_binding(row, self._number(trial, f"best_test_{metric}"))
        if row["state"] == "diverged" and (worst := _of_diverged(column, trial)) is not None:
            return worst
        value = row.get(column)
        if isinstance(value, int | float):
            return float(value)
        return math.inf if column in REACHED and metric == "accuracy" else math.nan  # it never got that far

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

    def _window(self, trials: list[Trial]) -> Value:
        values = [self._number(trial, f"best_test_{trial.config.task.metric}") for trial in trials]
        if not trials or any(math.isnan(value) for value in values):
            return Value.exact(math.nan)
        found = window([trial.config.train.lr for trial in trials], values)
        return Value(found.decades, found.decades, math.inf if found.at_least else found.decades)


def _of_diverged(column: str, trial: Trial) -> float | None:
    """What a column counts as for a trial that diverged; None if the table's value stands.

    The metric is the task's worst, a loss is infinite, a step is never reached, and a measure of a checkpoint that came
    before is not known.
    """
    metric = trial.config.task.metric
    if column in {
        f"{which}_{split}_{metric}" for which in ("best", "last") for split in ("train", "validation", "test")
    }:
        return trial.config.task.worst
    if column == f"evaluated_{metric}" or column.startswith((f"evaluated_{metric}_", f"{metric}_at_")):
        return trial.config.task.worst
    if column.startswith("evaluated_"):
        return math.nan
    return math.inf if column in REACHED or column.endswith("_loss") else None


def _lacks_binding(row: Row, accuracy: float) -> float:
    """1 if a trial that fails lacks the binding step, 0 if it does not; nan if it passes or that cannot be told."""
    missing = missing_step(row)
    if not accuracy < THRESHOLD or missing in ("", "match"):
        return math.nan
    return float("binding" in missing or missing == "values")  # without values, nothing is bound


def _above_chance(values: Mapping[Seed, Value], trial: Trial, criterion: Criterion) -> dict[Seed, Value]:
    """The distance to what answering with any value of the context would give."""
    task = trial.config.task
    if task.chance is None:
        raise UserError(f"criterion {criterion.name!r}: above: chance, and the task {task.name} has no such level")
    return {seed: Value(*(end - task.chance for end in value)) for seed, value in values.items()}


def _outcome(criterion: Criterion, values: Mapping[Seed, Value]) -> Outcome:
    """Counts the seeds whose value passes or fails wherever between its ends it is; the others are not known."""
    ends = [value[1:] for value in values.values() if not any(map(math.isnan, value))]
    both = [{criterion.holds_if.holds(end) for end in pair} for pair in ends]
    passes = [one == {True} for one in both if len(one) == 1]
    needed = len(values) if criterion.seeds == "every" else criterion.seeds
    if sum(passes) >= needed:
        return "holds"
    can_still_pass = len(values) - (len(passes) - sum(passes))
    return "open" if can_still_pass >= needed else "fails"


def _compared(values: Mapping[Seed, Value], others: Mapping[Seed, Value], by: str) -> dict[Seed, Value]:
    """Ratio or difference seed by seed; something is infinitely more than nothing, and 0 to 0 is not known."""
    compare = _ratio if by == "ratio" else operator.sub
    return {
        seed: Value(
            compare(value.stated, others[seed].stated),
            compare(value.low, others[seed].high),
            compare(value.high, others[seed].low),
        )
        for seed, value in values.items()
    }


def _ratio(value: float, other: float) -> float:
    """A ratio; inf / inf and 0 / 0 are nan."""
    if other:
        return value / other
    return math.inf if value > 0 else math.nan


def _check(criterion: Criterion, grid: Grid, results: ResultsTable) -> None:
    """Refuses what could not be judged, or would be judged wrongly, in one line that names the criterion."""
    what = f"criterion {criterion.name!r}"
    labels = {path: [trial.values[path] for trial in grid.trials] for path in grid.axes}
    for path, wanted in (*criterion.where.items(), *criterion.than.items()):
        if path not in grid.axes:
            raise unknown(f"axis in {what}", path, grid.axes)
        check_values(what, path, wanted, labels[path])
    if criterion.rate == "best" and RATE not in grid.axes:
        raise UserError(f"{what}: rate: best needs the axis {RATE} in {grid.name}")
    for path in criterion.than:
        if path in _pooled(criterion):
            raise UserError(f"{what}: than cannot name {path}, because a cell has all its values")
    rates = {trial.config.train.lr for trial in grid.trials}
    for rate in criterion.than_rates:
        if rate not in rates:
            raise UserError(f"{what}: than_rates: {grid.name} has no rate {rate:g}")
    tasks = [trial.config.task for trial in grid.trials if matches(criterion.where, trial.values)]
    if criterion.quantity in (WINDOW, LACKS_BINDING) and not all(task.larger_is_better for task in tasks):
        raise UserError(f"{what}: {criterion.quantity} is of accuracies, and {grid.name} has errors")
    _check_seeds(criterion, grid)
    _check_quantity(criterion, grid, results)


def _check_seeds(criterion: Criterion, grid: Grid) -> None:
    counted = (trial for trial in grid.trials if matches(criterion.where, trial.values))
    for trials in _places(counted, criterion).values():
        if isinstance(criterion.seeds, int) and not 1 <= criterion.seeds <= len(_seeds(trials)):
            few = f"a cell of {grid.name} has {len(_seeds(trials))}"
            raise UserError(f"criterion {criterion.name!r}: seeds: {criterion.seeds}, and {few}")
        by_rate = {trial.config.train.lr: set[Seed]() for trial in trials}
        for trial in trials:
            by_rate[trial.config.train.lr].add(_seed(trial))
        by_all = "rate: best" if criterion.rate == "best" else WINDOW if criterion.quantity == WINDOW else ""
        if by_all and len(set(map(frozenset, by_rate.values()))) > 1:
            raise UserError(f"criterion {criterion.name!r}: {by_all} needs the same seeds at every rate of a cell")


def _check_quantity(criterion: Criterion, grid: Grid, results: ResultsTable) -> None:
    """A column that no trial has is unknown, once a trial is done that measured everything."""
    special = {WINDOW, LACKS_BINDING, *BUMPS}
    counted = [trial for trial in grid.trials if matches(criterion.where, trial.values)]
    if any(trial.config.task.metric == "accuracy" for trial in counted):
        special |= REACHED.keys()
    rows = [results.rows[trial.digest] for trial in grid.trials if results.done(trial.digest, grid.measure)]
    finished = [row for row in rows if row["state"] == "finished"]
    columns = {name for row in finished for name, value in row.items() if isinstance(value, int | float)}
    if finished and criterion.quantity not in special | columns:
        raise unknown(f"quantity in criterion {criterion.name!r}", criterion.quantity, sorted(special | columns))


def _seed(trial: Trial) -> Seed:
    return tuple(trial.values[path] for path in SEEDS if path in trial.values)


def _seeds(trials: Iterable[Trial]) -> list[Seed]:
    """The seeds of some trials, each once; a grid may give some cells more of them than others."""
    return list(dict.fromkeys(_seed(trial) for trial in trials))


def _places(trials: Iterable[Trial], criterion: Criterion) -> dict[Place, list[Trial]]:
    """The trials by cell: by the values of all axes but the seeds, and the rate where one stands for all."""
    left_out = _pooled(criterion)
    found: dict[Place, list[Trial]] = {}
    for trial in trials:
        place = tuple((path, value) for path, value in trial.values.items() if path not in left_out)
        found.setdefault(place, []).append(trial)
    return found


def _pooled(criterion: Criterion) -> set[str]:
    """The axes of which a cell has all values."""
    return {*SEEDS, *([RATE] if criterion.rate == "best" or criterion.quantity == WINDOW else [])}


def _ends(criterion: Criterion) -> tuple[float, float]:
    """Between which values a quantity lies by its nature, so that an interval does not reach beyond them."""
    share = criterion.quantity in (LACKS_BINDING, *BUMPS) or any(word in criterion.quantity for word in _SHARES)
    if not share and criterion.quantity != WINDOW:
        return -math.inf, math.inf
    if criterion.than or criterion.than_rates:
        return (0.0 if criterion.by == "ratio" else -math.inf), math.inf
    if criterion.holds_if.above:
        return -math.inf, math.inf
    return 0.0, 1.0 if share else math.inf


def _shared(cells: Iterable[Cell]) -> set[tuple[str, Any]]:
    """The axes on which all cells have the same value, with that value."""
    return set.intersection(*(set(cell.place) for cell in cells))


def _moved(place: Place, than: Mapping[str, Any], there: Iterable[Place]) -> Place | None:
    """The place that has other values on the axes in `than` and the same ones on the rest."""
    kept = dict(place)
    for other in there:
        if matches(than, dict(other)) and all(value == kept[path] for path, value in other if path not in than):
            return other
    return None


def _label(place: Place) -> str:
    return ", ".join(
        f"{path.rpartition('.')[2]} {value:g}" if isinstance(value, float) else f"{path.rpartition('.')[2]} {value}"
        for path, value in place
    )
