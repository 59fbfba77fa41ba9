"""What a trial measures of itself before it ends, because runs are not kept forever: columns of its row.

A measure reads the run's checkpoints through the analyses of this package. Each says which columns it fills. A run that
diverged is measured at its last good checkpoint and resume point, since what it was like there is why it failed.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from circuitscope.analysis.registry import refusal
from circuitscope.errors import UserError, unknown
from circuitscope.runs.damage import DamagedFile
from circuitscope.runs.run import Run
from circuitscope.sweeps.results import Row

if TYPE_CHECKING:
    from circuitscope.analysis.causal.parts import Circuit, Part


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
    """Weight and knockout of the binding and the recall step at the last checkpoint, and what is missing.

    A model that has learned to answer with values of the context, but not with the one that belongs to the query's key,
    has the accuracy of any value, 1/k. There a knockout of binding costs nothing and one of recall nearly everything:
    the query reads all values, and binding is what is missing.
    """
    from circuitscope.analysis.checkpoints.runner import circuits

    answers = _answers(run)
    if why := refusal("circuit", run):
        missing = ["match"] if answers and answers["answers"] != RIGHT else []
        return {"circuit": why, **answers, "missing": _missing(answers, missing)}
    ((_, found),) = circuits(run).items()
    steps = [step for step, part in (("binding", found.binding), ("recall", found.recall)) if part is None]
    return {
        "circuit": "found" if found.found else "not found",
        **answers,
        "missing": _missing(answers, steps if steps or found.found else ["match"]),
        **_part("binding", found),
        **_part("recall", found),
    }


RIGHT, ANY_VALUE, NO_VALUE = "the bound value", "any value", "no value"


def _answers(run: Run) -> Row:
    """What the last checkpoint answers: the bound value, any value of the context, or mostly tokens that are none.

    It answers the bound value if it is right more often than any value would be, by two points of accuracy, and any
    value if at least half of its answers are values of the context.
    """
    import torch

    from circuitscope.analysis.checkpoints.runner import held_out
    from circuitscope.analysis.scores.answers import is_a_value
    from circuitscope.tasks import any_value

    batch = held_out(run).own
    if batch.layout.value_pos is None or batch.inputs.is_floating_point():
        return {}
    model, (where, target) = run.load(), batch.labelled()
    with torch.no_grad():
        token = model(batch.inputs, at=where).argmax(dim=1)
    right, chance = float((token == target).float().mean()), float(any_value(batch).mean())
    share = float(is_a_value(token, batch).mean())
    what = RIGHT if right > chance + 0.02 else ANY_VALUE if share >= 0.5 else NO_VALUE
    return {"answers": what, "value_share": share, "any_value_accuracy": chance}


def _missing(answers: Row, steps: list[str]) -> str:
    """The steps that are missing, in the order in which models learn them: values, binding and recall."""
    several = [*(["values"] if answers.get("answers") == NO_VALUE else []), *steps]
    return " and ".join([", ".join(several[:-1]), several[-1]] if several[1:] else several)


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
    """The verdict on the loss, and the steepest transitions that need a circuit: onset, midpoint and its interval."""
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
        falls = name == "loss" or (name == run.config.task.metric and not run.config.task.larger_is_better)
        several = [t for curve, ts in when.found.items() if curve.partition(" ")[0] == name for t in ts.beyond]
        steepest = max((t for t in several if (t.size < 0) == falls), key=lambda t: t.steepness, default=None)
        if steepest is not None:
            out |= {
                f"{name}_onset": steepest.onset,
                f"{name}_step": steepest.midpoint,
                f"{name}_low": steepest.low,
                f"{name}_high": steepest.high,
            }
    return out


def _decay(run: Run) -> Row:
    """κ of Φ, the time constant of the state and what its transition keeps over half of the sequence, at the last
    checkpoint, the last one also at the first checkpoint; medians over the heads of each layer.
    """
    from circuitscope.analysis.checkpoints.runner import analysis_table

    if why := refusal("decay", run):
        return {"kappa": math.nan, "decay": why}
    first, last = run.steps[0], run.steps[-1]
    table = analysis_table(run, "decay", steps=sorted({first, last}))
    out: Row = {}
    half = table[(table.quantity == "transition_rms_median") & (table.lag == run.config.task.max_length // 2)]
    for step, column in ((first, "transition_start"), (last, "transition")):
        for row in half[half.step == step].to_dict("records"):
            out[f"{column}_L{row['layer']}"] = row["value"]
    rows = table[table.step == last]
    for quantity, column in (("kappa_median", "kappa"), ("kappa_r2_median", "kappa_r2")):
        for row in rows[(rows.quantity == quantity) & (rows.factor == "phi")].to_dict("records"):
            out[f"{column}_L{row['layer']}"] = row["value"]
    for row in rows[rows.quantity == "time_constant_median"].to_dict("records"):
        out[f"time_constant_L{row['layer']}"] = row["value"]
    return out


def _curvature(run: Run) -> Row:
    """How sharply the loss bends at the resume points, and how close that is to where AdamW's steps grow."""
    from circuitscope.sweeps.stability import stability_at

    found, why = [], "the run has no resume point"
    for step in run.checkpoints.resume_steps():
        try:
            found.append(stability_at(run, step))
        except (UserError, DamagedFile, OSError) as error:
            why = str(error)
    if not found:
        return {"curvature": why}
    last = found[-1]
    return {
        "sharpness": last.sharpness,
        "sharpness_max": max(point.sharpness for point in found),
        "preconditioned": last.preconditioned,
        "preconditioned_max": max(point.preconditioned for point in found),
        "stability_threshold": last.threshold,
        "stability_ratio": last.ratio,
        "stability_ratio_max": max(point.ratio for point in found),
    }


def _evaluation(run: Run) -> Row:
    """The task's own measures of the last checkpoint on test examples, as `circuitscope evaluate` has them."""
    from circuitscope.analysis.evaluation import MODEL, evaluate

    table = evaluate(run, step=run.steps[-1])
    own = table[table["of"] == MODEL]
    return {f"evaluated_{name.replace(' ', '_')}": value for name, value in zip(own.measure, own.value, strict=True)}


MEASURES = {
    "circuit": Measure("whether the binding and the recall step formed, by score and knockout", _circuit),
    "phases": Measure("when loss, accuracy, binding and recall turned, with intervals", _phases),
    "decay": Measure("decay of Φ with distance, and what the state's transition keeps", _decay),
    "evaluation": Measure("the task's own measures on test examples, also where its inputs differ", _evaluation),
    "curvature": Measure("largest eigenvalue of the Hessian, and how close AdamW is to its edge", _curvature),
}
