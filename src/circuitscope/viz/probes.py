"""The figure of a probe: its accuracy beside that of its control and chance, by hook and role and over training.

Where the control is as good as the probe, the probe's point has a ring.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from circuitscope.analysis.probes.control import no_better
from circuitscope.errors import UserError
from circuitscope.tasks import Role
from circuitscope.viz.labels import legend_below, line_entry, name_levels, shade_entry
from circuitscope.viz.step_axis import Bump, Bumps, StepAxis
from circuitscope.viz.style import COLOURS, GREY, STYLES, Sheet, look, plain, written

_COLUMNS = ["run", "step", "layer", "hook", "role", "accuracy", "low", "high", "control", "selectivity", "chance"]
_MARKERS = ("o", "s", "^", "D", "v", "P", "X")
_RING = "_no better than its control"
_PALE: Any = {"lw": 0.9, "alpha": 0.45, "ms": 2.5}  # the control
_RINGS: Any = {"marker": "o", "ms": 6, "mfc": "none", "mew": 0.8}
_EVERY_STEP = StepAxis()


def probes(frame: pd.DataFrame, *, bump: Bumps = None, axis: StepAxis = _EVERY_STEP) -> Sheet:
    """Accuracy with its 95% interval, the accuracy of the control pale beside it, chance as a dotted line.

    Of one run: by hook at the last checkpoint on the left, over steps on the right, selectivity below. Of several runs:
    a panel each, over steps. Line styles and markers show hooks; colours show roles or, where there is one role, hooks
    too. A run with one checkpoint is drawn by hook alone.

    Args:
        frame: rows of one probe, as `analysis.probes.probe` gives them, of one run or of several.
        bump: the first and last step of a stretch to shade; of several runs by the name of the run.
        axis: which steps are drawn, and whether on a log scale.
    """
    if not len(frame):
        raise UserError("there are no results of a probe to draw")
    runs = list(dict.fromkeys(frame["run"])) if "run" in frame else [""]
    bumps = bump if isinstance(bump, Mapping) else dict.fromkeys(runs, bump)
    drawing = _Drawing(frame, axis)
    with look():
        if len(runs) == 1:
            drawing.one_run(bumps.get(runs[0]))
        else:
            drawing.several_runs({run: frame[frame["run"] == run] for run in runs}, bumps)
        drawing.finish()
    return drawing.figure


class _Drawing:
    """Panels of one probe, with the same colours, styles and markers in all of them."""

    figure: Sheet

    def __init__(self, frame: pd.DataFrame, axis: StepAxis):
        self.frame, self.axis = frame, axis
        self.hooks = list(dict.fromkeys(frame["hook"]))
        roles = list(dict.fromkeys(frame["role"]))
        self.colours = dict(zip(roles, _colours(roles), strict=True))
        self.metric = "R²" if (frame["metric"] == "r2").all() else "accuracy"
        self.over_steps: list[Axes] = []
        self.shaded = False

    def one_run(self, bump: Bump | None) -> None:
        steps = sorted(self.frame["step"].unique())
        several = len(steps) > 1
        last = self.frame[self.frame["step"] == steps[-1]]
        self._sheet(7.5 if several else 4.5, 4.2)
        grid = self.figure.subplots(2, 2 if several else 1, squeeze=False, sharey="row")
        for row, column in enumerate(("accuracy", "selectivity")):
            self._by_hook(grid[row, 0], last, column, named=row == 1)
            if several:
                self._by_step(grid[row, 1], self.frame, column, bump)
                grid[row, 1].set_xlabel(self.axis.label if row else "")
        self._limits(grid[0, 0])
        for axes in grid[0, :-1]:
            self._chance(axes, self.frame, named=False)
        self._chance(grid[0, -1], self.frame, named=True)
        grid[0, 0].set(ylabel=f"probe {self.metric}", title=f"step {steps[-1]}")
        grid[1, 0].set(ylabel=f"selectivity\n({self.metric} minus control)")
        if several:
            grid[0, 1].set_title("over training")

    def several_runs(self, runs: Mapping[str, pd.DataFrame], bumps: Mapping[str, Bump | None]) -> None:
        columns = min(len(runs), 3)
        lines = -(-len(runs) // columns)
        self._sheet(max(2.7 * columns, 5.5), 2.2 * lines + 0.3)
        grid = self.figure.subplots(lines, columns, squeeze=False, sharey=True).ravel()
        for n, ((run, rows), axes) in enumerate(zip(runs.items(), grid, strict=False)):
            if rows["step"].nunique() > 1:
                self._by_step(axes, rows, "accuracy", bumps.get(run))
                axes.set_xlabel(self.axis.label if n + columns >= len(runs) else "")
            else:
                self._by_hook(axes, rows, "accuracy", named=True)
            axes.set_title(written(run))
            axes.set_ylabel("" if n % columns else f"probe {self.metric}")
        self._limits(grid[0])
        for rows, axes in zip(runs.values(), grid, strict=False):
            self._chance(axes, rows, named=True)
        for axes in grid[len(runs) :]:
            axes.set_visible(False)

    def finish(self) -> None:
        """The step axis, the title and the legend."""
        if self.over_steps:
            self.axis.apply(self.over_steps)
        for axes in self.figure.axes:
            plain(axes)
        run = f"{self.frame['run'].iloc[0]}: " if "run" in self.frame and self.frame["run"].nunique() == 1 else ""
        at = f", read at the role {next(iter(self.colours))}" if len(self.colours) == 1 else ""
        self.figure.suptitle(written(f"{run}probe {self.frame['probe'].iloc[0]}{at}"), x=0.01, ha="left")
        legend_below(self.figure, list(self._legend()))

    def _sheet(self, width: float, height: float) -> None:
        frame = self.frame
        self.figure = Sheet(
            table=lambda: frame[_COLUMNS].reset_index(drop=True), figsize=(width, height), layout="constrained"
        )

    def _by_hook(self, axes: Axes, rows: pd.DataFrame, column: str, *, named: bool) -> None:
        hooks = [hook for hook in self.hooks if (rows["hook"] == hook).any()]
        for role, colour in self.colours.items():
            of = rows[rows["role"] == role].set_index("hook").reindex(hooks)
            _curve(axes, list(range(len(hooks))), of, column, role, color=colour, ls="-", marker="o")
        texts = [short_name(hook) for hook in hooks] if named else []
        crowded = sum(map(len, texts)) > 45
        axes.set_xticks(range(len(hooks)), texts, rotation=35 if crowded else 0, ha="right" if crowded else "center")
        axes.margins(x=0.15)

    def _by_step(self, axes: Axes, rows: pd.DataFrame, column: str, bump: Bump | None) -> None:
        for role, colour in self.colours.items():
            for hook, line in self._lines().items():
                of = rows[(rows["role"] == role) & (rows["hook"] == hook)].sort_values("step")
                if len(of):
                    label = f"{role}, {short_name(hook)}"
                    _curve(axes, list(of["step"]), of, column, label, **{"color": colour, **line})
        if bump is not None:
            axes.axvspan(*bump, color=GREY, alpha=0.18, lw=0, zorder=0)
            self.shaded = True
        self.over_steps.append(axes)

    def _lines(self) -> dict[str, dict[str, str]]:
        """Line style and marker of every hook; its colour too where colours need not show roles."""
        styles = {
            hook: {"ls": STYLES[i % len(STYLES)], "marker": _MARKERS[i % len(_MARKERS)]}
            for i, hook in enumerate(self.hooks)
        }
        if len(self.colours) == 1:
            for line, colour in zip(styles.values(), COLOURS * len(styles), strict=False):
                line["color"] = colour
        return styles

    def _limits(self, axes: Axes) -> None:
        if self.metric == "accuracy":
            axes.set_ylim(-0.02, 1.02)

    def _chance(self, axes: Axes, rows: pd.DataFrame, *, named: bool) -> None:
        levels = sorted({round(float(c), 3) for c in rows["chance"].dropna()})
        if named:
            name_levels(axes, "chance", dict.fromkeys(levels, GREY))
        else:
            for level in levels:
                axes.axhline(level, color=GREY, ls=":", lw=1)

    def _legend(self) -> Iterable[Any]:
        if len(self.colours) > 1 or not self.over_steps:
            for role, colour in self.colours.items():
                yield line_entry(f"at {role}", colour, lw=1.4)
        for hook, line in self._lines().items() if self.over_steps else ():
            yield line_entry(short_name(hook), line.pop("color", GREY), lw=1.4, ms=3, **line)
        if self.frame["control"].notna().any():
            yield line_entry("pale: control", GREY, **_PALE)
        if any(line.get_label() == _RING for axes in self.figure.axes for line in axes.lines):
            yield line_entry("ring: no better than its control", "black", ls="", **_RINGS)
        if self.shaded:
            yield shade_entry("loss bump")
        yield shade_entry("bands: 95% interval", COLOURS[0])


def short_name(hook: str) -> str:
    """`blocks.0.hook_resid_post` as `L0 resid_post`."""
    parts = hook.replace("blocks.", "L", 1).replace("hook_", "").split(".")
    return " ".join(part for part in parts if part != "mixer")


def _colours(roles: Sequence[str]) -> list[str]:
    known = {role.name: role.colour for role in Role}
    return [known.get(role, COLOURS[i % len(COLOURS)]) for i, role in enumerate(roles)]


def _curve(axes: Axes, x: Sequence[float], rows: pd.DataFrame, column: str, label: str, **line: Any) -> None:
    axes.plot(x, rows[column].astype(float), lw=1.4, ms=2.5, label=label, **line)
    if column == "accuracy":
        low, high = (rows[name].astype(float) for name in ("low", "high"))
        axes.fill_between(x, low, high, color=line["color"], alpha=0.2, lw=0)
        if rows["control"].notna().any():
            axes.plot(x, rows["control"].astype(float), label=f"_{label}, control", **line, **_PALE)
    worthless = no_better(rows).to_numpy()
    if worthless.any():
        at, height = np.asarray(x, float)[worthless], rows[column].to_numpy(float)[worthless]
        axes.plot(at, height, color="black", ls="", label=_RING, **_RINGS)
