"""Registers what people see of an analysis, under its name: words for the terminal and, if there are any, a figure and
small charts for the interactive report.

An analysis without words gets a plain table of its last checkpoint and what its columns mean.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from circuitscope.registry import Registry

if TYPE_CHECKING:
    from circuitscope.analysis.checkpoints.results import Results
    from circuitscope.runs.run import Run
    from circuitscope.viz.charts.kinds import Chart
    from circuitscope.viz.style import Sheet

Function = TypeVar("Function", bound=Callable[..., Any])
Thing = TypeVar("Thing")
_MOST = 24  # rows of a plain table


class TextTable(NamedTuple):
    """A small table for the terminal: names of columns, and rows of text."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]


Said = str | TextTable


@dataclass(frozen=True)
class Words:
    """How the results of an analysis are put into words.

    Args:
        say: gives lines and small tables from the results of one run or, where `side_by_side`, of several at once.
        in_brief: gives only sentences; used where the analysis was run only to support another.
        side_by_side: whether several runs are shown together, after everything else.
    """

    say: "Callable[..., Iterable[Said]]"
    in_brief: "Callable[[Results], Iterable[str]] | None" = None
    side_by_side: bool = False


_OWN = ("scores", "phases", "circuit", "causal", "decay")
WORDS: Registry[Words] = Registry("words of the analysis", "words", own=[f"circuitscope.viz.words.{n}" for n in _OWN])
FIGURES: "Registry[Callable[..., Sheet]]" = Registry(
    "figure of the analysis", "figures", own=("circuitscope.viz.scores", "circuitscope.viz.decay")
)
CHARTS: "Registry[Callable[[Results], Iterable[Chart]]]" = Registry(
    "charts of the analysis", "charts", own=("circuitscope.viz.charts.decay", "circuitscope.viz.charts.causal")
)


def words(
    name: str, *, in_brief: "Callable[[Results], Iterable[str]] | None" = None, side_by_side: bool = False
) -> Callable[[Function], Function]:
    """Registers a function results → lines and small tables as the words of an analysis."""

    def register(say: Function) -> Function:
        WORDS.add(name, Words(say, in_brief, side_by_side), say.__module__)
        return say

    return register


def figure(name: str) -> Callable[[Function], Function]:
    """Registers a function (tables by the name of the run) → Sheet as the figure of an analysis."""
    return FIGURES.register(name)


def charts(name: str) -> Callable[[Function], Function]:
    """Registers a function results → charts as what the interactive report draws of an analysis."""
    return CHARTS.register(name)


def words_of(name: str) -> Words:
    """The words of an analysis; a plain table where none are registered."""
    return WORDS[name] if name in WORDS else Words(lambda found: _plain(name, found))


def by_label(runs: "Sequence[Run]", things: Sequence[Thing]) -> dict[str, Thing]:
    """Tables, or whatever there is one of for each run, by the name of the run; by its path if two have that name."""
    names = [run.name for run in runs]
    labels = [str(run.path) if names.count(run.name) > 1 else run.name for run in runs]
    return dict(zip(labels, things, strict=True))


def _plain(name: str, found: "Results") -> Iterator[Said]:
    from circuitscope.analysis.checkpoints.runner import table_path
    from circuitscope.analysis.registry import ANALYSES

    wanted, frame = ANALYSES[name], found[name]
    at = ""
    if "step" in frame:
        frame, at = frame[frame.step == found.steps[-1]], f" at step {found.steps[-1]}"
    yield f"{name}{at}: {wanted.about}{'' if len(frame) else ' It gives no rows here.'}"
    if not len(frame):
        return
    rows = [[_cell(row[column]) for column in wanted.columns] for row in frame.head(_MOST).to_dict("records")]
    yield TextTable(list(wanted.columns), rows)
    if len(frame) > _MOST:
        yield f"and {len(frame) - _MOST} more rows in {table_path(found.run, name, found.sequences).name}"
    for column, meaning in wanted.means.items():
        yield f"  {column}: {meaning}"


def _cell(value: Any) -> str:
    import pandas as pd

    if pd.isna(value):
        return ""
    return f"{value:.4g}" if isinstance(value, float) else str(value)
