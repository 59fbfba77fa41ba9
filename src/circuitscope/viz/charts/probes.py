"""A probe as charts: what it reads from each hook and role over training, and what the model loses without it."""

from collections.abc import Iterator

import pandas as pd

from circuitscope.viz.charts.kinds import Bars, Chart, Line, OverSteps, number, numbers
from circuitscope.viz.probes import short_name


def probe_charts(frame: pd.DataFrame) -> Iterator[Chart]:
    """Accuracy with its 95% interval and the chance level, selectivity, and what its removal costs, where known."""
    score = "R²" if (frame.metric == "r2").all() else "Accuracy"
    levels = [("chance", chance) for chance in sorted({round(float(c), 3) for c in frame.chance.dropna()})]
    yield OverSteps(f"{score} of the probe", _lines(frame, "accuracy"), levels)
    if frame.selectivity.notna().any():
        yield OverSteps("Selectivity: above the control task", _lines(frame, "selectivity"))
    last = frame[(frame.step == frame.step.max()) & frame.lost.notna()]
    if len(last):
        rows = last.to_dict("records")
        bars = [(_name(row["hook"], row["role"]), number(row["lost"]), number(row["lost_stderr"])) for row in rows]
        yield Bars("Accuracy that the model loses without the probe's directions", bars)


def _lines(frame: pd.DataFrame, column: str) -> list[Line]:
    lines = []
    for (hook, role), rows in frame.groupby(["hook", "role"], sort=False):
        rows = rows.sort_values("step")
        band = [numbers(rows[name]) for name in ("low", "high")] if column == "accuracy" else []
        steps = [int(step) for step in rows.step]
        lines.append(Line(_name(str(hook), str(role)), steps, numbers(rows[column]), *band))
    return lines


def _name(hook: str, role: str) -> str:
    return f"{role}, {short_name(hook)}"
