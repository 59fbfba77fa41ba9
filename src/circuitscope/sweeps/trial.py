"""One trial: trains its run, or goes on with it, evaluates it on test examples, measures it, and makes its row.

A trial leaves its row in RUN/trial.json when it ends, so that nothing is lost if the sweep that started it is gone.
A run that is finished already is not trained again.
"""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from circuitscope import __version__
from circuitscope.errors import RunFailed, UserError
from circuitscope.progress import Progress
from circuitscope.runs.run import Run
from circuitscope.runs.store import write_text
from circuitscope.sweeps.grid import Trial
from circuitscope.sweeps.measures import MEASURES, check_measures
from circuitscope.sweeps.results import DONE, Row

if TYPE_CHECKING:
    import pandas as pd

SAVED_ROW = "trial.json"  # in a run
TEST_EXAMPLES = 3000
_BATCH = 250  # test examples at a time
REACHED = {"step_50": 0.5, "step_90": 0.9, "step_95": 0.95, "step_99": 0.99}  # column of the first step: accuracy


def run_trial(
    trial: Trial,
    folder: Path,
    *,
    measure: Sequence[str] = (),
    fractions: Sequence[float] = (),
    progress: Progress | None = None,
) -> Row:
    """Brings a trial to its end in FOLDER/DIGEST and returns its row; see `ResultsTable` for where rows are kept.

    Raises:
        Interrupted: a signal stopped the training; the run goes on from there the next time.
    """
    check_measures(measure)
    run, message = _trained(trial, folder, progress)
    state = run.status.get("state")
    state = state if state in DONE else "failed"
    row: Row = {"digest": trial.digest, **trial.values, "state": state}
    if state in DONE:
        row |= numbers_of(run, fractions)
    if state == "finished":
        row |= on_test_examples(run)
    if state in DONE and run.steps:
        for name in measure:
            row |= MEASURES[name].columns(run)
        row["measured"] = " ".join(measure)
    row |= {"message": message, "version": __version__}
    write_text(run.path / SAVED_ROW, json.dumps(row, indent=1, default=str) + "\n")
    return row


def _trained(trial: Trial, folder: Path, progress: Progress | None) -> tuple[Run, str]:
    """The run of a trial, trained as far as it goes, and why it ended early or what a bad end looks like."""
    from circuitscope.training import trainer

    path = folder / trial.digest
    try:
        if not (path / "config.yaml").exists():
            run = trainer.train(trial.config, root=folder, name=trial.digest, progress=progress)
            return run, str(run.status.get("message", ""))
        run = Run(path)
        if run.digest != trial.digest:
            raise UserError(f"{path} holds another run: its digest is {run.digest}; move it away")
        if run.status.get("state") in ("finished", "diverged"):
            return run, str(run.status.get("message", ""))
        run = trainer.resume(run, progress=progress)
        return run, str(run.status.get("message", ""))
    except RunFailed as error:  # diverged, or the disk is full
        return Run(path), str(error)


def numbers_of(run: Run, fractions: Sequence[float] = ()) -> Row:
    """What the run's log says: steps, time, cost, best and last validation, first steps at 50, 90, 95 and 99%."""
    from circuitscope.models.accounting import parameters, state_size, training_flops_per_token, without_weights
    from circuitscope.models.build import build_model

    metric, rows = run.config.task.metric, run.metrics
    with without_weights():
        model = build_model(run.config.model)
    tokens = int(rows.tokens.max()) if len(rows) else 0
    out: Row = {
        "steps": int(run.status.get("step", 0)),
        "seconds": round(float(rows.seconds.max()), 1) if len(rows) else 0.0,
        "tokens": tokens,
        "flops": float(tokens * training_flops_per_token(model, run.config.task.max_length)),
        "parameters": parameters(model).total,
        "state_size": state_size(model),
    }
    held = _held_out(run)
    if not len(held):
        return out
    best = held.iloc[_best(run, held)]
    out |= {
        f"best_validation_{metric}": float(best[metric]),
        "best_validation_loss": float(held.loss.min()),
        "best_step": int(best.step),
        f"last_validation_{metric}": float(held[metric].iloc[-1]),
        "last_validation_loss": float(held.loss.iloc[-1]),
    }
    train = rows[rows.split == "train"]
    if len(train):
        out[f"last_train_{metric}"] = float(train[metric].tail(10).mean())
        out |= _gradients(train)
    for column, share in REACHED.items() if metric == "accuracy" else ():
        reached = held[held[metric] >= share]
        out[column] = int(reached.step.iloc[0]) if len(reached) else math.nan
    for fraction in fractions:
        budget = fraction * run.config.train.steps
        out[f"{metric}_at_{fraction:g}"] = _at_best(run, held[held.step <= budget])
    return out


def _gradients(train: "pd.DataFrame") -> Row:
    """Share of clipped steps, and gradient norms before clipping: median and largest, and medians by parameter group.

    Norms are those of the logged steps; clipped steps are counted at every step up to the last logged one.
    """
    if "grad_norm" not in train:  # a run of an earlier release
        return {}
    groups = [name for name in train if str(name).startswith("grad_norm/")]
    return {
        "clipped": float(train.clipped.mean()) if "clipped" in train else math.nan,
        "grad_norm": float(train.grad_norm.median()),
        "grad_norm_max": float(train.grad_norm.max()),
        **{str(name): float(train[name].median()) for name in groups},
    }


def on_test_examples(run: Run) -> Row:
    """Loss and metric on 3,000 test examples, with the last checkpoint and with the one that validation likes best."""
    metric, out, seen = run.config.task.metric, {}, {}
    for which, step in (("last", run.steps[-1]), ("best", best_checkpoint(run))):
        if step not in seen:
            seen[step] = evaluated(run, step)
        out[f"{which}_test_{metric}"], out[f"{which}_test_loss"] = seen[step]
    return {**out, "best_checkpoint": best_checkpoint(run)}


def best_checkpoint(run: Run) -> int:
    """The saved step with the best validation metric; the last one where no evaluation fell on a checkpoint."""
    held = _held_out(run)
    saved = held[held.step.isin(run.steps)]
    return int(saved.step.iloc[_best(run, saved)]) if len(saved) else run.steps[-1]


def evaluated(run: Run, step: int, examples: int = TEST_EXAMPLES) -> tuple[float, float]:
    """Metric and loss of a checkpoint on examples of the test split."""
    import torch

    task, model = run.config.task, run.load(step)
    sums, seen = [0.0, 0.0], 0
    with torch.no_grad():
        for number in range(math.ceil(examples / _BATCH)):
            size = min(_BATCH, examples - seen)
            batch = task.batch(number, split="test", size=_BATCH, seed=run.config.train.batch_seed)
            loss, metric = task.evaluate(model, batch.part(slice(0, size)))
            sums = [sums[0] + metric * size, sums[1] + loss * size]
            seen += size
    return sums[0] / seen, sums[1] / seen


def curves_of(run: Run) -> list[Row]:
    """Validation loss and metric, training loss, and the scores that were measured, at the steps that have them."""
    metric, rows = run.config.task.metric, run.metrics
    points: dict[int, Row] = {}

    def add(step: int, name: str, value: float) -> None:
        points.setdefault(int(step), {"step": int(step)})[name] = float(f"{value:.5g}")

    for row in _held_out(run).to_dict("records"):
        add(row["step"], "loss", row["loss"])
        add(row["step"], metric, row[metric])
    for row in rows[rows.split == "train"].to_dict("records") if len(rows) else ():
        if row["step"] in points:
            add(row["step"], "train_loss", row["loss"])
    for name, scores in _scores_by_step(run).items():
        for step, value in scores.items():
            add(step, name, value)
    return [points[step] for step in sorted(points)]


def _scores_by_step(run: Run) -> dict[str, dict[int, float]]:
    """Scores at the place where each ends highest, as a run's timeline has them, by score and step.

    Only what a measure has left in the run is read; nothing is computed here.
    """
    if not (run.path / "analysis" / "scores.parquet").exists():
        return {}
    from circuitscope.analysis.checkpoints.runner import kept_tables
    from circuitscope.analysis.registry import ANALYSES
    from circuitscope.analysis.scores.curves import curve_at, strongest
    from circuitscope.analysis.scores.registry import shown_in

    table = kept_tables(run, "scores", ANALYSES["scores"].table_columns).get("scores")
    out: dict[str, dict[int, float]] = {}
    if table is None:
        return out
    for name in (name for score in shown_in("timeline") for name in score.means):
        if (place := strongest(table, name)) is not None:
            curve = curve_at(table, place)
            out[name] = dict(zip(curve.step, curve.value, strict=True))
    return out


def saved_row(run: Run) -> Row | None:
    """The row that a trial left in its run, if it came to its end."""
    try:
        data: Any = json.loads((run.path / SAVED_ROW).read_text(encoding="utf-8"))
        return data if isinstance(data, dict) and data.get("digest") == run.digest else None
    except (OSError, ValueError, RecursionError, UserError):
        return None


def _best(run: Run, held: "pd.DataFrame") -> int:
    """The number of the row with the best metric, which is the largest accuracy or the smallest error."""
    values = held[run.config.task.metric]
    return int(values.argmax() if run.config.task.larger_is_better else values.argmin())


def _at_best(run: Run, held: "pd.DataFrame") -> float:
    return float(held[run.config.task.metric].iloc[_best(run, held)]) if len(held) else math.nan


def _held_out(run: Run) -> "pd.DataFrame":
    rows = run.metrics
    return rows[rows.split == "validation"] if len(rows) else rows
