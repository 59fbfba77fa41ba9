"""A grid of trials, read from a YAML file: a base config, axes over its fields, and what each trial measures.

    base:                                  # a config as `circuitscope train` takes it
      recipe: plain                        # what is left out has its default; auto: what each trial's model learns with
      task: {length: 64, pairs: 4}
      train: {steps: 2500, warmup_steps: 150}
    axes:                                  # every combination is a trial; the last axis changes fastest
      model.preset: [attention, mamba]
      train.lr: {log: [1e-4, 1e-2], points: 4}
      train.seed: {seeds: 3}
    zipped:                                # fields that change together
      - {task.length: [64, 256], task.pairs: [4, 16]}
    exclude:                               # combinations that are left out; a list means any of its values
      - {model.preset: attention, train.lr: 0.01}
    measure: [circuit]
    fractions: [0.25, 0.5, 1]              # shares of the steps at which accuracy is tabulated

A trial is a complete RunConfig. Its name is the digest of that config, so a trial is the same trial in every sweep.
"""

import itertools
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError, field_validator

from circuitscope.config import RunConfig, override, read_yaml
from circuitscope.errors import UserError, shown, unknown
from circuitscope.explain import explain
from circuitscope.section import Section

FILE = "grid.yaml"
_EXPONENT = re.compile(r"[+-]?\d+(\.\d*)?[eE][+-]?\d+")
_FORMS = "a list of values, {log: [low, high], points: n}, {seeds: n} or {named: {label: value}}"


@dataclass(frozen=True)
class Trial:
    """One run of a grid: its config, and its value on every axis as the table shows it."""

    config: RunConfig
    values: dict[str, Any]

    @cached_property
    def digest(self) -> str:
        return self.config.digest

    @property
    def label(self) -> str:
        """The values of the axes in one line: `mamba lr=0.001 seed=3`."""
        return " ".join(
            str(value) if path in ("model", "model.preset") else f"{path.rpartition('.')[2]}={value}"
            for path, value in self.values.items()
        )


class GridFile(Section):
    """The keys of a grid file; this module's first lines say what they mean."""

    base: dict[str, Any] = Field(default_factory=dict)
    axes: dict[str, Any] = Field(default_factory=dict)
    zipped: list[dict[str, Any]] = Field(default_factory=list)
    exclude: list[dict[str, Any]] = Field(default_factory=list)
    measure: list[str] = Field(default_factory=list)
    fractions: list[float] = Field(default_factory=list)

    @field_validator("fractions")
    @classmethod
    def _shares(cls, value: list[float]) -> list[float]:
        for share in value:
            if not 0 < share <= 1:
                raise ValueError(f"expected shares of the steps above 0 and up to 1, got {share:g}")
        return sorted(set(value))


@dataclass(frozen=True)
class Grid:
    """The trials of a grid file, in order, and what to measure on each."""

    name: str
    trials: list[Trial]
    measure: tuple[str, ...]
    fractions: tuple[float, ...]

    @property
    def axes(self) -> list[str]:
        """The fields that differ between trials, in the order of the file."""
        return list(self.trials[0].values)

    def trial(self, digest: str) -> Trial:
        """The trial with this digest."""
        for trial in self.trials:
            if trial.digest == digest:
                return trial
        raise unknown("trial", digest, [trial.digest for trial in self.trials])


def grid_path(path: str | Path) -> Path:
    """The grid file itself, or the one in a folder."""
    given = Path(path)
    found = given / FILE if given.is_dir() else given
    if not found.is_file():
        raise UserError(f"no grid: {found} does not exist; a grid is a YAML file, or a folder with a {FILE}")
    return found


def read_grid(path: str | Path) -> Grid:
    """Reads a grid file and makes its trials; anything wrong is one line that names the file."""
    file = grid_path(path)
    name = file.parent.resolve().name if file.name == FILE else file.stem
    try:
        return make_grid(name, read_yaml(file))
    except UserError as error:
        text = str(error)
        raise UserError(text if str(file) in text else f"{file}: {text}") from None


def make_grid(name: str, data: Any) -> Grid:
    """The grid that plain data describes."""
    if not isinstance(data, dict):
        raise UserError(f"a grid is a mapping with base and axes, got {type(data).__name__}")
    try:
        file = GridFile.model_validate(data)
    except ValidationError as error:
        raise explain(error, GridFile) from None
    groups = [*_single(file.axes), *_zipped(file.zipped)]
    _check_paths([path for group in groups for path in group])
    exclusions = _exclusions(file.exclude, groups)
    trials: dict[str, Trial] = {}
    for values, changes in _combinations(groups):
        if any(matches(one, values) for one in exclusions):
            continue
        trial = Trial(RunConfig.parse(_with_one_thread(override(file.base, changes))), values)
        if (other := trials.get(trial.digest)) is not None:
            raise UserError(f"two trials are the same run: {other.label} and {trial.label}; leave one out")
        trials[trial.digest] = trial
    if not trials:
        raise UserError("the grid is empty: it has no axes with values, or everything is excluded")
    return Grid(name, list(trials.values()), tuple(file.measure), tuple(file.fractions))


def _with_one_thread(data: dict[str, Any]) -> dict[str, Any]:
    """A trial trains on one thread by default: its weights are then the same on every machine of a kind."""
    train = data.get("train") or {}
    return {**data, "train": {"threads": 1, **train}} if isinstance(train, dict) else data


Values = list[tuple[Any, Any]]  # what the table shows, and what the config gets


def _values(path: str, axis: Any) -> Values:
    """The values of one axis."""
    if isinstance(axis, list):
        values = [(_plain(value), value) for value in map(_number, axis)]
    elif isinstance(axis, dict) and set(axis) == {"log", "points"}:
        values = [(value, value) for value in _log_spaced(path, axis["log"], axis["points"])]
    elif isinstance(axis, dict) and set(axis) == {"seeds"}:
        count = axis["seeds"]
        if not isinstance(count, int) or isinstance(count, bool) or count < 1:
            raise UserError(f"axes.{path}: expected a number of seeds, got {shown(count)}")
        values = [(seed, seed) for seed in range(count)]
    elif isinstance(axis, dict) and set(axis) == {"named"} and isinstance(axis["named"], dict):
        values = [(str(label), value) for label, value in axis["named"].items()]
    else:
        raise UserError(f"axes.{path}: expected {_FORMS}, got {shown(axis)}")
    if not values:
        raise UserError(f"axes.{path} has no values")
    return values


def _log_spaced(path: str, ends: Any, points: Any) -> list[float]:
    """`points` values from low to high at equal ratios, with four digits."""
    ends = [_number(end) for end in ends] if isinstance(ends, list) else ends
    good = isinstance(ends, list) and len(ends) == 2 and all(isinstance(e, int | float) and e > 0 for e in ends)
    if not good or not isinstance(points, int) or isinstance(points, bool) or points < 2:
        raise UserError(f"axes.{path}: expected log: [low, high] above 0 and points of at least 2")
    low, high = (math.log10(end) for end in ends)
    return [float(f"{10 ** (low + (high - low) * i / (points - 1)):.4g}") for i in range(points)]


def _single(axes: dict[str, Any]) -> Iterator[dict[str, Values]]:
    for path, axis in axes.items():
        values = _values(path, axis)
        if len({label for label, _ in values}) < len(values):
            raise UserError(f"axes.{path} has a value twice")
        yield {path: values}


def _zipped(several: list[dict[str, Any]]) -> Iterator[dict[str, Values]]:
    for group in several:
        found = {path: _values(path, axis) for path, axis in group.items()}
        lengths = {path: len(values) for path, values in found.items()}
        if len(set(lengths.values())) > 1:
            raise UserError(f"zipped axes must have as many values as each other, got {lengths}")
        if found:
            yield found


def _check_paths(paths: list[str]) -> None:
    """No field may be set by two axes, not even as a part of another."""
    for one, other in itertools.permutations(paths, 2):
        if one == other or other.startswith(f"{one}."):
            raise UserError(f"two axes set the same field: {one} and {other}")


def _combinations(groups: list[dict[str, Values]]) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Every combination of the groups: what the table shows, and the changes of the config, by field."""
    if not groups:
        return
    for places in itertools.product(*(range(len(next(iter(group.values())))) for group in groups)):
        values: dict[str, Any] = {}
        changes: dict[str, Any] = {}
        for group, place in zip(groups, places, strict=True):
            for path, axis in group.items():
                label, value = axis[place]
                values[path] = label
                changes |= _flat(path, value)
        yield values, changes


def _flat(path: str, value: Any) -> dict[str, Any]:
    """A mapping of fields as dotted paths, so that it changes the base instead of replacing it.

    A mapping with other keys, such as the patterns of train.lr_groups, is one value.
    """
    if not isinstance(value, dict) or not value or not all(str(name).isidentifier() for name in value):
        return {path: value}
    return {key: inner for name, part in value.items() for key, inner in _flat(f"{path}.{name}", part).items()}


def _exclusions(several: list[dict[str, Any]], groups: list[dict[str, Values]]) -> list[dict[str, Any]]:
    axes = {path: [label for label, _ in axis] for group in groups for path, axis in group.items()}
    for one in several:
        if not one:
            raise UserError("exclude: an empty mapping would leave out everything")
        for path, value in one.items():
            if path not in axes:
                raise unknown("axis in exclude", path, axes)
            check_values("exclude", path, value, axes[path])
    return several


def check_values(what: str, path: str, wanted: Any, labels: Iterable[Any]) -> None:
    """Refuses a value, or one of a list of values, that an axis does not have."""
    labels = list(dict.fromkeys(labels))
    several = isinstance(wanted, list) and not any(_same(wanted, label) for label in labels)
    if several and not wanted:
        raise UserError(f"{what}: {path} has an empty list; it has the values {', '.join(map(str, labels))}")
    for one in wanted if several else [wanted]:
        if not any(_same(one, label) for label in labels):
            raise UserError(f"{what}: {path} has no value {shown(one)}; it has {', '.join(map(str, labels))}")


def matches(wanted: Mapping[str, Any], values: Mapping[str, Any]) -> bool:
    """Whether a trial with these values on the axes is meant; a list means any of its values."""
    return all(_is_or_has(one, values[path]) for path, one in wanted.items())


def _is_or_has(wanted: Any, label: Any) -> bool:
    """Whether a label is what is wanted, or one of the values in a list of them."""
    return _same(wanted, label) or (isinstance(wanted, list) and any(_same(one, label) for one in wanted))


def _same(one: Any, other: Any) -> bool:
    one = _number(one)
    if isinstance(one, float) or isinstance(other, float):
        numbers = isinstance(one, int | float) and isinstance(other, int | float)
        return numbers and math.isclose(one, other, rel_tol=1e-3)
    return bool(_plain(one) == other)


def _number(value: Any) -> Any:
    """YAML reads 1e-4 as text, because it has no point; here it is a number."""
    return float(value) if isinstance(value, str) and _EXPONENT.fullmatch(value) else value


def _plain(value: Any) -> Any:
    """A value as a cell of a table: lists and mappings become JSON, none stays none."""
    return json.dumps(value, sort_keys=True) if isinstance(value, list | dict) else value
