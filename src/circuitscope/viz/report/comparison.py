"""What a report says about its runs together: what distinguishes each, and a table with one row for each run."""

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, get_args

from circuitscope.analysis.causal.parts import Step
from circuitscope.config import differences
from circuitscope.runs.metrics import read_metrics
from circuitscope.runs.run import Run

_REACHED = 0.99  # the accuracy at which a task counts as learned
_NONE = "–"


class Column(NamedTuple):
    """A column of the table: its heading, what it means, and a cell for each run: text, and a number to sort by."""

    name: str
    about: str
    cells: list[tuple[str, float | None]]


def compared(runs: Sequence[Run], told: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The columns of the table, results first, and what distinguishes each run, such as "seed 1"; one run has neither.

    Args:
        told: what the report says of each run, as `facts` gives it.
    """
    if len(runs) < 2:
        return {"table": [], "differs": [[] for _ in runs]}
    fields = differences([run.config for run in runs])
    names = dict(zip(fields, _short(list(fields)), strict=True))
    columns = list(_results(runs, told))
    for field, values in fields.items():
        columns.append(Column(names[field], f"{field} in the config", [_cell(value) for value in values]))
    return {
        "table": [column._asdict() for column in columns],
        "differs": [[f"{names[f]} {_text(values[i])}" for f, values in fields.items()] for i in range(len(runs))],
    }


def _results(runs: Sequence[Run], told: Sequence[dict[str, Any]]) -> Iterator[Column]:
    metrics = " or ".join(dict.fromkeys(run.config.task.metric for run in runs))
    yield Column(metrics, "of held-out examples at the last evaluation", [_last(run) for run in runs])
    yield Column("step to 99%", "first evaluation with an accuracy of at least 99%", [_reached(run) for run in runs])
    yield Column("verdict", "what the loss and the accuracy do together", [(one["verdict"][0], None) for one in told])
    for part in get_args(Step) if any(one["circuit"] for one in told) else ():
        places = [next((p["place"] for p in one["parts"] if p["score"] == part), _NONE) for one in told]
        if part == "carry" and set(places) == {_NONE}:  # a circuit need not have it
            continue
        yield Column(part, "where this part of the recall circuit is", [(place, None) for place in places])


def _evaluations(run: Run) -> list[tuple[int, float]]:
    """(step, metric) of every evaluation that gave a number."""
    rows = [row for row in read_metrics(run.path) if row.get("split") == "validation"]
    found = [(int(row["step"]), float(row.get(run.config.task.metric, math.nan))) for row in rows]
    return [(step, value) for step, value in found if math.isfinite(value)]


def _last(run: Run) -> tuple[str, float | None]:
    task, found = run.config.task, _evaluations(run)
    if not found:
        return _NONE, None
    value = found[-1][1]
    return task.shown(value).removeprefix(task.metric).strip(), value


def _reached(run: Run) -> tuple[str, float | None]:
    is_share = run.config.task.metric == "accuracy"
    step = next((step for step, value in _evaluations(run) if is_share and value >= _REACHED), None)
    return (_NONE, None) if step is None else (str(step), step)


def _short(fields: Sequence[str]) -> list[str]:
    """The last part of each dotted name, or the whole name where two have the same last part."""
    last = [field.rpartition(".")[2] for field in fields]
    return [short if last.count(short) == 1 else field for field, short in zip(fields, last, strict=True)]


def _cell(value: Any) -> tuple[str, float | None]:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return _text(value), value if is_number else None


def _text(value: Any) -> str:
    if isinstance(value, list):
        return " + ".join(map(_text, value))
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: "none"}[value]
    return f"{value:g}" if isinstance(value, float) else str(value)
