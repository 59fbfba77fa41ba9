"""Sweeps with known numbers: rows and curves in results.csv and curves.csv, without a single run."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from circuitscope.sweeps.grid import Trial
from circuitscope.sweeps.sweep import Sweep

RATES = [1e-4, 1e-3, 1e-2, 1e-1]
TRAIN = {"steps": 1000, "schedule": "constant", "warmup_steps": 50}
TASK = {"length": 16, "pairs": 4, "vocab_size": 64}


def made_up_sweep(
    folder: Path,
    row: Callable[[Trial], dict[str, Any] | None],
    curve: Callable[[Trial], list[tuple[int, float]]] | None = None,
    *,
    train: dict[str, Any] | None = None,
    **grid: Any,
) -> Sweep:
    """A sweep in FOLDER; `row` gives what a trial's row says, or None where it has none; `curve` its accuracies.

    `accuracy` in a row stands for the best accuracy on validation and on test.
    """
    folder.mkdir(parents=True, exist_ok=True)
    base = {"model": {"d_model": 8, "n_layers": 1}, "task": TASK, "train": {**TRAIN, **(train or {})}}
    axes = grid.pop("axes", {"train.lr": RATES, "train.seed": {"seeds": 3}})
    (folder / "grid.yaml").write_text(yaml.safe_dump({"base": base, "axes": axes, **grid}, sort_keys=False))
    sweep = Sweep.open(folder, folder / "no runs")
    for trial in sweep.grid.trials:
        found = row(trial)
        if found is None:
            continue
        found = {"digest": trial.digest, **trial.values, "state": "finished", "steps": 1000, **found}
        if "accuracy" in found:
            accuracy = found.pop("accuracy")
            found = {"best_validation_accuracy": accuracy, "best_test_accuracy": accuracy, **found}
        points = curve(trial) if curve else []
        sweep.results.add(found, [{"step": step, "accuracy": value} for step, value in points], write=False)
    sweep.results.write()
    return sweep
