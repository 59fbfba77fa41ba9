"""When things happen in a run: transitions of loss, accuracy and scores, their order and lags."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from circuitscope.analysis.causal.parts import Circuit
from circuitscope.analysis.phases.detection import Level, Transition, Transitions, transitions
from circuitscope.analysis.phases.order import Order, order
from circuitscope.analysis.phases.verdict import Verdict, accuracy_level, loss_level, steepest_fall, verdict
from circuitscope.analysis.registry import Row, run_analysis
from circuitscope.analysis.scores.curves import curve_at, curve_of_part, followed, strongest
from circuitscope.analysis.scores.registry import shown_in
from circuitscope.config import RunConfig
from circuitscope.config.rate import learning_time
from circuitscope.errors import UserError
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
    "statistic": "float64",
    "sigma": "float64",
    "epoch": "float64",
    "ends_at": "string",
}


@dataclass(frozen=True)
class Curve:
    """Values over steps; where each value is a mean over batches, `repeats` [step, batch] holds the single values."""

    steps: F64
    values: F64
    clock: F64  # the sum of the learning rates up to each step
    repeats: F64 | None = None
    level: Level | None = None  # what the curve reaches without a circuit

    def transitions(self) -> Transitions:
        return transitions(self.steps, self.values, clock=self.clock, repeats=self.repeats, level=self.level)


@dataclass(frozen=True)
class Timeline:
    """The transitions of every curve of a run, what they amount to, and where its data begins to repeat."""

    run: str
    found: dict[str, Transitions]
    verdict: Verdict
    metric: str
    epochs: tuple[float, ...] = ()  # the steps at which an epoch after the first one begins

    def rows(self) -> Iterator[Row]:
        """One row per transition."""
        for name, several in self.found.items():
            for one in several:
                own = {column: getattr(one, column) for column in list(COLUMNS)[1:-2]}
                epoch = self.epoch_in(one)
                yield {
                    "curve": name,
                    **own,
                    "epoch": np.nan if epoch is None else epoch,
                    "ends_at": one.ends_at or None,
                }

    def epoch_in(self, one: Transition) -> float | None:
        """The step within a transition at which the data begins to repeat: it may be what the transition shows.

        Between two values of the curve nothing is known, so the transition counts with the intervals of its ends.
        """
        return next((step for step in self.epochs if one.onset_low <= step <= one.end_high), None)

    def order(self, circuit: Circuit | None = None) -> Order:
        """The order of loss, metric, and the scores of those parts of the circuit that a knockout backs.

        Transitions that go no further than the level of their curve are left out.
        """
        parts = () if circuit is None else circuit.parts
        named = {"loss", self.metric, *(curve_of_part(part) for part in parts)}
        return order({name: several for name, several in self.found.items() if name in named}, at="midpoint")


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
        "curve": "loss, accuracy, train loss, or a score with its place: that of the circuit, or where it ends highest",
        "onset": "step at which a tenth of the transition is done",
        "midpoint": "step at which half of it is done",
        "end": "step at which nine tenths of it are done",
        "size": "value of the curve after the transition minus before it",
        "low": "lower end of the 95% interval of the midpoint",
        "high": "upper end of the 95% interval of the midpoint",
        "statistic": "−2 log likelihood ratio of the smooth baseline without and with the transition",
        "sigma": "standard deviation of the noise around the fit",
        "epoch": "step within the transition at which the training data begins to repeat, if there is one",
        "ends_at": "the level that the transition does not go beyond, which needs no circuit: context-free (a loss that"
        " an answer has which ignores the sequence) or any value (the accuracy of any value of the context), if there"
        " is one",
    },
    refuses=_no_phases,
)
def phase_rows(found: "Results") -> Iterator[Row]:
    """The transitions of every curve of a run."""
    return found.timeline.rows()


def curves_of(run: Run, scores: pd.DataFrame | None = None, circuit: Circuit | None = None) -> dict[str, Curve]:
    """Validation loss and the task's metric, train loss, and each score where the circuit has it or it ends highest.

    A score's curve is named by its edges and place: "recall L1H0", "recall+1 L0 ssm". Loss and metric are also scored
    at every checkpoint; where there are more checkpoints than evaluations, as after a zoom, their curves are those.
    """
    rows = run.metrics
    held = rows[rows.split == "validation"] if len(rows) else rows
    if why := _no_phases(run):
        raise UserError(f"{run.path}: {why}")
    train = rows[rows.split == "train"]
    config, task = run.config, run.config.task
    levels = {"loss": loss_level(task.context_free), "accuracy": accuracy_level(task.chance)}
    steps = held.step.to_numpy(float)
    both = ("loss", task.metric)
    places = {} if scores is None else {name: strongest(scores, name) for name in both}
    dense = {
        name: curve_at(scores, place) for name, place in places.items() if scores is not None and place is not None
    }
    out = {}
    for name in both:
        if len(dense) == len(both) and min(map(len, dense.values())) > len(steps):
            rows = dense[name]
            out[name] = _curve(config, rows.step.to_numpy(float), rows.value.to_numpy(float), levels.get(name))
        else:
            repeats = np.array(held[f"{name}_per_batch"].tolist(), dtype=float)
            out[name] = _curve(config, steps, held[name].to_numpy(float), levels.get(name), repeats)
    out["train loss"] = _curve(config, train.step.to_numpy(float), train.loss.to_numpy(float), levels["loss"])
    names = [name for score in shown_in("timeline") for name in score.means] if scores is not None else []
    for name in names:
        assert scores is not None
        if (found := followed(scores, name, circuit)) is not None:
            steps, values = (found.rows[column].to_numpy(float) for column in ("step", "value"))
            out[found.name] = _curve(config, steps, values)
    return out


def _curve(config: RunConfig, steps: F64, values: F64, level: Level | None = None, repeats: F64 | None = None) -> Curve:
    return Curve(steps, values, np.array(learning_time(steps.tolist(), config.train)), repeats, level)


def epoch_steps(config: RunConfig) -> tuple[float, ...]:
    """The steps at which the training examples begin to repeat, and every later epoch begins."""
    examples, batch = config.task.examples, config.train.batch_size
    if examples is None:
        return ()
    return tuple(n * examples / batch for n in range(1, int(config.train.steps * batch / examples) + 1))


def loss_transitions(run: Run) -> Transitions:
    """The transitions of a run's validation loss."""
    return curves_of(run)["loss"].transitions()


def loss_bump(run: Run) -> tuple[float, float] | None:
    """Onset and end of the steepest fall of the validation loss; None if none stands out or the run is too short."""
    drop = None if _no_phases(run) else steepest_fall(loss_transitions(run))
    return None if drop is None else (drop.onset, drop.end)


def timeline(run: Run, scores: pd.DataFrame | None = None, circuit: Circuit | None = None) -> Timeline:
    """Transitions of every curve of a run, the verdict on its loss bump, and where its data begins to repeat."""
    curves, config = curves_of(run, scores, circuit), run.config
    found = {name: curve.transitions() for name, curve in curves.items()}
    loss, metric = curves["loss"], curves[config.task.metric]
    accuracy = metric.values if config.task.metric == "accuracy" else np.full(len(loss.steps), np.nan)
    judged = verdict(loss.steps, loss.values, accuracy, config.task.chance or 0.0, found=found["loss"])
    return Timeline(run.name, found, judged, config.task.metric, epoch_steps(config))
