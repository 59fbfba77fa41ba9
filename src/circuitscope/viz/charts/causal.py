"""Interventions as charts: bars of the strongest effects of each kind at the last checkpoint."""

from collections.abc import Iterator, Mapping
from typing import Any

from circuitscope.analysis.checkpoints.results import Results
from circuitscope.viz.charts.kinds import Bars, number
from circuitscope.viz.probes import short_name
from circuitscope.viz.registry import charts

_MOST = 8  # bars of a chart


@charts("causal")
def causal_charts(found: Results) -> Iterator[Bars]:
    """A chart for each kind of intervention."""
    frame = found["causal"]
    last = frame[(frame.step == frame.step.max()) & frame.value.notna()]
    for (intervention, unit), rows in last.groupby(["intervention", "unit"], sort=False):
        ranked = rows.loc[rows.value.abs().sort_values(ascending=False, kind="stable").index]
        shown = ranked.head(_MOST).to_dict("records")
        bars = [(_where(row), number(row["value"]), number(row["stderr"])) for row in shown]
        rest = f"and {len(ranked) - _MOST} weaker ones" if len(ranked) > _MOST else ""
        yield Bars(f"{intervention}: {unit}", bars, rest)


def _where(row: Mapping[Any, Any]) -> str:
    """The place, with a hook by its short name, and with the layer if the place does not name it."""
    where = str(row["where"])
    if where.startswith("blocks."):
        hook, at, position = where.partition(" at ")
        return f"{short_name(hook)}{at}{position}"
    return where if where.startswith("L") else f"L{row['layer']} {where}"
