"""Decay of off-diagonal terms over training: the profile m(δ) on a log axis, and the rate fitted to it."""

from collections.abc import Mapping, Sequence
from textwrap import fill
from typing import Any

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import LinearSegmentedColormap, Normalize
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from circuitscope.analysis.decay.lag_profile import FIT_HOLDS
from circuitscope.errors import UserError, shown, unknown
from circuitscope.viz.labels import legend_below, line_entry, shade_entry
from circuitscope.viz.registry import figure as figure_of
from circuitscope.viz.step_axis import Bumps, StepAxis, mark_bumps
from circuitscope.viz.style import GREY, Sheet, look, pens, plain, written

CURVES = 8  # profiles per panel
DECADES = 8  # at most so many on the axis of m(δ)
_EVERY_STEP = StepAxis()
_RAMP = LinearSegmentedColormap.from_list("steps", matplotlib.colormaps["viridis_r"](np.linspace(0.12, 1, 64)))

Array = np.ndarray[Any, np.dtype[np.float64]]


@figure_of("decay")
def decay(
    frames: Mapping[str, pd.DataFrame],
    *,
    factor: str = "phi",
    layers: Sequence[int] | None = None,
    bump: Bumps = None,
    axis: StepAxis = _EVERY_STEP,
) -> Sheet:
    """A panel for every run and layer: m(δ) at steps over training. Then one for every layer: the rate κ of the runs.

    m(δ) is the mean of |Φ| at lag δ; of several heads or channels their median, with quartiles at the last step. The
    dashed line is exp(c − κ δ) with the median κ; c makes the means of its logarithm and of log m(δ) equal, over the
    even and over the odd δ ≥ 1. R² is that of the exponential fit; where it is below FIT_HOLDS there is no rate, no
    line, and the panel says so. The band of κ spans the quartiles over heads; several runs have no bands there.

    Args:
        frames: by name of the run, the table `analysis.analysis_table(run, "decay")` gives.
        factor: "phi", or "phi_without_D" where the mixer has that term.
        layers: by default all.
        bump: first and last step of the loss bump; of several runs by the name of the run.
        axis: which steps are drawn, and whether on a log scale.
    """
    if not frames:
        raise UserError("a figure of decay needs at least one run")
    places = [(name, layer) for name, frame in frames.items() for layer in _layers(frame, factor, layers, name)]
    tables = {
        (name, layer): frames[name][(frames[name].layer == layer) & (frames[name].factor == factor)]
        for name, layer in places
    }
    every = axis.within(step for table in tables.values() for step in table.step)
    norm = axis.colours(every)
    depth = sorted({layer for _, layer in places})
    columns = _columns(len(places), len(depth))
    rows, rate_rows = -(-len(places) // columns), -(-len(depth) // columns)
    width = 9 if columns == 4 else 7.5
    beside = len(places) == 1
    what = "|Φ|" if factor == "phi" else "|Φ| without D" if factor == "phi_without_D" else f"|{factor}|"
    kept: list[dict[str, Any]] = []
    with look():
        figure = Sheet(
            table=lambda: pd.DataFrame(kept),
            figsize=(width, 2.6 if beside else 2.2 * rows + 1.9 * rate_rows + 0.2),
            layout="constrained",
        )
        if beside:
            parts = figure.add_gridspec(1, 2, width_ratios=[1.25, 1])
        else:
            parts = figure.add_gridspec(2, 1, height_ratios=[2.2 * rows, 1.9 * rate_rows])
        grid = parts[0].subgridspec(rows, columns)
        panels = [figure.add_subplot(grid[i // columns, i % columns]) for i in range(len(places))]
        for i, ((name, layer), axes) in enumerate(zip(places, panels, strict=True)):
            here = tables[name, layer]
            heads = _heads(here)
            fits = _profiles(axes, here, axis, norm, kept, {"run": name, "layer": layer})
            of = f", median of {heads} heads or channels" if heads > 1 else ""
            title = fill(written(f"{name}, layer {layer}: {what}{of}"), int(18.5 * (width / max(columns, 2) - 0.5)))
            axes.set_title("\n".join([title, *fits]), loc="left", fontsize=7 if columns < 4 else 6.5)
            axes.set_ylabel("" if i % columns else "mean at lag δ, m(δ)")
            axes.set_xlabel("lag δ" if i + columns >= len(places) else "")
        bar = figure.colorbar(ScalarMappable(norm, _RAMP), ax=panels, pad=0.01 if beside else 0.03, aspect=30 * rows)
        bar.set_label(axis.label)
        side_by_side = min(columns, len(depth))
        lower = parts[1].subgridspec(rate_rows, side_by_side)
        rates = [figure.add_subplot(lower[i // side_by_side, i % side_by_side]) for i in range(len(depth))]
        own = dict(zip(frames, pens(len(frames)), strict=True))
        for i, (layer, axes) in enumerate(zip(depth, rates, strict=True)):
            for name in (name for name, at in places if at == layer):
                _rates(axes, tables[name, layer], own[name], kept, {"run": name, "layer": layer}, band=len(own) == 1)
            axes.axhline(0, color="0.5", lw=0.8, ls=":")
            _say_where_none_fits(axes)
            axes.set_title(f"layer {layer}: rate κ of exp(−κ δ)", loc="left", fontsize=7)
            axes.set(xlabel=axis.label, ylabel="" if i % side_by_side else "κ")
            plain(axes)
        axis.apply(rates)
        entries: list[Any] = mark_bumps(rates, bump, {name: colour for name, (colour, _) in own.items()})
        if len(own) > 1:
            entries += [line_entry(name, colour, ls=style) for name, (colour, style) in own.items()]
        if any(line.get_linestyle() == "--" for axes in panels for line in axes.lines):
            entries.append(line_entry("dashed: exp(c − κ δ), fitted", GREY, lw=1, ls="--"))
        if any(_heads(table) > 1 for table in tables.values()):
            entries.append(shade_entry("bands: quartiles over heads or channels"))
        legend_below(figure, entries)
    return figure


def _columns(panels: int, layers: int) -> int:
    """How many panels stand side by side: up to four, the layers of a run in one line, few places empty."""
    fitting = [n for n in (4, 3) if n % layers == 0] or [4]
    return min(panels, min(fitting, key=lambda n: -panels % n))


def _heads(table: pd.DataFrame) -> int:
    """How many heads or channels a layer has."""
    return int(table["head"].nunique())


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


def _profiles(
    axes: Axes,
    here: pd.DataFrame,
    axis: StepAxis,
    norm: Normalize,
    kept: list[dict[str, Any]],
    of: dict[str, Any],
) -> list[str]:
    """Draws profiles at steps over training; gives, in words, what was fitted to the first and the last."""
    here = here[here["head"].isna()]
    steps = axis.within(here.step)
    chosen = sorted({steps[round(i)] for i in np.linspace(0, len(steps) - 1, min(CURVES, len(steps)))})
    top, fits = 0.0, []
    for step in chosen:
        lag, m = _by_lag(here, step, "profile_median")
        top = max(top, float(np.nanmax(m)))
        last = step == chosen[-1]
        colour = _RAMP(float(norm(step)))
        axes.plot(lag, m, color=colour, lw=1.8 if last else 1, label=f"_step {step}")
        kept += [{**of, "step": step, "quantity": "m", "lag": int(d), "value": v} for d, v in zip(lag, m, strict=True)]
        if step in (chosen[0], chosen[-1]):
            fits += _fit(axes, lag, m, here[here.step == step], colour, step)
        if last:
            (low_at, low), (high_at, high) = (_by_lag(here, step, f"profile_{q}") for q in ("q25", "q75"))
            if np.array_equal(low_at, lag) and np.array_equal(high_at, lag) and (high > low).any():
                axes.fill_between(lag, low, high, color=colour, alpha=0.15, lw=0)
    axes.set_yscale("log")
    bottom, above = axes.get_ylim()
    bottom = max(bottom, top * 10**-DECADES)
    axes.set_ylim(bottom=bottom)
    short = FuncFormatter(lambda m, _: f"{m:g}")
    axes.yaxis.set_major_formatter(short)
    axes.yaxis.set_minor_locator(LogLocator(subs=(2, 5)))
    axes.yaxis.set_minor_formatter(short if above < 30 * bottom else NullFormatter())
    plain(axes)
    return fits


def _fit(axes: Axes, lag: Array, m: Array, rows: pd.DataFrame, colour: Any, step: int) -> list[str]:
    """Draws exp(c − κ δ) beside the profile and says it in words, where the fit holds; else says that it does not."""
    kappa, r2 = (_number(rows, q) for q in ("kappa_median", "kappa_r2_median"))
    use = (lag >= 1) & (m > 0)
    if r2 < FIT_HOLDS:
        return [f"step {step}: no exponential fits, R² = {r2:.2f} (bound {FIT_HOLDS})"]
    if not np.isfinite(kappa) or not use.any():
        return []
    label = f"step {step}: κ = {kappa:.3g}".replace("-", "−") + (f", R² = {r2:.2f}" if np.isfinite(r2) else "")
    line = np.full(len(lag), np.nan)
    for parity in (0, 1):
        here = (lag >= 1) & (lag % 2 == parity)
        c = float((np.log(m[use]) + kappa * lag[use])[lag[use] % 2 == parity].mean()) if (use & here).any() else np.nan
        line[here] = np.exp(c - kappa * lag[here])
    axes.plot(lag[lag >= 1], line[lag >= 1], color=colour, lw=1, ls="--", label=label)
    return [label]


def _rates(
    axes: Axes, here: pd.DataFrame, pen: tuple[str, str], kept: list[dict[str, Any]], of: dict[str, Any], band: bool
) -> None:
    here, (colour, style) = here[here["head"].isna()], pen
    curves = {
        q: here[here.quantity == f"kappa_{q}"].drop_duplicates("step").set_index("step").value.sort_index()
        for q in ("median", "q25", "q75")
    }
    step = curves["median"].index.to_numpy(float)
    values = {q: curve.reindex(step).to_numpy(float) for q, curve in curves.items()}
    axes.plot(step, values["median"], color=colour, ls=style, lw=1.6, marker="o", ms=2.5, label=written(of["run"]))
    if band and (values["q75"] > values["q25"]).any():
        axes.fill_between(step, values["q25"], values["q75"], color=colour, alpha=0.2, lw=0)
    for q, value in values.items():
        kept += [
            {**of, "step": int(s), "quantity": f"kappa_{q}", "lag": None, "value": v}
            for s, v in zip(step, value, strict=True)
        ]


def _say_where_none_fits(axes: Axes) -> None:
    """A note in a panel of rates that has no rate to show at any step."""
    curves = [np.asarray(line.get_ydata(), float) for line in axes.lines if not str(line.get_label()).startswith("_")]
    if curves and not any(np.isfinite(y).any() for y in curves):
        text = f"no rate: no exponential fits\n(R² below {FIT_HOLDS} at every step)"
        axes.text(0.5, 0.5, text, transform=axes.transAxes, ha="center", va="center", fontsize=7, color=GREY)


def _by_lag(here: pd.DataFrame, step: int, quantity: str) -> tuple[Array, Array]:
    """Lags and values; zeros, which a log axis does not have, as nan."""
    rows = here[(here.step == step) & (here.quantity == quantity)].sort_values("lag")
    value = rows.value.to_numpy(float)
    return rows.lag.to_numpy(float), np.where(value > 0, value, np.nan)


def _number(rows: pd.DataFrame, quantity: str) -> float:
    found = rows[rows.quantity == quantity].value
    return float(found.iloc[0]) if len(found) else float("nan")
