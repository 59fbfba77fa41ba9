"""When things happen in a run: transitions of loss, accuracy and scores, their order and lags."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from circuitscope.analysis.phases.detection import Order, Transitions, Verdict, order, transitions, verdict
from circuitscope.analysis.registry import Row, run_analysis
from circuitscope.analysis.scores.registry import shown_in
from circuitscope.errors import UserError
from circuitscope.mixers.matched_token import MATCHED
from circuitscope.runs.run import Run

if TYPE_CHECKING:
    from circuitscope.analysis.checkpoints.results import Results

F64 = np.ndarray[Any, np.dtype[np.float64]]
COLUMNS = {
    "curve": "string",
    "onset": "float64",
    "midpoint": "float64",
    "end": "float64",
    "size": "float64",
    "low": "float64",
    "high": "float64",
    "evidence": "float64",
    "sigma": "float64",
}


@dataclass(frozen=True)
class Curve:
    """Values over steps; where each value is a mean over batches, `repeats` [step, batch] holds the single values."""

    steps: F64
    values: F64
    repeats: F64 | None = None


@dataclass(frozen=True)
class Timeline:
    """The transitions of every curve of a run, what they amount to, and the order they come in."""

    run: str
    found: dict[str, Transitions]
    verdict: Verdict
    order: Order

    def rows(self) -> Iterator[Row]:
        """One row per transition."""
        for name, several in self.found.items():
            for one in several:
                yield {"curve": name, **{column: getattr(one, column) for column in list(COLUMNS)[1:]}}


def _no_phases(run: Run) -> str:
    rows = run.metrics
    enough = len(rows) and (rows.split == "validation").sum() >= 2
    return "" if enough else "it was evaluated fewer than two times, so there are no curves to look for transitions in"


@run_analysis(
    "phases",
    "Transitions in loss, accuracy and scores, their order and lags.",
    COLUMNS,
    needs=("scores",),
    means={
        "curve": "loss, accuracy, train loss, or a score with the place where it ends highest",
        "onset": "step at which a tenth of the transition is done",
        "midpoint": "step at which half of it is done",
        "end": "step at which nine tenths of it are done",
        "size": "value of the curve after the transition minus before it",
        "low": "lower end of the 95% interval of the midpoint",
        "high": "upper end of the 95% interval of the midpoint",
        "evidence": "log of the Bayes factor for a transition",
        "sigma": "standard deviation of the noise around the fit",
    },
    refuses=_no_phases,
)
def phase_rows(found: "Results") -> Iterator[Row]:
    """The transitions of every curve of a run."""
    return found.timeline.rows()


def curves_of(run: Run, scores: pd.DataFrame | None = None) -> dict[str, Curve]:
    """Validation loss and the task's metric, train loss, and for each score the head (or layer) that ends highest.

    A score's curve is named by its score and place: "recall L1H0".
    """
    rows = run.metrics
    held = rows[rows.split == "validation"] if len(rows) else rows
    if why := _no_phases(run):
        raise UserError(f"{run.path}: {why}")
    train = rows[rows.split == "train"]
    steps = held.step.to_numpy(float)
    out = {
        name: Curve(steps, held[name].to_numpy(float), np.array(held[f"{name}_per_batch"].tolist(), dtype=float))
        for name in ("loss", run.config.task.metric)
    }
    out |= {
        "train loss": Curve(train.step.to_numpy(float), train.loss.to_numpy(float)),
    }
    names = [name for score in shown_in("timeline") for name in score.means] if scores is not None else []
    for name in names:
        assert scores is not None
        if (place := strongest(scores, name)) is not None:
            curve = curve_at(scores, place)
            out[f"{name} {place_name(place)}"] = Curve(curve.step.to_numpy(float), curve.value.to_numpy(float))
    return out


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


def timeline(run: Run, scores: pd.DataFrame | None = None) -> Timeline:
    """Transitions of every curve of a run, the verdict on its loss bump, the order of events and their lags."""
    curves = curves_of(run, scores)
    found = {name: transitions(c.steps, c.values, repeats=c.repeats) for name, c in curves.items()}
    loss, metric = curves["loss"], curves[run.config.task.metric]
    judged = verdict(loss.steps, loss.values, metric.values, run.config.task.chance or 0.0, found=found["loss"])
    held_out = {name: several for name, several in found.items() if name != "train loss"}
    return Timeline(run.name, found, judged, order(held_out, at="midpoint"))
