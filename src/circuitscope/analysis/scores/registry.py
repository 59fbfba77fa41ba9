"""Defines what a score is, and holds all scores by name.

A score is the weight of a mixing matrix on a set of edges, or any function of a model and held-out sequences that
gives rows. It says what it means, which sequences it is measured on, and where it is shown; tables, figures and the
report read that from here.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from circuitscope.analysis.registry import Row
from circuitscope.registry import Registry
from circuitscope.tasks import Layout

if TYPE_CHECKING:
    from circuitscope.analysis.scores.edges import Edges
    from circuitscope.analysis.scores.held_out import HeldOut
    from circuitscope.lens import HookedModel

Display = Literal["table", "timeline", "dynamics", "figure", "report"]
EVERYWHERE: tuple[Display, ...] = ("table", "timeline", "dynamics", "figure", "report")
Sequences = Literal["own", "repeats", "new period"]
Function = TypeVar("Function", bound=Callable[..., Any])


@dataclass(frozen=True)
class Score:
    """A score; either `edges` or `rows` is given.

    Args:
        means: what each name in the column `score` of the table means, in a few words.
        edges: gives the edges whose weight is the score, from a layout.
        rows: gives rows of the table from a model and held-out sequences.
        on: the sequences it is measured on: the task's "own"; "repeats" of random blocks, which are outside the
            distribution of most tasks; or, of a task whose own sequences repeat blocks, blocks of a "new period",
            which training never had.
        needs: what a layout must have for it: "pairs" of keys and values, "answers" (values that are asked for), or
            nothing in particular.
        shown: the displays it is part of.
    """

    name: str
    means: dict[str, str]
    edges: "Callable[[Layout], Edges] | None" = None
    rows: "Callable[[HookedModel, HeldOut], Iterable[Row]] | None" = None
    on: Sequences = "own"
    needs: Literal["", "answers", "pairs"] = ""
    shown: frozenset[str] = field(default_factory=frozenset)

    @property
    def meaning(self) -> str:
        """What its first row means."""
        return next(iter(self.means.values()))

    def possible_on(self, layout: Layout) -> bool:
        """Whether sequences with this layout can have this score."""
        if (self.needs and layout.value_pos is None) or (self.needs == "pairs" and layout.key_pos is None):
            return False
        return self.on == "own" or layout.period is not None


_HERE = "circuitscope.analysis.scores"
SCORES: Registry[Score] = Registry("score", "scores", own=(f"{_HERE}.edges", f"{_HERE}.rows"))


def edge_score(
    name: str,
    means: str,
    *,
    on: Sequences = "own",
    needs: Literal["", "answers", "pairs"] = "",
    shown: Iterable[Display] = ("table", "figure"),
) -> Callable[[Function], Function]:
    """Registers a function layout → Edges as a score: the weight that a mixing matrix puts on these edges."""

    def register(edges: Function) -> Function:
        score = Score(name, {name: means}, edges=edges, on=on, needs=needs, shown=frozenset(shown))
        SCORES.add(name, score, edges.__module__)
        return edges

    return register


def row_score(name: str, means: dict[str, str], *, shown: Iterable[Display] = ()) -> Callable[[Function], Function]:
    """Registers a function (model, held-out sequences) → rows as a score."""

    def register(rows: Function) -> Function:
        SCORES.add(name, Score(name, means, rows=rows, shown=frozenset(shown)), rows.__module__)
        return rows

    return register


def shown_in(display: Display) -> list[Score]:
    """The scores that a display shows, in the order in which they were registered."""
    return [score for score in SCORES.values() if display in score.shown]
