"""Decay as charts: the profile m(δ) of |Φ| and the reach of gradients by lag, and the rate κ over training."""

from collections.abc import Iterator

import pandas as pd

from circuitscope.analysis.checkpoints.results import Results
from circuitscope.viz.charts.kinds import AtSteps, Chart, Line, OverSteps, number, numbers
from circuitscope.viz.registry import charts
from circuitscope.viz.report.budget import spread

_STEPS, _LAGS = 24, 64  # at most so many curves of a chart, and points of a curve
_BY_LAG = {
    ("phi", "profile_median"): "m(δ) of |Φ|, median over heads",
    ("gradient", "gradient_reach"): "reach of gradients",
}


@charts("decay")
def decay_charts(found: Results) -> Iterator[Chart]:
    """For each layer the profile and the reach of gradients; one chart of the rates of all layers."""
    frame = found["decay"]
    whole = frame[frame["head"].isna()]
    for (factor, quantity), title in _BY_LAG.items():
        rows = whole[(whole.factor == factor) & (whole.quantity == quantity)]
        for layer, here in rows.groupby("layer"):
            if (here.value > 0).any():
                yield _by_lag(f"L{layer} {title}", here)
    rates = whole[(whole.factor == "phi") & whole.quantity.isin([f"kappa_{q}" for q in ("median", "q25", "q75")])]
    lines = [_rate(f"L{layer}", here) for layer, here in rates.groupby("layer") if here.value.notna().any()]
    if lines:
        yield OverSteps("Rate κ of exp(−κ δ), median and quartiles over heads", lines)


def _by_lag(title: str, rows: pd.DataFrame) -> AtSteps:
    table = rows.pivot_table(index="step", columns="lag", values="value", dropna=False)
    steps, lags = spread(range(len(table)), _STEPS), spread(range(table.shape[1]), _LAGS)
    table = table.iloc[steps, lags]
    values = [[number(v) if v > 0 else None for v in row] for row in table.to_numpy(float)]  # a log axis has no 0
    return AtSteps(title, "lag δ", [int(lag) for lag in table.columns], [int(s) for s in table.index], values, log=True)


def _rate(name: str, rows: pd.DataFrame) -> Line:
    table = rows.pivot_table(index="step", columns="quantity", values="value", dropna=False)
    median, low, high = (numbers(table[f"kappa_{q}"]) for q in ("median", "q25", "q75"))
    return Line(name, [int(s) for s in table.index], median, low, high)
