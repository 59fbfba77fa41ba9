"""The figure of a sweep: the metric by learning rate, which step of the circuit is missing, and the window of rates.

It draws tables of numbers; `circuitscope.sweeps` computes them and says what their columns mean.
"""

import math
import textwrap
from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullFormatter
from matplotlib.transforms import ScaledTranslation

from circuitscope.errors import UserError
from circuitscope.viz.labels import legend_below, line_entry, shade_entry
from circuitscope.viz.style import GREY, Sheet, look, pens, plain, written

# Colours that no line has, from light to dark (Tol's muted scheme), for the step of the circuit that is missing.
MISSING = {
    "none": ("both steps formed", "#DDDDDD"),
    "recall": ("recall missing", "#DDCC77"),
    "binding": ("binding missing", "#AA4499"),
    "match": ("the match missing, place unknown", "#88CCEE"),
    "binding and recall": ("both missing", "#332288"),
    "values": ("not even values found", "#222222"),
}
_SIDE_BY_SIDE = 3  # panels, at most
_TITLE = 34  # letters in a line of a panel's title
_METRIC, _WINDOW, _STRIP_ROW = 1.8, 1.2, 0.14  # heights in inches
_DODGE = 0.05  # of the budget, from the point of one line to that of the next
_MOST_TICKS = 4
_EVEN = MaxNLocator(4, integer=True)
_RING: Any = {"marker": "o", "ms": 8, "mfc": "none", "mew": 1.2, "ls": ""}
_NO_ROWS = pd.DataFrame(columns=["panel", "line", "value"])


def sweep(
    trials: pd.DataFrame,
    *,
    title: str,
    x: str,
    value: str,
    log: bool | None = None,
    choices: pd.DataFrame = _NO_ROWS,
    windows: pd.DataFrame = _NO_ROWS,
    budgets: pd.DataFrame = _NO_ROWS,
    threshold: float | None = None,
    level: str = "",
) -> Sheet:
    """Curves over x, with a line for each value of `line` and a panel for each value of `panel`.

    A curve is the mean over seeds, in a band from the lowest to the highest. Below it, where the circuit was measured,
    a strip shows the missing step by colour, in shares of the seeds. Below that is the window of the whole run with its
    interval, and the window by budget. Windows are left out where all of them are 0.

    Args:
        trials: one row per trial: panel, line, x, seed, state, value, missing, chance; see `sweeps.cells.Cells`.
        x: the name of the horizontal axis.
        value: the name of what is drawn.
        log: whether x is on a log scale; by default if the largest value is at least 8 times the smallest.
        choices: panel, line, rate and value of the rates that were chosen on validation.
        windows: panel, line, steps, value, low, high and at_least of the windows on test.
        budgets: the same of windows on validation, at several steps.
        threshold: the level that the windows are of.
        level: what the dotted line is the metric of.
    """
    known = trials[trials["value"].notna()]
    if not len(known):
        raise UserError(f"there is no {value} to draw")
    with look():
        drawing = _Drawing(known, x, value, log, choices, windows, budgets, threshold, level)
        drawing.draw(title)
    return drawing.figure


class _Drawing:
    """Every panel has the metric and, if there are any, the strip of missing steps and the windows below it."""

    def __init__(
        self,
        trials: pd.DataFrame,
        x: str,
        value: str,
        log: bool | None,
        choices: pd.DataFrame,
        windows: pd.DataFrame,
        budgets: pd.DataFrame,
        threshold: float | None,
        level: str,
    ):
        self.level = level
        self.trials, self.x, self.value, self.threshold = trials, x, value, threshold
        self.choices, self.windows, self.budgets = choices, windows, budgets
        self.panels, self.lines = (list(dict.fromkeys(trials[column])) for column in ("panel", "line"))
        self.pens = dict(zip(self.lines, pens(len(self.lines)), strict=True))
        self.values = sorted(set(trials["x"]))
        wide = self.values[0] > 0 and self.values[-1] >= 8 * self.values[0]
        self.log = wide if log is None else log
        self.kept: list[pd.DataFrame] = []
        self.measured = [step for step in MISSING if (trials["missing"] == step).any()]
        self.any_window = bool((pd.concat([windows["value"], budgets["value"]]) > 0).any())
        self.columns = min(len(self.panels), _SIDE_BY_SIDE)
        strip = _STRIP_ROW * len(self.lines) + 0.06
        self.parts = {
            "metric": _METRIC,
            **({"strip": strip} if self.measured else {}),
            **({"window": _WINDOW} if self.any_window else {}),
        }
        rows = -(-len(self.panels) // self.columns)
        height = rows * (sum(self.parts.values()) + 0.35 * len(self.parts)) + 0.3
        self.figure = Sheet(table=self.table, figsize=(8 if self.columns > 2 else 7, height), layout="constrained")
        ratios = list(self.parts.values()) * rows
        self.grid = self.figure.add_gridspec(len(ratios), self.columns, height_ratios=ratios)

    def table(self) -> pd.DataFrame:
        """Every point that was drawn: what of, panel, line, x, value, low, high, seeds, at_least."""
        columns = ["curve", "panel", "line", "x", "value", "low", "high", "seeds", "at_least"]
        return pd.concat(self.kept, ignore_index=True).reindex(columns=columns)

    def draw(self, title: str) -> None:
        for number, panel in enumerate(self.panels):
            row, column = divmod(number, self.columns)
            axes: dict[str, Axes] = {}
            for i, part in enumerate(self.parts):
                above = axes.get("metric") if part == "strip" else None
                axes[part] = self.figure.add_subplot(self.grid[row * len(self.parts) + i, column], sharex=above)
            self._metric(axes["metric"], panel)
            if "strip" in axes:
                self._strip(axes["strip"], panel)
                axes["metric"].tick_params(labelbottom=False)
            axes["strip" if "strip" in axes else "metric"].set_xlabel(self.x)
            if "window" in axes:
                self._window(axes["window"], panel)
            axes["metric"].set_title("\n".join(map(written, textwrap.wrap(panel, _TITLE))), loc="left")
            if column == 0:
                axes["metric"].set_ylabel(self.value)
                if "strip" in axes:
                    axes["strip"].set_ylabel("circuit", rotation=0, ha="right", va="center", labelpad=13)
                if "window" in axes:
                    axes["window"].set_ylabel(f"window: decades\nat {self.threshold:g} or more")
        self.figure.suptitle(written(title), x=0.01, ha="left")
        legend_below(self.figure, list(self._legend()))

    def _of(self, table: pd.DataFrame, panel: str) -> Iterator[tuple[int, str, pd.DataFrame, str, str]]:
        """The rows of each line in a panel, with its number, colour and style."""
        for i, (line, (colour, style)) in enumerate(self.pens.items()):
            rows = table[(table["panel"] == panel) & (table["line"] == line)]
            if len(rows):
                yield i, line, rows, colour, style

    def _keep(self, curve: str, panel: str, line: str, rows: pd.DataFrame) -> None:
        self.kept.append(rows.assign(curve=curve, panel=panel, line=line))

    def _metric(self, axes: Axes, panel: str) -> None:
        for i, line, rows, colour, style in self._of(self.trials, panel):
            by_x = rows.groupby("x")["value"].agg(["mean", "min", "max", "count"]).reset_index()
            axes.plot(by_x["x"], by_x["mean"], color=colour, ls=style, lw=1.5, marker="o", ms=3, label=written(line))
            axes.fill_between(by_x["x"], by_x["min"], by_x["max"], color=colour, alpha=0.2, lw=0)
            drawn = by_x.rename(columns={"mean": "value", "min": "low", "max": "high", "count": "seeds"})
            self._keep(self.value, panel, line, drawn)
            lost = rows[rows["state"] == "diverged"]
            aside = ScaledTranslation((i - (len(self.lines) - 1) / 2) * 4 / 72, 0, self.figure.dpi_scale_trans)
            look: Any = {"marker": "x", "ms": 5, "mew": 1.3, "ls": "", "zorder": 5, "clip_on": False}
            if len(lost):
                axes.plot(lost["x"], lost["value"], color=colour, transform=axes.transData + aside, **look)
        for _, line, rows, colour, _ in self._of(self.choices, panel):
            axes.plot(rows["rate"], rows["value"], color=colour, zorder=4, clip_on=False, **_RING)
            self._keep("chosen on validation", panel, line, rows.rename(columns={"rate": "x"}))
        for level in sorted(set(self.trials[self.trials["panel"] == panel]["chance"].dropna())):
            axes.axhline(level, color=GREY, ls=":", lw=1)
        if self.threshold is not None:
            axes.axhline(self.threshold, color=GREY, ls="--", lw=0.8)
        plain(axes)
        self._scale(axes)
        if "accuracy" in self.value:
            axes.set_ylim(-0.03, 1.03)

    def _scale(self, axes: Axes) -> None:
        """The horizontal axis: ticks at the values of the grid, some of them with their number."""
        if self.log:
            axes.set_xscale("log")
        every = -(-(len(self.values) - 1) // (_MOST_TICKS - 1)) or 1
        powers = [v for v in self.values if self.log and math.isclose(math.log10(v) % 1, 0, abs_tol=1e-6)]
        named = powers if 1 < len(powers) <= _MOST_TICKS + 1 else self.values[::every]
        axes.xaxis.set_major_locator(FixedLocator(named))
        axes.xaxis.set_minor_locator(FixedLocator(self.values))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: _short(x) if self.log else f"{x:g}"))
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.set_xlim(self._aside(self.values[0], -0.7), self._aside(self.values[-1], 0.7))

    def _aside(self, x: float, steps: float) -> float:
        """The place that lies some of the grid's smallest steps beside x."""
        places = [math.log10(v) if self.log else v for v in self.values]
        gap = min((right - left for left, right in pairwise(places)), default=1.0)
        return x * 10 ** (steps * gap) if self.log else x + steps * gap

    def _strip(self, axes: Axes, panel: str) -> None:
        """For each line a row, for each value of x a column of the seeds, coloured by the step that is missing."""
        for i, line, rows, colour, style in self._of(self.trials, panel):
            for at, seeds in rows.groupby("x"):
                x, bottom = float(str(at)), i + 0.1
                left, right = self._aside(x, -0.38), self._aside(x, 0.38)
                for step in self.measured:
                    share = float((seeds["missing"] == step).sum() / len(seeds))
                    if share:
                        height = share * 0.8
                        axes.bar(left, height, right - left, bottom, align="edge", color=MISSING[step][1], lw=0)
                        drawn = pd.DataFrame({"x": [x], "value": [share], "seeds": [len(seeds)]})
                        self._keep(MISSING[step][0], panel, line, drawn)
                        bottom += height
            if len(self.lines) > 1:
                beside, dash = axes.get_yaxis_transform(), [-0.006 - 0.008 * self.columns, -0.003 * self.columns]
                axes.plot(dash, [i + 0.5] * 2, transform=beside, color=colour, ls=style, lw=2, clip_on=False)
        axes.set_ylim(len(self.lines), 0)
        axes.set_yticks([])
        axes.spines[["left", "right", "top"]].set_visible(False)

    def _window(self, axes: Axes, panel: str) -> None:
        for _, line, rows, colour, style in self._of(self.budgets, panel):
            axes.plot(rows["steps"], rows["value"], color=colour, ls=style, lw=1.2)
            _windows(axes, rows["steps"], rows, colour, 3.0)
            axes.fill_between(rows["steps"].astype(float), rows["low"], rows["high"], color=colour, alpha=0.15, lw=0)
            self._keep("window on validation", panel, line, rows.rename(columns={"steps": "x"}))
        here = self.windows[self.windows["panel"] == panel]
        longest = float((here if len(here) else self.windows)["steps"].max())
        for i, line, rows, colour, _ in self._of(self.windows, panel):
            aside = rows["steps"] * (1 + _DODGE * (i + 1)) if len(self.budgets) else rows["steps"] * 0 + i
            _windows(axes, aside, rows, colour, 4.5)
            bars = rows[rows["low"].notna()]
            axes.vlines(aside[bars.index], bars["low"], bars["high"], color=colour, lw=1.2)
            self._keep("window on test", panel, line, rows.rename(columns={"steps": "x"}))
        plain(axes)
        if len(self.budgets):
            axes.set_xlabel("training steps")
            axes.set_xlim(0, longest * (1 + _DODGE * (len(self.lines) + 1)))
            axes.xaxis.set_major_locator(FixedLocator([t for t in _EVEN.tick_values(0, longest) if t <= longest]))
            axes.axvspan(longest, axes.get_xlim()[1], color=GREY, alpha=0.1, lw=0)
        else:
            axes.set_xlabel(f"after {longest:.0f} training steps")
            axes.set_xlim(-1, len(self.lines))
            axes.set_xticks([])
        both = pd.concat([table[["value", "high"]] for table in (self.windows, self.budgets) if len(table)])
        highest = max(float(both[column].max()) for column in both)
        axes.set_ylim(-0.04 * highest, 1.08 * highest)

    def _legend(self) -> Iterable[Any]:
        for line, (colour, style) in self.pens.items() if len(self.lines) > 1 or self.lines[0] else ():
            yield line_entry(line, colour, ls=style, marker="o", ms=3)
        seeds = int(self.trials.groupby(["panel", "line", "x"]).size().max())
        if seeds > 1:
            yield shade_entry(f"band: lowest to highest of {seeds} seeds")
        if len(self.choices):
            yield Line2D([], [], color=GREY, label="rate chosen on validation", **_RING)
        if (self.trials["state"] == "diverged").any():
            yield Line2D([], [], color=GREY, marker="x", ls="", mew=1.3, ms=5, label="diverged: counts as 0")
        if self.threshold is not None:
            word = "" if (self.trials["value"] >= self.threshold).any() else ", reached by no trial"
            yield line_entry(f"{self.threshold:g}{word}", GREY, ls="--", lw=0.8)
        if self.trials["chance"].notna().any():
            yield line_entry(self.level, GREY, ls=":", lw=1)
        for step in self.measured:
            yield Patch(color=MISSING[step][1], lw=0, label=MISSING[step][0])
        if self.any_window:
            yield from self._legend_of_windows()

    def _legend_of_windows(self) -> Iterable[Any]:
        yield Line2D([], [], color=GREY, marker="o", ms=4.5, lw=0, label="window on test")
        if self.windows["low"].notna().any():
            yield Line2D([], [], color=GREY, lw=1.2, label="bar, band of windows: 95% interval")
        if len(self.budgets):
            yield line_entry("window of shorter runs, on validation", GREY, marker="o", ms=3, lw=1.2)
        if pd.concat([self.windows["at_least"], self.budgets.get("at_least", pd.Series())]).any():
            yield Line2D([], [], color=GREY, marker="^", ms=5, ls="", label="at least: at an end of the grid")


def _short(x: float) -> str:
    """A number for a tick of a log scale: 64, 2.2e-3."""
    digits, _, power = f"{x:.1e}".partition("e")
    return f"{x:g}" if 1 <= x < 1e5 else f"{digits.removesuffix('.0')}e{int(power)}"


def _windows(axes: Axes, x: pd.Series, rows: pd.DataFrame, colour: str, size: float) -> None:
    """Points at windows: a triangle upwards where the true window is at least as wide."""
    for marker, chosen in (("^", rows["at_least"].astype(bool)), ("o", ~rows["at_least"].astype(bool))):
        axes.plot(x[chosen], rows["value"][chosen], marker=marker, ms=size, ls="", color=colour)
