"""The verdict of each study, from result tables alone, and the page that lists them: studies/CLAIMS.md.

A verdict is one of
- reproduced: every criterion holds at the paper's scale;
- reproduced as a laptop analogue: every criterion holds at the laptop scale;
- not reproduced: a criterion fails that says so, and every premise holds;
- undecided: a criterion fails where more steps could help, a premise does not hold, or trials are missing;
- not run: there is no trial yet.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from circuitscope.errors import UserError, escaped
from circuitscope.studies.criteria import Cell, Judged, judge
from circuitscope.studies.study import FILE, Scale, Study
from circuitscope.sweeps.grid import read_grid
from circuitscope.sweeps.results import ResultsTable

if TYPE_CHECKING:
    import pandas as pd

_SHOWN = 4  # cells that are listed one by one
_HEADING = """# What the studies found

Made by `circuitscope study verdict` from the criteria in each study.yaml and the result tables beside them. Criteria
are committed before the first run; a study.yaml says where one was changed later. Values are means over seeds with 95%
intervals where there is more than one seed.
"""


@dataclass(frozen=True)
class Verdict:
    """What one scale of a study says of its claim, and how many of its trials are done."""

    study: Study
    scale: Scale
    judged: list[Judged]
    done: int
    trials: int

    @property
    def words(self) -> str:
        """The verdict."""
        failed = [one.criterion for one in self.judged if one.outcome == "fails"]
        refuted = any(one.otherwise == "not reproduced" and not one.premise for one in failed)
        outcomes = {one.outcome for one in self.judged}
        if refuted and all(one.outcome == "holds" for one in self.judged if one.criterion.premise):
            return "not reproduced"
        if outcomes == {"holds"}:
            return "reproduced" if self.scale == "paper" else "reproduced as a laptop analogue"
        return "not run" if outcomes <= {"not run"} else "undecided"


def verdict(study: Study, scale: Scale = "laptop") -> Verdict | None:
    """Judges all criteria of a study at a scale; None if it has no grid at that scale, or at the paper's lacks one."""
    folders = {one.grid: study.grid_folder(one.grid, scale) for one in study.file.criteria}
    there = study.grids(scale)
    if not there or (scale == "paper" and not set(folders.values()) <= set(there)):
        return None
    also = study.exploratory(scale)
    folders |= {name: folder for name, folder in also.items() if scale == "laptop" or folder in there}
    tables = {name: (read_grid(folder), ResultsTable(folder)) for name, folder in folders.items()}
    judged = []
    for one in study.file.criteria:
        try:
            judged.append(judge(one, *tables[one.grid]))
        except UserError as error:
            raise UserError(f"{study.folder / FILE}: {error}") from None
    done = [table.done(trial.digest, grid.measure) for grid, table in tables.values() for trial in grid.trials]
    return Verdict(study, scale, judged, sum(done), len(done))


def claims(verdicts: Iterable[Verdict]) -> str:
    """The page of all claims as Markdown."""
    verdicts = list(verdicts)
    lines = [_HEADING, "| study | claim | scale | verdict |", "|---|---|---|---|"]
    for one in verdicts:
        link = f"[{one.study.name}]({one.study.folder.name})"
        lines.append(f"| {link} | {_in_a_cell(one.study.file.claim)} | {one.scale} | {one.words} |")
    for one in verdicts:
        lines += ["", f"## {one.study.name}, {one.scale} scale: {one.words}", ""]
        lines += [f"{_in_a_line(one.study.file.claim)} ({_in_a_line(one.study.file.source)})", ""]
        lines += ["| criterion | measured | |", "|---|---|---|"]
        for judged in one.judged:
            named = _in_a_cell(f"{judged.criterion.name}: {judged.criterion.words()}")
            lines.append(f"| {named} | {_in_a_cell(measured(judged))} | {outcome_words(judged)} |")
        if one.study.file.budget and (one.scale == "laptop" or not one.study.grids("laptop")):
            lines += ["", f"Budget: {_in_a_line(one.study.file.budget)}."]
    return "\n".join(lines) + "\n"


def _in_a_line(text: str) -> str:
    return escaped(" ".join(text.split()))


def _in_a_cell(text: str) -> str:
    return _in_a_line(text).replace("|", r"\|")


def evidence(one: Verdict) -> "pd.DataFrame":
    """What a verdict rests on: criterion, words, cell, seed, value, outcome, and the ends of what passes.

    `of` says what the value is, where that is not the quantity itself.
    """
    import pandas as pd

    rows = []
    for judged in one.judged:
        criterion = judged.criterion
        low, high = criterion.holds_if.ends
        for cell, label in zip(judged.cells, judged.short_labels(), strict=True):
            rows += [
                {
                    "criterion": criterion.name,
                    "words": f"{criterion.name}: {criterion.words()}",
                    "cell": label,
                    "seed": " ".join(map(str, seed)),
                    "value": value,
                    "outcome": cell.outcome,
                    "of": "distance to the chance level" if criterion.holds_if.above else "",
                    "low": low,
                    "high": high,
                }
                for seed, value in cell.values.items()
            ]
    return pd.DataFrame(rows)


def outcome_words(judged: Judged) -> str:
    """How a criterion came out, with what is missing: `holds`, `fails in 2 of 9 cells`, `open: 3 of 9 cells …`."""
    every = len(judged.cells)
    if judged.outcome in ("holds", "not run"):
        return judged.outcome
    if judged.outcome == "fails":
        weak = ", which decides nothing" if judged.criterion.otherwise == "undecided" else ""
        weak = ", and without it nothing is decided" if judged.criterion.premise else weak
        return f"fails in {sum(cell.outcome == 'fails' for cell in judged.cells)} of {every} cells{weak}"
    unsettled = [_why_open(cell) for cell in judged.cells if cell.outcome != "holds"]
    parts = [(unsettled.count(why), why) for why in dict.fromkeys(sorted(unsettled, reverse=True))]
    return "open: " + ", ".join(f"{count} of {every} cells {words}" for count, words in parts if count)


def _why_open(cell: Cell) -> str:
    """What is missing in a cell that is open."""
    if not cell.complete:
        return "lack trials"
    return "depend on windows that reach an end of the grid" if cell.cut_off else "have all trials and no answer"


def measured(judged: Judged) -> str:
    """The values of the cells: one by one if they are few, else the lowest and the highest.

    With `above: chance` they are distances to that level, with a sign.
    """
    form = "+.3f" if judged.criterion.holds_if.above else ".3f"
    known = [cell for cell in judged.cells if cell.mean.seeds]
    if not known:
        return "nothing"
    if len(known) > _SHOWN:
        ordered = sorted(known, key=lambda cell: cell.mean.value)
        low, high = (_value(cell, judged.label(cell), form) for cell in (ordered[0], ordered[-1]))
        return f"from {low} to {high} in {len(known)} cells"
    return "; ".join(_value(cell, judged.label(cell), form) for cell in known)


def _value(cell: Cell, label: str, form: str) -> str:
    mean = cell.mean
    ends = f" ({mean.low:{form}} to {mean.high:{form}})" if mean.low == mean.low and not cell.cut_off else ""
    bound = ", from windows that reach an end of the grid" if cell.cut_off else ""
    seeds = f"{mean.seeds} of {len(cell.values)} seeds" if mean.seeds < len(cell.values) else ""
    about = ", ".join(filter(None, (label, seeds)))
    return f"{mean.value:{form}}{ends}{bound} [{about}]" if about else f"{mean.value:{form}}{ends}{bound}"
