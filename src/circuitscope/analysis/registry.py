"""Defines what an analysis is, and holds all analyses by name.

An analysis gives the rows of one table: from the model and held-out sequences of each checkpoint, or from a run as a
whole and tables of other analyses. It says what it is, what its columns mean, which checkpoints it is meant for and
which runs cannot have it. `analyze`, its help, the tables' cache, figures and the report go through this registry; viz
registers words and a figure under the analysis's name.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from circuitscope.errors import UserError
from circuitscope.registry import Registry

if TYPE_CHECKING:
    from circuitscope.analysis.checkpoints.results import Results
    from circuitscope.analysis.scores.held_out import HeldOut
    from circuitscope.lens import HookedModel
    from circuitscope.runs.run import Run

Row = dict[str, Any]
Function = TypeVar("Function", bound=Callable[..., Any])


@dataclass(frozen=True)
class Analysis:
    """One analysis; either `rows` or `run_rows` is given.

    Args:
        name: also the name of its table, RUN/analysis/NAME.parquet.
        about: one sentence for help and lists.
        columns: the table's columns with their pandas types, in order, without `run` and `step`, which every table of
            checkpoints starts with.
        rows: gives the rows of one checkpoint, without run and step, from a model and held-out sequences.
        run_rows: gives the rows of a whole run, without its name, from the results of the analyses in `needs`.
        needs: names of analyses whose tables `run_rows` reads.
        means: what columns mean, where their names do not say it.
        steps: the checkpoints that it reads by default.
        refuses: gives the reason why a run cannot have this analysis, or "".
        leaves_out: says in sentences which parts of it a run cannot have, and why.
        depends_on: what the rows depend on besides the checkpoint and the sequences, such as the list of scores, in a
            form that JSON can hold. Rows that were made with another value are computed again.
        at_once: how many checkpoints of a run are best read at the same time on so many sequences; `rows` then runs on
            several threads.
        at_most: how many sequences it takes of a run if nobody asks for a number; None means as many as the others.
    """

    name: str
    about: str
    columns: Mapping[str, str]
    rows: "Callable[[HookedModel, HeldOut], Iterable[Row]] | None" = None
    run_rows: "Callable[[Results], Iterable[Row]] | None" = None
    needs: tuple[str, ...] = ()
    means: Mapping[str, str] = field(default_factory=dict)
    steps: Literal["all", "last"] = "all"
    refuses: "Callable[[Run], str]" = lambda run: ""
    leaves_out: "Callable[[Run], Iterable[str]]" = lambda run: ()
    depends_on: "Callable[[Run], Any]" = lambda run: None
    at_once: "Callable[[Run, int], int]" = lambda run, sequences: 1
    at_most: "Callable[[Run], int | None]" = lambda run: None

    @property
    def table_columns(self) -> dict[str, str]:
        """All columns of the table."""
        step = {} if self.rows is None else {"step": "int64"}
        return {"run": "string", **step, **self.columns}


_HERE = "circuitscope.analysis"
ANALYSES: Registry[Analysis] = Registry(
    "analysis",
    "analyses",
    own=(
        f"{_HERE}.scores.rows",
        f"{_HERE}.phases.timeline",
        f"{_HERE}.causal.circuit",
        f"{_HERE}.causal.battery",
        f"{_HERE}.decay.rows",
    ),
)


def with_needs(names: Iterable[str]) -> list[Analysis]:
    """The analyses of these names, each after all that it needs."""
    found: dict[str, Analysis] = {}

    def add(name: str, needed_by: tuple[str, ...] = ()) -> None:
        if name in needed_by:
            raise UserError(f"the analysis '{name}' needs itself: {' needs '.join([*needed_by, name])}")
        for needed in ANALYSES[name].needs:
            add(needed, (*needed_by, name))
        found[name] = ANALYSES[name]

    for name in names:
        add(name)
    return list(found.values())


def refusal(name: str, run: "Run") -> str:
    """Why a run cannot have an analysis or one that it needs, or ""."""
    return next((why for one in with_needs([name]) if (why := one.refuses(run))), "")


def analysis(name: str, about: str, columns: Mapping[str, str], **options: Any) -> Callable[[Function], Function]:
    """Registers a function (model, held-out sequences) → rows as an analysis; options are fields of `Analysis`."""

    def register(rows: Function) -> Function:
        ANALYSES.add(name, Analysis(name, about, columns, rows=rows, **options), rows.__module__)
        return rows

    return register


def run_analysis(name: str, about: str, columns: Mapping[str, str], **options: Any) -> Callable[[Function], Function]:
    """Registers a function (results of a run) → rows as an analysis of a whole run."""

    def register(rows: Function) -> Function:
        ANALYSES.add(name, Analysis(name, about, columns, run_rows=rows, **options), rows.__module__)
        return rows

    return register
