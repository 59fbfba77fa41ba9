"""How long the analysis of a checkpoint may take, measured on a few sequences before the work begins."""

import time
from collections.abc import Callable, Iterable

from circuitscope.analysis.checkpoints.in_order import LeftOut, load_weights
from circuitscope.analysis.registry import Row
from circuitscope.analysis.scores.held_out import HeldOut
from circuitscope.models.stack import HookedStack
from circuitscope.runs.run import Run

_PART = 16  # of the sequences, one in so many is measured
_WORTH = 2_000_000  # d_model · layers · length²: below this a checkpoint takes about a second or less


def seconds_per_checkpoint(
    run: Run, step: int, rows_of: Callable[[HookedStack, HeldOut], Iterable[Row]], data: HeldOut
) -> float | None:
    """The seconds that `rows_of` takes on a part of the sequences, scaled up; None where the work is small.

    What does not grow with the number of sequences is scaled too, so the estimate is rather too long than too short.
    """
    model, length = run.config.model, run.config.task.max_length
    few = max(2, data.sequences // _PART)
    if model.d_model * model.n_layers * length**2 < _WORTH or few == data.sequences:
        return None
    part = data.fewer(few)
    loaded = run.empty_model()
    try:
        load_weights(loaded, run, step)
    except LeftOut:
        return None
    list(rows_of(loaded, data.fewer(2)))  # kernels are loaded, and compiled if need be, before the clock runs
    began = time.perf_counter()
    list(rows_of(loaded, part))
    return (time.perf_counter() - began) * data.sequences / few
