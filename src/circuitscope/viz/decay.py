"""Decay of off-diagonal terms over training: the profile m(δ) on a log axis, and the rate fitted to it."""

from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize

from circuitscope.errors import UserError, shown, unknown
from circuitscope.viz.registry import figure as figure_of
from circuitscope.viz.style import COLOURS, Sheet, look, plain, written

CURVES = 8  # profiles per panel
DECADES = 8  # at most so many on the axis of m(δ)

Array = np.ndarray[Any, np.dtype[np.float64]]


@figure_of("decay")
def decay(frames: Mapping[str, pd.DataFrame], *, factor: str = "phi", layers: Sequence[int] | None = None) -> Sheet:
    """A row for every run and layer: left m(δ) at steps over training, right the rate κ by step.

    m(δ) is the median over heads or channels, with quartiles at the last step. The dashed line is exp(c − κ δ) with
    the median κ; c makes the means of its logarithm and of log m(δ) over δ ≥ 1 equal. The band of κ spans the quartiles
    over heads; R² is that of the exponential fit.

    Args:
        frames: by name of the run, the table `analysis.analysis_table(run, "decay")` gives.
        factor: "phi", or "phi_without_D" where the mixer has that term.
        layers: by default all.
    """
    if not frames:
        raise UserError("a figure of decay needs at least one run")
    rows = [(name, frame, layer) for name, frame in frames.items() for layer in _layers(frame, factor, layers, name)]
    kept: list[dict[str, Any]] = []
    with look():
        figure = Sheet(table=lambda: pd.DataFrame(kept), figsize=(9, 2.7 * len(rows) + 0.2), layout="constrained")
        grid = figure.subplots(len(rows), 2, squeeze=False, width_ratios=[1.25, 1])
        for (name, frame, layer), (left, right) in zip(rows, grid, strict=True):
            here = frame[(frame.layer == layer) & (frame.factor == factor) & frame["head"].isna()]
            _profiles(figure, left, here, kept, {"run": name, "layer": layer})
            _rates(right, here, kept, {"run": name, "layer": layer})
            what = "|Φ|" if factor == "phi" else "|Φ| without D" if factor == "phi_without_D" else f"|{factor}|"
            left.set_title(f"{written(name)}, layer {layer}: {what}", loc="left")
            right.set_title("rate κ of exp(−κ δ)", loc="left")
        for axes in grid[-1]:
            axes.set_xlabel({0: "lag δ", 1: "step"}[list(grid[-1]).index(axes)])
    return figure


def _layers(frame: pd.DataFrame, factor: str, layers: Sequence[int] | None, name: str) -> list[int]:
    of = frame[frame.quantity == "profile"]
    if not len(of):
        raise UserError(f"{name} has no mixing matrix Φ, so no decay of its terms")
    if factor not in set(of.factor):
        raise unknown("factor of the decay", factor, of.factor.unique())
    have = sorted(int(layer) for layer in of[of.factor == factor].layer.unique())
    for layer in layers or ():
        if layer not in have:
            raise UserError(f"{name}: {factor} is known in layers {', '.join(map(str, have))}, got {shown(layer)}")
    return list(layers) if layers is not None else have


def _profiles(figure: Sheet, axes: Axes, here: pd.DataFrame, kept: list[dict[str, Any]], of: dict[str, Any]) -> None:
    steps = sorted(int(s) for s in here.step.unique())
    chosen = sorted({steps[round(i)] for i in np.linspace(0, len(steps) - 1, min(CURVES, len(steps)))})
    colours = matplotlib.colormaps["viridis_r"]
    norm = Normalize(steps[0], max(steps[-1], steps[0] + 1))
    top = 0.0
    for step in chosen:
        lag, m = _by_lag(here, step, "profile_median")
        top = max(top, float(np.nanmax(m)))
        last = step == chosen[-1]
        colour = colours(0.12 + 0.88 * float(norm(step)))
        axes.plot(lag, m, color=colour, lw=1.8 if last else 1, label=f"_step {step}")
        kept += [{**of, "step": step, "quantity": "m", "lag": int(d), "value": v} for d, v in zip(lag, m, strict=True)]
        if step in (chosen[0], chosen[-1]):
            _fit(axes, lag, m, here[here.step == step], colour, step)
        if last:
            low, high = (_by_lag(here, step, f"profile_{q}")[1] for q in ("q25", "q75"))
            if (high > low).any():
                axes.fill_between(lag, low, high, color=colour, alpha=0.15, lw=0)
    axes.set_yscale("log")
    bottom, _ = axes.get_ylim()
    axes.set_ylim(bottom=max(bottom, top * 10**-DECADES))
    axes.set_ylabel("m(δ), median over heads")
    plain(axes)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(edgecolor="none", framealpha=0.8)
    ramp = matplotlib.colors.LinearSegmentedColormap.from_list("steps", colours(np.linspace(0.12, 1, 64)))
    bar = figure.colorbar(ScalarMappable(norm, ramp), ax=axes, pad=0.01, aspect=30)
    bar.set_label("step")


def _fit(axes: Axes, lag: Array, m: Array, rows: pd.DataFrame, colour: Any, step: int) -> None:
    """exp(c − κ δ) beside the profile, where there is a rate."""
    kappa, r2 = (_number(rows, q) for q in ("kappa_median", "kappa_r2_median"))
    use = (lag >= 1) & (m > 0)
    if not np.isfinite(kappa) or not use.any():
        return
    c = float((np.log(m[use]) + kappa * lag[use]).mean())
    label = f"step {step}: κ = {kappa:.3g}".replace("-", "−") + (f", R² = {r2:.2f}" if np.isfinite(r2) else "")
    axes.plot(lag[lag >= 1], np.exp(c - kappa * lag[lag >= 1]), color=colour, lw=1, ls="--", label=label)


def _rates(axes: Axes, here: pd.DataFrame, kept: list[dict[str, Any]], of: dict[str, Any]) -> None:
    curves = {q: here[here.quantity == f"kappa_{q}"].sort_values("step") for q in ("median", "q25", "q75")}
    step = curves["median"].step.to_numpy(float)
    values = {q: rows.value.to_numpy(float) for q, rows in curves.items()}
    axes.plot(step, values["median"], color=COLOURS[0], lw=1.6, marker="o", ms=2.5, label="κ")
    if (values["q75"] > values["q25"]).any():
        axes.fill_between(step, values["q25"], values["q75"], color=COLOURS[0], alpha=0.2, lw=0)
    axes.axhline(0, color="0.5", lw=0.8, ls=":")
    axes.set_ylabel("κ, median and quartiles\nover heads")
    plain(axes)
    for q, value in values.items():
        kept += [
            {**of, "step": int(s), "quantity": f"kappa_{q}", "lag": None, "value": v}
            for s, v in zip(step, value, strict=True)
        ]


def _by_lag(here: pd.DataFrame, step: int, quantity: str) -> tuple[Array, Array]:
    """Lags and values; zeros, which a log axis does not have, as nan."""
    rows = here[(here.step == step) & (here.quantity == quantity)].sort_values("lag")
    value = rows.value.to_numpy(float)
    return rows.lag.to_numpy(float), np.where(value > 0, value, np.nan)


def _number(rows: pd.DataFrame, quantity: str) -> float:
    found = rows[rows.quantity == quantity].value
    return float(found.iloc[0]) if len(found) else float("nan")
