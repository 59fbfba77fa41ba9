"""What an analysis is, and the analyses by name.

An analysis computes rows of one table from a checkpoint's model and held-out sequences. It says what it is, what its
columns mean, which checkpoints it is meant for and which runs cannot have it. `analyze`, the tables' cache and the
report go through the registry; viz registers words and a figure under the analysis's name.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from circuitscope.registry import Registry

if TYPE_CHECKING:
    from circuitscope.analysis.scores.held_out import HeldOut
    from circuitscope.lens import HookedRootModule
    from circuitscope.runs.run import Run

Row = dict[str, Any]
Function = TypeVar("Function", bound=Callable[..., Any])


@dataclass(frozen=True)
class Analysis:
    """One analysis.

    Args:
        name: also of its table, RUN/analysis/NAME.parquet.
        about: one sentence for help and lists.
        rows: rows of the table, without run and step, from a model and held-out sequences.
        columns: the table's columns after `run` and `step`, with their pandas types, in order.
        means: what columns mean, in words, where the name does not say it.
        steps: the checkpoints it is meant for by default.
        refuses: why a run cannot have it, or "".
        depends_on: what else the rows depend on, such as the list of scores; a table made with other is made again.
        at_once: how many checkpoints of a run are best read at the same time; `rows` then runs on several threads.
    """

    name: str
    about: str
    rows: "Callable[[HookedRootModule, HeldOut], Iterable[Row]]"
    columns: Mapping[str, str]
    means: Mapping[str, str] = field(default_factory=dict)
    steps: Literal["all", "last"] = "all"
    refuses: "Callable[[Run], str]" = lambda run: ""
    depends_on: "Callable[[Run], Any]" = lambda run: None
    at_once: "Callable[[Run], int]" = lambda run: 1

    @property
    def table_columns(self) -> dict[str, str]:
        """All columns of the table."""
        return {"run": "string", "step": "int64", **self.columns}


ANALYSES: Registry[Analysis] = Registry("analysis", "analyses")


def analysis(name: str, about: str, columns: Mapping[str, str], **options: Any) -> Callable[[Function], Function]:
    """Registers a function (model, held-out sequences) → rows as an analysis; the options are `Analysis`'s."""

    def register(rows: Function) -> Function:
        ANALYSES.add(name, Analysis(name, about, rows, columns, **options), rows.__module__)
        return rows

    return register
