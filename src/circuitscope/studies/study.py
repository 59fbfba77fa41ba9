"""A study as a folder: study.yaml with a claim and its criteria, grids of trials, their tables, and a README.

    question: Does one layer of attention solve multi-query recall?
    source: first paper, Figure 3
    claim: One layer of attention does not solve MQAR.
    criteria:                                # all must hold
      - name: does not pass 1/k
        where: {model.n_layers: 1}           # the trials that count; a list means any of these values
        quantity: best_test_accuracy         # a column of results.csv, or one of those in docs/studies.md
        holds_if: {at_most: 0.02, above: chance}
        seeds: every                         # or how many must agree
        otherwise: not reproduced            # or undecided, where more steps could help
      - name: two layers solve it
        premise: true                        # while this does not hold, a failure of the others refutes nothing
        where: {model.n_layers: 2}
        quantity: best_test_accuracy
        holds_if: {at_least: 0.95}
    exploratory: [wider]                     # grids that belong to the study and that no criterion reads
    budget: 2,500 steps of 64 examples
    pilots: [what had been seen before this was written]
    notes: [what else belongs to the reading of the results]

Every combination of the axes that `where` leaves open, except the seeds, is a cell of its own, and a criterion holds if
it holds in every cell. With `rate: best`, the learning rate that is best on validation stands for its cell. With
`than: {axis: value}`, the quantity is compared, seed by seed, with that of the same cell at another value of the axis,
`by: ratio` or `by: difference`. With `than_rates: [rates]` and `rate: best`, it is compared with what the best of those
rates alone gives, so that a criterion can say what a finer grid of rates gains.

The laptop scale of a study is the grid in its folder, or in the folder that a criterion names with `grid`, which may be
that of another study (`grid: ../lr_windows`); the paper scale is the same below the folder `paper`.
"""

import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError, model_validator

from circuitscope.config import read_yaml
from circuitscope.errors import UserError, unknown
from circuitscope.explain import explain
from circuitscope.section import Section
from circuitscope.sweeps.grid import FILE as GRID_FILE

FILE = "study.yaml"
Scale = Literal["laptop", "paper"]
Failure = Literal["not reproduced", "undecided"]
_GRID = re.compile(r"|\.|(\.\./)?[^/\0.][^/\0]{0,99}(/[^/\0.][^/\0]{0,99})*")


class Condition(Section):
    """What a value must be: exactly one of the three bounds, of the value itself or of its distance to a level."""

    at_least: float | None = None
    at_most: float | None = None
    within: float | None = None
    above: Literal["chance"] | None = None

    @model_validator(mode="after")
    def _one_bound(self) -> "Condition":
        if sum(bound is not None for bound in (self.at_least, self.at_most, self.within)) != 1:
            raise ValueError("expected exactly one of at_least, at_most and within")
        if self.within is not None and (self.above is None or self.within < 0):
            raise ValueError("within needs a level, above: chance, and is a distance of 0 or more")
        return self

    def holds(self, value: float) -> bool:
        """Whether a value fulfils the condition; with `above`, the value is the distance to that level."""
        if self.at_least is not None:
            return value >= self.at_least
        if self.at_most is not None:
            return value <= self.at_most
        assert self.within is not None
        return abs(value) <= self.within

    @property
    def ends(self) -> tuple[float, float]:
        """The lowest and the highest value that fulfil the condition; an open end is infinite."""
        if self.within is not None:
            return -self.within, self.within
        low = -math.inf if self.at_least is None else self.at_least
        return low, math.inf if self.at_most is None else self.at_most

    def words(self) -> str:
        """The condition as people say it: `at least 0.95`, `at most 0.02 above the chance level`."""
        if self.within is not None:
            return f"within {self.within:g} of the chance level"
        side, bound = ("at least", self.at_least) if self.at_least is not None else ("at most", self.at_most)
        assert bound is not None
        if self.above is None:
            return f"{side} {bound:g}"
        if bound < 0:
            return f"{'at most' if side == 'at least' else 'at least'} {-bound:g} below the chance level"
        return f"{side} {bound:g} above the chance level"


class Criterion(Section):
    """One condition on the tables; the first lines of this module say what the keys mean."""

    name: str
    quantity: str
    holds_if: Condition
    grid: str = ""
    where: dict[str, Any] = Field(default_factory=dict)
    rate: Literal["each", "best"] = "each"
    than: dict[str, Any] = Field(default_factory=dict)
    than_rates: list[float] = Field(default_factory=list)
    by: Literal["ratio", "difference"] = "difference"
    seeds: Literal["every"] | int = "every"
    otherwise: Failure = "not reproduced"
    premise: bool = False

    @model_validator(mode="after")
    def _a_premise_decides_nothing(self) -> "Criterion":
        if self.premise and "otherwise" in self.model_fields_set:
            raise ValueError("a premise takes no otherwise: if it fails, the study is undecided")
        return self

    @model_validator(mode="after")
    def _one_comparison(self) -> "Criterion":
        if self.than_rates and (self.than or self.rate != "best"):
            raise ValueError("than_rates needs rate: best, and no than beside it")
        if (self.than or self.than_rates) and self.holds_if.above:
            raise ValueError("above: chance is for a value, not for one that is compared by than or than_rates")
        if self.holds_if.above and (self.quantity == "window" or self.quantity.startswith("step_")):
            raise ValueError(f"above: chance is for an accuracy, not for {self.quantity}")
        if "by" in self.model_fields_set and not (self.than or self.than_rates):
            raise ValueError("by needs than or than_rates beside it")
        if any(isinstance(value, list) for value in self.than.values()):
            raise ValueError("than takes one value for each axis, not a list")
        return self

    def words(self) -> str:
        """The criterion in one line."""
        compared = ", ".join(f"{path.rpartition('.')[2]} {value}" for path, value in self.than.items())
        if self.than_rates:
            compared = f"the best of the rates {', '.join(f'{rate:g}' for rate in self.than_rates)}"
        against = f" as a {self.by} to {compared}" if compared else ""
        seeds = "every seed" if self.seeds == "every" else f"{self.seeds} seeds"
        chosen = " at the rate chosen on validation" if self.rate == "best" else ""
        return f"{self.quantity}{against} {self.holds_if.words()}{chosen}, {seeds}"


class StudyFile(Section):
    """The keys of study.yaml."""

    question: str
    source: str
    claim: str
    criteria: list[Criterion] = Field(min_length=1)
    exploratory: list[str] = Field(default_factory=list)
    budget: str = ""
    pilots: list[str] = Field(default_factory=list)
    notes: list[str] = Field(default_factory=list)

    @model_validator(mode="after")
    def _names(self) -> "StudyFile":
        names = [one.name for one in self.criteria]
        if len(set(names)) < len(names):
            raise ValueError("two criteria have the same name")
        if all(one.premise for one in self.criteria):
            raise ValueError("criteria: at least one must be no premise")
        for grid in {*(one.grid for one in self.criteria), *self.exploratory}:
            if not _GRID.fullmatch(grid):
                raise ValueError(f"grid {grid!r}: expected a folder of the study, or ../NAME of another one")
        if read := {one.grid for one in self.criteria}.intersection(self.exploratory):
            raise ValueError(f"exploratory: a criterion reads the grid {min(read)!r}")
        return self


@dataclass(frozen=True)
class Study:
    """A study: its folder, and what its file says."""

    folder: Path
    file: StudyFile

    @property
    def name(self) -> str:
        return self.folder.resolve().name

    def grid_folder(self, grid: str = "", scale: Scale = "laptop") -> Path:
        """Where a grid of the study and its tables are; the paper's scale of another study is below that study."""
        if scale == "laptop":
            return self.folder / grid
        if grid.startswith("../"):
            _, other, *below = grid.split("/")
            return self.folder.joinpath("..", other, "paper", *below)
        return self.folder / "paper" / grid

    def exploratory(self, scale: Scale) -> dict[str, Path]:
        """The grids that no criterion reads, by name, with their folders at a scale."""
        return {name: self.grid_folder(name, scale) for name in self.file.exploratory}

    def grids(self, scale: Scale) -> list[Path]:
        """The folders of the grids of a study that exist at a scale, each once: those that criteria read come first."""
        read = (self.grid_folder(one.grid, scale) for one in self.file.criteria)
        folders = dict.fromkeys((*read, *self.exploratory(scale).values()))
        return [folder for folder in folders if (folder / GRID_FILE).is_file()]


def read_study(folder: Path) -> Study:
    """Reads study.yaml; anything wrong is one line that names the file."""
    path = folder / FILE
    if not path.is_file():
        raise UserError(f"{folder} is no study: it has no {FILE}")
    data = read_yaml(path)
    if not isinstance(data, dict):
        raise UserError(f"{path}: a study is a mapping with the keys {', '.join(StudyFile.model_fields)}")
    try:
        return Study(folder, StudyFile.model_validate(data))
    except ValidationError as error:
        raise UserError(f"{path}: {explain(error, StudyFile)}") from None


def studies_in(root: Path) -> list[Study]:
    """All studies in a folder, by name."""
    if not root.is_dir():
        raise UserError(f"no studies: {root} is no folder")
    return [read_study(path.parent) for path in sorted(root.glob(f"*/{FILE}"))]


def find_study(root: Path, name: str) -> Study:
    """The study of this name, or the one in this folder."""
    for folder in (Path(name), root / name):
        if _has_file(folder):
            return read_study(folder)
    raise unknown("study", name, [study.name for study in studies_in(root)])


def _has_file(folder: Path) -> bool:
    """Whether a folder holds a study; a name that no file can have is no folder."""
    try:
        return (folder / FILE).is_file()
    except (OSError, ValueError):
        return False
