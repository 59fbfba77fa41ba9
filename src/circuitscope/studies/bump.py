"""The loss bump of a trial, judged by the curves that its study keeps, so that no run is needed."""

import math
from collections.abc import Sequence

import numpy as np

from circuitscope.sweeps.grid import Trial
from circuitscope.sweeps.results import Row

WITH, WITHOUT = "bump with accuracy", "bump without accuracy"
BUMPS = {  # by quantity, the verdicts on a loss that count
    "bump": (WITH, WITHOUT),
    "bump_with_accuracy": (WITH,),
    "bump_without_accuracy": (WITHOUT,),
}


def bump(quantity: str, trial: Trial, curve: Sequence[Row]) -> float:
    """1 if the validation loss has a bump of this kind, 0 if not, nan where that cannot be judged.

    docs/phases.md says what a bump is, and when it comes with accuracy. "Not judged" (too few points, or a fall that is
    too early or too late to tell) is nan.
    """
    from circuitscope.analysis.phases.detection import transitions
    from circuitscope.analysis.phases.verdict import loss_level, verdict
    from circuitscope.config.rate import learning_time

    task = trial.config.task
    points = [(p["step"], p["loss"], p[task.metric]) for p in curve if "loss" in p and task.metric in p]
    if not points or task.metric != "accuracy":
        return math.nan
    steps, loss, metric = (np.array(column, dtype=float) for column in zip(*points, strict=True))
    clock = learning_time(steps.tolist(), trial.config.train)
    falls = transitions(steps, loss, clock=clock, level=loss_level(task.context_free))
    found = verdict(steps, loss, metric, task.chance or 0.0, found=falls)
    return math.nan if found.kind == "not judged" else float(found.kind in BUMPS[quantity])
