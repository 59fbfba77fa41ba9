"""What a trial measures of itself before it ends, because runs are not kept forever: columns of its row.

A measure reads the run's checkpoints through the analyses of this package. Each says which columns it fills.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from circuitscope.analysis.registry import refusal
from circuitscope.errors import UserError, unknown
from circuitscope.runs.run import Run
from circuitscope.sweeps.results import Row

if TYPE_CHECKING:
    from circuitscope.analysis.causal.circuit import Circuit, Part


@dataclass(frozen=True)
class Measure:
    """One measure: a sentence on what it is, and the columns that it gives for a run."""

    about: str
    columns: Callable[[Run], Row]


def check_measures(names: Iterable[str]) -> None:
    """Refuses a name that is no measure."""
    for name in names:
        if name not in MEASURES:
            raise unknown("measure", name, MEASURES)


def _circuit(run: Run) -> Row:
    """Weight and knockout of the binding and the recall step at the last checkpoint, and which of them is missing."""
    from circuitscope.analysis.checkpoints.runner import circuits

    if why := refusal("circuit", run):
        return {"circuit": why}
    ((_, found),) = circuits(run).items()
    return {
        "circuit": "found" if found.found else "not found",
        "missing": _missing(found),
        **_part("binding", found),
        **_part("recall", found),
    }


def _missing(found: "Circuit") -> str:
    missing = [step for step, part in (("binding", found.binding), ("recall", found.recall)) if part is None]
    return " and ".join(missing)


def _part(step: str, found: "Circuit") -> Row:
    """The part that was found, or otherwise the place whose knockout costs most."""
    chosen = found.binding if step == "binding" else found.recall
    tried: list[Part] = [part for part in found.tried if part.step == step]
    best = chosen or max(tried, key=lambda part: part.effect.lost, default=None)
    if best is None:
        return {}
    return {
        f"{step}_place": f"{best.place} {best.edges}",
        f"{step}_weight": best.weight,
        f"{step}_lost": best.effect.lost,
        f"{step}_lost_stderr": best.effect.stderr,
    }


def _phases(run: Run) -> Row:
    """The verdict on the loss, and the midpoints of the largest transitions with their intervals."""
    from circuitscope.analysis.checkpoints.runner import analyze
    from circuitscope.analysis.phases.timeline import timeline

    if why := refusal("phases", run):
        return {"verdict": why}
    try:
        when = timeline(run, analyze(run))
    except UserError as error:
        return {"verdict": str(error)}
    out: Row = {"verdict": when.verdict.kind}
    for name in ("loss", run.config.task.metric, "binding", "recall"):
        sign = -1 if name == "loss" else 1
        several = [t for curve, ts in when.found.items() if curve.partition(" ")[0] == name for t in ts]
        largest = max((t for t in several if t.size * sign > 0), key=lambda t: abs(t.size), default=None)
        if largest is not None:
            out |= {f"{name}_step": largest.midpoint, f"{name}_low": largest.low, f"{name}_high": largest.high}
    return out


def _decay(run: Run) -> Row:
    """κ of Φ and the time constant of the state at the last checkpoint, medians over the heads of each layer."""
    from circuitscope.analysis.checkpoints.runner import analysis_table

    if why := refusal("decay", run):
        return {"kappa": math.nan, "decay": why}
    rows = analysis_table(run, "decay", steps=run.steps[-1])
    out: Row = {}
    for quantity, column in (("kappa_median", "kappa"), ("kappa_r2_median", "kappa_r2")):
        for row in rows[(rows.quantity == quantity) & (rows.factor == "phi")].to_dict("records"):
            out[f"{column}_L{row['layer']}"] = row["value"]
    for row in rows[rows.quantity == "time_constant_median"].to_dict("records"):
        out[f"time_constant_L{row['layer']}"] = row["value"]
    return out


MEASURES = {
    "circuit": Measure("whether the binding and the recall step formed, by score and knockout", _circuit),
    "phases": Measure("when loss, accuracy, binding and recall turned, with intervals", _phases),
    "decay": Measure("decay of Φ with distance, and the time constant of the state", _decay),
}
