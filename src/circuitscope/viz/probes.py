"""The figure of a probe: its accuracy by hook and role at the last checkpoint, and over training steps."""

from collections.abc import Sequence

import pandas as pd
from matplotlib.axes import Axes

from circuitscope.errors import UserError
from circuitscope.tasks import Role
from circuitscope.viz.style import COLOURS, GREY, STYLES, Sheet, look, plain, written

_COLUMNS = ["run", "step", "layer", "hook", "role", "accuracy", "low", "high", "control", "selectivity", "chance"]


def probes(frame: pd.DataFrame, *, bump: tuple[float, float] | None = None) -> Sheet:
    """Accuracy with its 95% interval above, selectivity below; by hook on the left, over steps on the right.

    Colours show roles, line styles show hooks, dotted lines show chance. With one checkpoint there is no right side.

    Args:
        frame: rows of one probe, as `analysis.probes.probe` gives them.
        bump: the first and last step of a stretch to shade.
    """
    if not len(frame):
        raise UserError("there are no results of a probe to draw")
    hooks, roles = list(dict.fromkeys(frame["hook"])), list(dict.fromkeys(frame["role"]))
    steps = sorted(frame["step"].unique())
    last = frame[frame["step"] == steps[-1]]
    several = len(steps) > 1
    with look():
        figure = Sheet(
            table=lambda: frame[_COLUMNS].reset_index(drop=True),
            figsize=(10 if several else 5.5, 5),
            layout="constrained",
        )
        grid = figure.subplots(2, 2 if several else 1, squeeze=False, sharey="row")
        for row, column in enumerate(("accuracy", "selectivity")):
            for role, colour in zip(roles, _colours(roles), strict=True):
                rows = last[last["role"] == role].set_index("hook").reindex(hooks)
                _curve(grid[row, 0], list(range(len(hooks))), rows, column, colour, "-", role)
                for hook, style in zip(hooks, STYLES * len(hooks), strict=False):
                    rows = frame[(frame["role"] == role) & (frame["hook"] == hook)].sort_values("step")
                    if several:
                        _curve(grid[row, 1], list(rows["step"]), rows, column, colour, style, _label(role, hook))
            grid[row, 0].set_xticks(range(len(hooks)), [short_name(h) for h in hooks] if row else [])
            grid[row, 0].margins(x=0.15)
        for axes in grid[0]:
            for chance in sorted({round(float(c), 3) for c in frame["chance"].dropna()}):
                axes.axhline(chance, color=GREY, ls=":", lw=1)
        for axes in grid[:, 1:].ravel():
            axes.set_xlabel("step" if axes is grid[1, -1] else "")
            if bump is not None:
                axes.axvspan(*bump, color="0.92", lw=0, zorder=0)
        metric = "R²" if (frame["metric"] == "r2").all() else "accuracy"
        grid[0, 0].set(ylabel=f"probe {metric}", title=f"step {steps[-1]}")
        grid[1, 0].set(ylabel="selectivity")
        if metric == "accuracy":
            grid[0, 0].set_ylim(-0.02, 1.02)
        for axes in grid.ravel():
            plain(axes)
        figure.legend(*grid[0, -1].get_legend_handles_labels(), loc="outside right upper", frameon=False)
        run = f"{written(frame['run'].iloc[0])}: " if "run" in frame else ""
        figure.suptitle(f"{run}{frame['probe'].iloc[0]}", x=0.01, ha="left")
    return figure


def short_name(hook: str) -> str:
    """`blocks.0.hook_resid_post` as `L0 resid_post`."""
    parts = hook.replace("blocks.", "L", 1).replace("hook_", "").split(".")
    return " ".join(part for part in parts if part != "mixer")


def _label(role: str, hook: str) -> str:
    return f"{role}, {short_name(hook)}"


def _colours(roles: Sequence[str]) -> list[str]:
    known = {role.name: role.colour for role in Role}
    return [known.get(role, COLOURS[i % len(COLOURS)]) for i, role in enumerate(roles)]


def _curve(
    axes: Axes, x: Sequence[float], rows: pd.DataFrame, column: str, colour: str, style: str, label: str
) -> None:
    axes.plot(x, rows[column].astype(float), color=colour, ls=style, lw=1.4, marker="o", ms=2.5, label=label)
    if column == "accuracy":
        axes.fill_between(x, rows["low"].astype(float), rows["high"].astype(float), color=colour, alpha=0.2, lw=0)
