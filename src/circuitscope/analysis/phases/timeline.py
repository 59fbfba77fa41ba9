"""When things happen in a run: transitions of loss, accuracy and scores, their order and lags."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from circuitscope.analysis.phases.detection import Order, Transitions, Verdict, order, transitions, verdict
from circuitscope.errors import UserError
from circuitscope.runs.run import Run
from circuitscope.runs.store import write_whole

F64 = np.ndarray[Any, np.dtype[np.float64]]
COLUMNS = {
    "run": "string",
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
    """Values over steps; `repeats` [step, batch] where one value is the mean of several."""

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

    def frame(self) -> pd.DataFrame:
        """One row a transition."""
        rows = [
            {"run": self.run, "curve": name, **{c: getattr(t, c) for c in list(COLUMNS)[2:]}}
            for name, several in self.found.items()
            for t in several
        ]
        return pd.DataFrame(rows, columns=list(COLUMNS)).astype(COLUMNS)

    def save(self, run: Run) -> Path:
        """Writes the transitions to RUN/analysis/phases.parquet; they follow from tables that are kept."""
        path = run.path / "analysis" / "phases.parquet"
        data = self.frame().to_parquet(index=False)
        try:
            path.parent.mkdir(exist_ok=True)
            write_whole(path, lambda file: file.write(data))
        except OSError as error:
            raise UserError(f"cannot write {path}: {error.strerror}") from None
        return path


def curves_of(run: Run, scores: pd.DataFrame | None = None) -> dict[str, Curve]:
    """Validation loss and accuracy, train loss, and for each score the head (or layer) that ends highest.

    A score's curve is named by its score and place: "recall L1H0".
    """
    rows = run.metrics
    held = rows[rows.split == "validation"] if len(rows) else rows
    if len(held) < 2:
        raise UserError(f"{run.path} has fewer than two evaluations; nothing can be said about phases")
    train = rows[rows.split == "train"]
    steps = held.step.to_numpy(float)
    out = {
        "loss": Curve(steps, held.loss.to_numpy(float), np.array(held.loss_per_batch.tolist(), dtype=float)),
        "accuracy": Curve(
            steps, held.accuracy.to_numpy(float), np.array(held.accuracy_per_batch.tolist(), dtype=float)
        ),
        "train loss": Curve(train.step.to_numpy(float), train.loss.to_numpy(float)),
    }
    for score in ("binding", "recall", "value", "previous_token", "induction") if scores is not None else ():
        assert scores is not None
        if (place := strongest(scores, score)) is not None:
            curve = curve_at(scores, place)
            out[f"{score} {place_name(place)}"] = Curve(curve.step.to_numpy(float), curve.value.to_numpy(float))
    return out


def strongest(scores: pd.DataFrame, score: str, factor: str | None = None) -> "pd.Series[Any] | None":
    """The row of the place where a score ends highest: a head, or a whole layer where the units are channels."""
    rows = scores[(scores.score == score) & (scores.weighting != "signed")]
    rows = rows[(rows.unit == "head") == rows["head"].notna()]
    if factor is not None:
        rows = rows[rows.factor == factor]
    rows = rows[rows.step == rows.step.max()]
    return rows.loc[rows.value.idxmax()] if len(rows) else None


def curve_at(scores: pd.DataFrame, place: "pd.Series[Any]") -> pd.DataFrame:
    """A score at one place over all steps."""
    same = (scores.score == place.score) & (scores.factor == place.factor) & (scores.weighting == place.weighting)
    same &= scores.layer == place.layer
    same &= scores["head"].isna() if pd.isna(place["head"]) else scores["head"] == place["head"]
    rows: pd.DataFrame = scores[same]
    return rows.sort_values("step")


def place_name(row: "pd.Series[Any]") -> str:
    """L1H0; L0 composed for a whole layer."""
    return f"L{row.layer} {row.factor}" if pd.isna(row["head"]) else f"L{row.layer}H{row['head']}"


def timeline(run: Run, scores: pd.DataFrame | None = None) -> Timeline:
    """Transitions of every curve of a run, the verdict on its loss bump, the order of events and their lags."""
    curves = curves_of(run, scores)
    found = {name: transitions(c.steps, c.values, repeats=c.repeats) for name, c in curves.items()}
    loss, accuracy = curves["loss"], curves["accuracy"]
    judged = verdict(loss.steps, loss.values, accuracy.values, run.config.task.chance or 0.0, found=found["loss"])
    held_out = {name: several for name, several in found.items() if name != "train loss"}
    return Timeline(run.name, found, judged, order(held_out, at="midpoint"))
