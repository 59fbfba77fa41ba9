"""The axis of training steps: which steps the figures of curves show, evenly or on a log scale, and the loss bumps."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import Normalize, SymLogNorm
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullFormatter

from circuitscope.errors import UserError
from circuitscope.viz.labels import shade_entry
from circuitscope.viz.style import GREY, written

Bump = tuple[float, float]  # its first and its last step
Bumps = Bump | Mapping[str, Bump | None] | None  # of one run, or by the name of the run

_MOST_TICKS = 8  # on a log scale
_BAR = 0.025  # height of a bar that marks a loss bump, as a share of the panel
_FIRST_STRETCH = 0.5  # from step 0 to the first step after it, in decades of the log scale

Array = np.ndarray[Any, np.dtype[np.float64]]


@dataclass(frozen=True)
class StepAxis:
    """Steps from `first` to `last`, by default all; `log` gives the early steps more room.

    Step 0 has no logarithm: on a log scale the stretch from 0 to the first step after it is drawn evenly.
    """

    log: bool = False
    first: int | None = None
    last: int | None = None

    def __post_init__(self) -> None:
        for name, step in (("first", self.first), ("last", self.last)):
            if step is not None and step < 0:
                raise UserError(f"the {name} step to draw must be 0 or more, got {step}")
        if self.first is not None and self.last is not None and self.first >= self.last:
            raise UserError(f"the first step to draw must be below the last, got {self.first} and {self.last}")

    @property
    def label(self) -> str:
        return "step (log scale)" if self.log else "step"

    def within(self, steps: Iterable[float]) -> list[int]:
        """The steps that are drawn, in order; an error where none is."""
        known = sorted({int(s) for s in steps})
        found = [s for s in known if (self.first or 0) <= s and (self.last is None or s <= self.last)]
        if known and not found:
            span = f"from step {self.first or 0}" + ("" if self.last is None else f" to {self.last}")
            raise UserError(f"there is nothing to draw {span}: the steps are {known[0]} to {known[-1]}")
        return found

    def colours(self, steps: Sequence[float]) -> Normalize:
        """The range of a colour map over steps."""
        low, high = float(min(steps)), float(max(max(steps), min(steps) + 1))
        if self.log:
            return SymLogNorm(_after_zero(steps), linscale=_FIRST_STRETCH, vmin=low, vmax=high, base=10)
        return Normalize(low, high)

    def apply(self, panels: Sequence[Axes]) -> None:
        """Gives panels that hold curves the same steps, and heights that fit what is left to see.

        Panels whose vertical range was set before keep it.
        """
        steps = np.concatenate([x for axes in panels for x, _ in _curves(axes)] or [np.zeros(1)])
        drawn = self.within(steps)
        low = float(drawn[0] if self.first is None else self.first)
        high = float(drawn[-1] if self.last is None else self.last)
        for axes in panels:
            if self.log:
                _log_scale(axes, low, max(high, low + 1), _after_zero(steps))
            else:
                margin = 0.02 * max(high - low, 1.0)
                left, right = (margin if given is None else 0.0 for given in (self.first, self.last))
                axes.set_xlim(low - left, high + right)
            if (self.first, self.last) != (None, None) and axes.get_autoscaley_on() and axes.get_yscale() == "linear":
                _fit_height(axes, low, high)


def mark_bumps(panels: Sequence[Axes], bumps: Bumps, colours: Mapping[str, str]) -> list[Any]:
    """Shades the loss bump of one run behind the panels, or puts bars of several runs' colours on top of them.

    Gives the legend entries. Where a run has no bump, nothing is marked.

    Args:
        colours: the colour of each run that is drawn, by its name.
    """
    by_run = bumps if isinstance(bumps, Mapping) else dict.fromkeys(colours, bumps)
    found = {name: bump for name in colours if (bump := by_run.get(name)) is not None}
    if not found:
        return []
    if len(colours) == 1:
        ((first, last),) = found.values()
        for axes in panels:
            axes.axvspan(first, last, color=GREY, alpha=0.18, lw=0, zorder=0)
        return [shade_entry(f"loss bump, steps {first:.0f} to {last:.0f}")]
    for row, (name, (first, last)) in enumerate(found.items()):
        top = 1 - _BAR * row
        for axes in panels:
            axes.axvspan(first, last, top - 0.8 * _BAR, top, color=colours[name], lw=0, label=f"_{written(name)}")
    return [shade_entry("bars on top: loss bumps")]


def _after_zero(steps: Iterable[float]) -> float:
    return float(min((s for s in steps if s > 0), default=1))


def _curves(axes: Axes) -> Iterator[tuple[Array, Array]]:
    """x and y of every line that is drawn over steps; a level that crosses the whole panel is none."""
    for line in axes.lines:
        if line.get_transform() == axes.transData:
            yield np.asarray(line.get_xdata(), float), np.asarray(line.get_ydata(), float)


def _log_scale(axes: Axes, low: float, high: float, threshold: float) -> None:
    if low <= 0:
        axes.set_xscale("symlog", linthresh=threshold, linscale=_FIRST_STRETCH)
        axes.set_xlim(-0.1 * threshold, high * 1.05)
    else:
        axes.set_xscale("log")
        axes.set_xlim(low / 1.02, high * 1.02)
    for multiples in ((1, 2, 5), (1, 3), (1,)):
        ticks = _multiples(multiples, max(low, threshold), high)
        if len(ticks) <= _MOST_TICKS:
            break
    zero = [0.0] if low <= 0 else []
    axes.xaxis.set_major_locator(FixedLocator(zero + ticks) if len(ticks) > 2 else MaxNLocator(6, integer=True))
    axes.xaxis.set_minor_locator(FixedLocator(_multiples(range(1, 10), max(low, threshold), high)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:.0f}"))
    axes.xaxis.set_minor_formatter(NullFormatter())


def _multiples(of: Iterable[int], low: float, high: float) -> list[float]:
    """Multiples of powers of ten from low to high."""
    decades = range(int(np.floor(np.log10(low))), int(np.ceil(np.log10(high))) + 1)
    return sorted(m * 10.0**e for e in decades for m in of if low <= m * 10.0**e <= high)


def _fit_height(axes: Axes, low: float, high: float) -> None:
    seen: list[Array] = []
    for x, y in _curves(axes):
        if len(x):
            edges = [e for e in (low, high) if x[0] <= e <= x[-1]]
            seen += [y[(low <= x) & (x <= high)], np.interp(edges, x, y)]
    for band in axes.collections:
        points = np.concatenate([np.asarray(path.vertices, float) for path in band.get_paths()])
        seen.append(points[(low <= points[:, 0]) & (points[:, 0] <= high), 1])
    found = np.concatenate(seen or [np.zeros(0)])
    found = found[np.isfinite(found)]
    if len(found):
        margin = 0.05 * (found.max() - found.min()) or 0.5
        axes.set_ylim(found.min() - margin, found.max() + margin)
