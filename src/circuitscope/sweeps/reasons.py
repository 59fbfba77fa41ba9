"""Why trials fail, as a table: the metric of each trial, which steps of its circuit formed, and how AdamW fared."""

import math
from typing import Any

import pandas as pd

from circuitscope.errors import UserError
from circuitscope.sweeps.cells import Cells
from circuitscope.sweeps.results import ResultsTable

STEPS = ("values", "binding", "recall")  # in the order in which models learn them
_GROUP = "grad_norm/"


def reasons(cells: Cells, results: ResultsTable) -> pd.DataFrame:
    """A row per trial that is done: panel, line, x, seed, value, chance; formed, optimizer, and gradients by group.

    `values`, `binding` and `recall` are 1 where that step of the circuit formed, 0 where it is missing, and nan where
    it was not measured or cannot be told. `stability` is the largest ratio of the curvature that AdamW sees to the
    threshold above which its steps grow; `clipped` the share of clipped steps. `gradient/GROUP` is the median norm of
    the gradient of a group of parameters.
    """
    rows = []
    for trial in cells.trials[cells.trials["state"] != ""].to_dict("records"):
        row = results.rows[trial["digest"]]
        rows.append(
            {
                **{str(name): trial[name] for name in ("panel", "line", "x", "seed", "value", "chance", "state")},
                **_formed(str(trial["missing"])),
                "stability": _number(row.get("stability_ratio_max")),
                "clipped": _number(row.get("clipped")),
                **{
                    f"gradient/{name.removeprefix(_GROUP)}": _number(value)
                    for name, value in row.items()
                    if name.startswith(_GROUP)
                },
            }
        )
    table = pd.DataFrame(rows)
    if not table[list(STEPS)].notna().any(axis=None):
        raise UserError("no trial of this sweep has its circuit measured; give the grid measure: [circuit, curvature]")
    return table


def _formed(missing: str) -> dict[str, float]:
    """By step, whether it formed, from the word for what is missing."""
    if not missing:
        return dict.fromkeys(STEPS, math.nan)
    if missing == "values":  # without values, the other steps are missing too
        return dict.fromkeys(STEPS, 0.0)
    if missing == "match":  # the match is missing, and the model has no places that could tell which step
        return {"values": 1.0, "binding": math.nan, "recall": math.nan}
    return {"values": 1.0, **{step: float(step not in missing) for step in ("binding", "recall")}}


def _number(value: Any) -> float:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else math.nan
