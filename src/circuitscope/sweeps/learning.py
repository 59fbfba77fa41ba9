"""The curves of a sweep as one table: loss and metric by step for every trial, from curves.csv, without any run."""

import pandas as pd

from circuitscope.errors import UserError
from circuitscope.sweeps.cells import RATE, SEEDS, metric_of, words
from circuitscope.sweeps.grid import Grid
from circuitscope.sweeps.results import ResultsTable


def learning_curves(grid: Grid, results: ResultsTable) -> pd.DataFrame:
    """A row per trial and step: model, rate, seed, step, loss, value, chance.

    `model` names the values of all axes that vary, but the seeds and the learning rate; `value` is the task's metric on
    held-out examples; `chance` what answering with any value of the context would give.
    """
    metric = metric_of(grid)
    several = [
        path
        for path in grid.axes
        if path not in (RATE, *SEEDS) and len({str(trial.values[path]) for trial in grid.trials}) > 1
    ]
    rows = [
        {
            "model": ", ".join(words(path, trial) for path in several),
            "rate": trial.config.train.lr,
            "seed": " ".join(str(trial.values[path]) for path in SEEDS if path in trial.values),
            "step": point["step"],
            "loss": point["loss"],
            "value": point.get(metric),
            "chance": trial.config.task.chance,
        }
        for trial in grid.trials
        if results.done(trial.digest)
        for point in results.curves.get(trial.digest, [])
        if "loss" in point
    ]
    if not rows:
        raise UserError(f"{results.curves_path} has no curve of {grid.name}: there is nothing to draw")
    return pd.DataFrame(rows)
