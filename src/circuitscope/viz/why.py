"""Why a learning rate fails: accuracy, the steps of the circuit that formed, AdamW's stability and gradients, by rate.

Every model is a column. From above: accuracy; which steps of the circuit formed, in shares of the seeds; the
curvature that AdamW sees over the threshold of its stability, with the share of clipped steps; and the norms of the
gradient by group of parameters.
"""

import math
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.collections import QuadMesh
from matplotlib.patches import Patch
from matplotlib.ticker import FixedLocator, FuncFormatter, NullFormatter, PercentFormatter

from circuitscope.errors import UserError
from circuitscope.viz.labels import legend_below, line_entry, shade_entry
from circuitscope.viz.style import GREY, SEQUENTIAL, Sheet, look, plain, written

_COLOURS = {"values": "#88CCEE", "binding": "#AA4499", "recall": "#332288"}
_ACCURACY, _STABILITY, _CLIPPED = "#000000", "#D55E00", "#E69F00"
_WIDTH, _ASIDE = 1.9, 1.1  # inches of a column, and of what stands beside them
_HEIGHTS = {"metric": 1.4, "circuit": 0.62, "stability": 1.1, "gradient": 1.2}
_MOST_GROUPS = 9
_UNKNOWN = "#DDDDDD"


def why(trials: pd.DataFrame, *, title: str, value: str, threshold: float, level: str) -> Sheet:
    """The figure of a sweep whose trials measured themselves.

    Args:
        trials: a row per trial; see `sweeps.reasons`. Panels of the sweep are columns of their own.
        value: the name of the metric.
        threshold: the metric at or above which a rate succeeds.
        level: what the dotted line is the metric of.
    """
    known = trials[trials["value"].notna()]
    if not len(known):
        raise UserError(f"there is no {value} to draw")
    columns = list(dict.fromkeys(zip(known["panel"], known["line"], strict=True)))
    rates = sorted(set(known["x"]))
    parts = dict(_HEIGHTS)
    if not known["stability"].notna().any() and not known["clipped"].notna().any():
        parts.pop("stability")
    if not _groups(known):
        parts.pop("gradient")
    with look():
        size = (_ASIDE + _WIDTH * max(3, len(columns)), sum(parts.values()) + 0.9)
        figure = Sheet(table=lambda: known, figsize=size, layout="constrained")
        grid = figure.add_gridspec(len(parts), len(columns), height_ratios=list(parts.values()))
        every, limits = _gradient_range(known), _stability_range(known)
        images = []
        for j, (panel, line) in enumerate(columns):
            rows = known[(known["panel"] == panel) & (known["line"] == line)]
            axes = {part: figure.add_subplot(grid[i, j]) for i, part in enumerate(parts)}
            _metric(axes["metric"], rows, threshold)
            _circuit(axes["circuit"], rows, rates)
            if "stability" in axes:
                _stability(axes["stability"], rows, limits, first=j == 0, last=j + 1 == len(columns))
            if "gradient" in axes and (image := _gradients(axes["gradient"], rows, rates, every)) is not None:
                images.append((image, axes["gradient"]))
            axes["metric"].set_title(written(", ".join(filter(None, (line, panel)))), loc="left")
            for part, one in axes.items():
                _rates(one, rates, labelled=part == list(parts)[-1])
            if j == 0:
                axes["metric"].set_ylabel(value)
            else:
                axes["metric"].set_yticklabels([])
                axes["circuit"].set_yticklabels([])
        if images:
            bar = figure.colorbar(images[-1][0], ax=[one for _, one in images], pad=0.01, aspect=14)
            bar.set_label("log10 of gradient norm,\nmedian over steps", fontsize=7)
        figure.suptitle(written(title), x=0.01, ha="left")
        legend_below(figure, list(_legend(parts, threshold, level)))
    return figure


def _metric(axes: Axes, rows: pd.DataFrame, threshold: float) -> None:
    by = rows.groupby("x")["value"].agg(["mean", "min", "max"])
    axes.fill_between(by.index, by["min"], by["max"], color=_ACCURACY, alpha=0.15, lw=0)
    axes.plot(by.index, by["mean"], "o-", color=_ACCURACY, ms=3, lw=1.4)
    axes.axhline(threshold, color=GREY, ls="--", lw=0.8)
    for level in sorted(set(rows["chance"].dropna())):
        axes.axhline(level, color=GREY, ls=":", lw=1)
    axes.set_ylim(-0.03, 1.03)
    plain(axes)


def _circuit(axes: Axes, rows: pd.DataFrame, rates: Sequence[float]) -> None:
    """A row for each step: a bar at each rate, as high as the share of the seeds in which the step formed."""
    width = _step(rates) * 0.76
    for i, (step, colour) in enumerate(_COLOURS.items()):
        for at, seeds in rows.groupby("x"):
            x, measured = float(str(at)), seeds[step].dropna()
            left = x * 10 ** (-width / 2)
            across, base = x * 10 ** (width / 2) - left, i + 0.9
            axes.bar(
                left, -0.8, across, base, align="edge", color="none" if len(measured) else _UNKNOWN, ec=GREY, lw=0.4
            )
            if len(measured) and (share := float(measured.mean())):
                axes.bar(left, -0.8 * share, across, base, align="edge", color=colour, lw=0)
    axes.set_ylim(len(_COLOURS), 0)
    axes.set_yticks([i + 0.5 for i in range(len(_COLOURS))], list(_COLOURS))
    axes.tick_params(axis="y", length=0)
    axes.spines[["left", "right", "top"]].set_visible(False)


def _stability_range(rows: pd.DataFrame) -> tuple[float, float]:
    """The ends of the scale of stability, the same for all columns, with its threshold between them."""
    means = rows.groupby(["panel", "line", "x"])["stability"].mean()
    known = [value for value in means if 0 < value < math.inf]
    return min([0.1, *(value / 2 for value in known)]), max([3.0, *(value * 2 for value in known)])


def _stability(axes: Axes, rows: pd.DataFrame, limits: tuple[float, float], *, first: bool, last: bool) -> None:
    """The ratio on the left, on a log scale with its threshold at 1; the share of clipped steps on the right."""
    by = rows.groupby("x")[["stability", "clipped"]].mean()
    axes.axhline(1, color=_STABILITY, ls=":", lw=1)
    axes.plot(by.index, by["stability"], "s-", color=_STABILITY, ms=3, lw=1.2)
    axes.set_yscale("log")
    axes.set_ylim(limits)
    axes.yaxis.set_minor_formatter(NullFormatter())
    beside = axes.twinx()
    beside.plot(by.index, by["clipped"], "^-", color=_CLIPPED, ms=3, lw=1)
    beside.set_ylim(-0.03, 1.03)
    beside.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    beside.spines["top"].set_visible(False)
    plain(axes)
    if first:
        axes.set_ylabel("curvature over\nAdamW's limit", color=_STABILITY)
    else:
        axes.yaxis.set_major_formatter(NullFormatter())
    if last:
        beside.set_ylabel("clipped steps", color=_CLIPPED)
    else:
        beside.set_yticklabels([])


def _groups(rows: pd.DataFrame) -> list[str]:
    """The columns of gradients that these trials have, those with the largest norms first if there are many."""
    names = [str(name) for name in rows if str(name).startswith("gradient/") and rows[name].notna().any()]
    if len(names) > _MOST_GROUPS:
        names = sorted(names, key=lambda name: -float(np.nanmedian(rows[name])))[:_MOST_GROUPS]
    return names


def _gradient_range(rows: pd.DataFrame) -> tuple[float, float]:
    values = [v for name in _groups(rows) for v in rows[name].dropna() if 0 < v < math.inf]
    return (math.log10(min(values)), math.log10(max(values))) if values else (0.0, 1.0)


def _gradients(axes: Axes, rows: pd.DataFrame, rates: Sequence[float], ends: tuple[float, float]) -> QuadMesh | None:
    """A row for each group of parameters, coloured by the norm of its gradient at each rate."""
    names = _groups(rows)
    if not names:
        axes.set_axis_off()
        return None
    by = rows.groupby("x")[names].mean().reindex(list(rates))
    values = np.log10(np.where((by > 0) & np.isfinite(by), by, np.nan)).T
    half = _step(rates) / 2
    edges = [rates[0] * 10**-half, *(math.sqrt(a * b) for a, b in pairwise(rates))]
    edges.append(rates[-1] * 10**half)
    image = axes.pcolormesh(edges, np.arange(len(names) + 1), values, cmap=SEQUENTIAL, vmin=ends[0], vmax=ends[1])
    axes.set_ylim(len(names), 0)
    axes.set_yticks([i + 0.5 for i in range(len(names))], [written(name.removeprefix("gradient/")) for name in names])
    axes.tick_params(axis="y", length=0, labelsize=5.5, pad=1)
    axes.spines[:].set_visible(False)
    return image


def _step(rates: Sequence[float]) -> float:
    """The smallest distance between two rates, in decades."""
    return min((math.log10(b / a) for a, b in pairwise(rates)), default=1 / 3)


def _rates(axes: Axes, rates: Sequence[float], *, labelled: bool) -> None:
    axes.set_xscale("log")
    powers = [rate for rate in rates if math.isclose(math.log10(rate) % 1, 0, abs_tol=1e-6)]
    axes.xaxis.set_major_locator(FixedLocator(powers if len(powers) > 1 else rates))
    axes.xaxis.set_minor_locator(FixedLocator(list(rates)))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:.1e}".replace(".0e", "e").replace("e-0", "e-")))
    half = _step(rates) / 2
    axes.set_xlim(rates[0] * 10**-half, rates[-1] * 10**half)
    axes.tick_params(axis="x", labelbottom=labelled)
    if labelled:
        axes.set_xlabel("learning rate")


def _legend(parts: dict[str, float], threshold: float, level: str) -> list[object]:
    out: list[object] = [
        line_entry("mean over seeds", _ACCURACY, marker="o", ms=3),
        shade_entry("lowest to highest seed", _ACCURACY),
        line_entry(f"{threshold:g}", GREY, ls="--", lw=0.8),
        line_entry(level, GREY, ls=":", lw=1),
        *(Patch(color=colour, lw=0, label=f"{step}: formed") for step, colour in _COLOURS.items()),
        Patch(fc="none", ec=GREY, lw=0.4, label="missing"),
        Patch(fc=_UNKNOWN, ec=GREY, lw=0.4, label="not measured"),
    ]
    if "stability" in parts:
        out.append(line_entry("curvature over AdamW's limit, 1 is the limit", _STABILITY, marker="s", ms=3))
        out.append(line_entry("share of clipped steps", _CLIPPED, marker="^", ms=3))
    return out
