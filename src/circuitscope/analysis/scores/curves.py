"""Curves of scores over training: on which edges and at which place each score is followed.

A circuit may do binding and recall in another matrix than where the score ends highest, and some positions after the
value. Where the circuit of a run is known, its parts say which curve of their score is the one to look at; where it is
not, a score is followed on its own edges, at the place where it ends highest. Timeline, figures and report ask
`followed`.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pandas as pd

from circuitscope.mixers.matched_token import MATCHED

if TYPE_CHECKING:
    from circuitscope.analysis.causal.parts import Circuit, Part


@dataclass(frozen=True)
class Followed:
    """The curve by which a score is followed.

    Args:
        score: the name of the score, such as "recall".
        edges: the edges it is measured on, such as "recall+1", one position after the value.
        where: the place in words, such as "L0 ssm".
        rows: its rows in the table of scores, in order of step.
        by_circuit: whether the circuit names edges and place; else it is the place where the score ends highest.
    """

    score: str
    edges: str
    where: str
    rows: pd.DataFrame
    by_circuit: bool

    @property
    def name(self) -> str:
        """Edges and place: "recall+1 L0 ssm"."""
        return f"{self.edges} {self.where}"

    @property
    def chosen(self) -> str:
        """Who chose it, for labels."""
        return "circuit" if self.by_circuit else "highest"


def followed(scores: pd.DataFrame, score: str, circuit: "Circuit | None" = None) -> Followed | None:
    """The curve of a score that the circuit names or, if it names none, the one that ends highest; None without any."""
    for part in () if circuit is None else circuit.parts:
        if part.edges.partition("+")[0] == score and len(rows := _of_part(scores, part)):
            return Followed(score, part.edges, part.place, rows, True)
    place = strongest(scores, score)
    return None if place is None else Followed(score, score, place_name(place), curve_at(scores, place), False)


def curve_of_part(part: "Part") -> str:
    """The name of the curve by which a part of the circuit is followed."""
    return f"{part.edges} {part.place}"


def _of_part(scores: pd.DataFrame, part: "Part") -> pd.DataFrame:
    rows = scores[(scores.score == part.edges) & (scores.layer == part.layer) & (scores.factor == part.factor)]
    rows = rows[rows.weighting != "signed"]
    whole = rows[rows["head"].isna()]
    if part.head is None and len(whole):
        return whole.sort_values("step")
    return rows[rows["head"] == (part.head or 0)].sort_values("step")  # a layer of one head has no row for the layer


def at_places(scores: pd.DataFrame, score: str) -> pd.DataFrame:
    """The rows of a score for each place: a head, or a whole layer where the units are channels, which are too many."""
    rows = scores[(scores.score == score) & (scores.weighting != "signed")]
    whole_layer = rows["head"].isna()
    return rows[~((rows.unit == "head") & whole_layer | (rows.unit == "channel") & ~whole_layer).fillna(False)]


def strongest(scores: pd.DataFrame, score: str, factor: str | None = None) -> "pd.Series[Any] | None":
    """The row of the place where a score ends highest."""
    rows = at_places(scores, score)
    if factor is not None:
        rows = rows[rows.factor == factor]
    rows = rows[(rows.step == rows.step.max()) & rows.value.notna()]
    return rows.loc[rows.value.idxmax()] if len(rows) else None


def curve_at(scores: pd.DataFrame, place: "pd.Series[Any]") -> pd.DataFrame:
    """A score at one place over all steps."""
    same = (scores.score == place.score) & (scores.factor == place.factor) & (scores.weighting == place.weighting)
    for column in ("layer", "head"):
        same &= scores[column].isna() if pd.isna(place[column]) else (scores[column] == place[column]).fillna(False)
    rows: pd.DataFrame = scores[same]
    return rows.sort_values("step")


def place_name(row: "pd.Series[Any]") -> str:
    """L1H0 for a head, L0 composed for a whole layer, only the factor where the row is about the whole model.

    A head whose matrix is not its Φ but a reading of it is called so: L0H0 matched.
    """
    if pd.isna(row.layer):
        return str(row.factor)
    if pd.isna(row["head"]):
        return f"L{row.layer} {row.factor}"
    return f"L{row.layer}H{row['head']}{f' {MATCHED}' if row.factor == MATCHED else ''}"
