"""The evidence for a claim: each criterion of a study with its bound, and the value of every seed in every cell."""

import math
import textwrap

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from circuitscope.errors import UserError
from circuitscope.viz.labels import legend_below, line_entry, shade_entry
from circuitscope.viz.style import GREY, Sheet, look, plain, written

OUTCOMES = {  # by outcome of a cell: colour, and word in the legend
    "holds": ("#009E73", "holds"),
    "fails": ("#D55E00", "fails"),
    "open": ("#E69F00", "open"),
}
_ROW, _TITLE, _SPARE = 0.17, 0.34, 0.3  # heights in inches: of a cell, of a criterion's title, of its axis
_WIDTH = 8.0
_LETTERS, _TITLE_LETTERS, _LABEL = 84, 104, 80  # in a line of a criterion, of the title, and of a cell's name


def evidence(cells: pd.DataFrame, *, title: str) -> Sheet:
    """A panel for each criterion, a row for each of its cells, a point for each seed; what passes is shaded.

    Cells without any value are left out. A value that is infinite (a step that was never reached) stands at the edge as
    an arrow.

    Args:
        cells: one row per criterion, cell and seed: criterion, words, cell, value, of, outcome, low, high. Low and high
            are the ends of what passes, of which one may be infinite; `of` names the axis of the values. See
            `studies.verdict.evidence`.
    """
    known = cells[cells["value"].notna()]
    if not len(known):
        raise UserError("there is nothing to draw: no trial that a criterion reads is done")
    names = list(dict.fromkeys(known["criterion"]))
    rows = [known[known["criterion"] == name]["cell"].nunique() for name in names]
    heights = [_ROW * count + _TITLE + _SPARE for count in rows]
    with look():
        figure = Sheet(table=known.reset_index, figsize=(_WIDTH, sum(heights) + 0.3), layout="constrained")
        grid = figure.add_gridspec(len(names), 1, height_ratios=heights)
        for i, name in enumerate(names):
            _panel(figure.add_subplot(grid[i]), known[known["criterion"] == name])
        figure.suptitle("\n".join(map(written, textwrap.wrap(title, _TITLE_LETTERS))), x=0.01, ha="left")
        there = [kind for kind in OUTCOMES if (known["outcome"] == kind).any()]
        points = [Line2D([], [], color=OUTCOMES[k][0], marker="o", ms=4, ls="", label=OUTCOMES[k][1]) for k in there]
        legend_below(figure, [*points, shade_entry("passes"), line_entry("bound", GREY, ls="--", lw=0.8)])
    return figure


def _panel(axes: Axes, rows: pd.DataFrame) -> None:
    cells = list(dict.fromkeys(rows["cell"]))
    low, high = float(rows["low"].iloc[0]), float(rows["high"].iloc[0])
    bounds = [bound for bound in (low, high) if math.isfinite(bound)]
    finite = [value for value in rows["value"] if math.isfinite(value)]
    left, right = min([*finite, *bounds]), max([*finite, *bounds])
    room = (right - left) * 0.08 or max(abs(right) * 0.2, 0.02)
    left, right = left - room, right + room
    axes.set_xlim(left, right)
    axes.axvspan(max(low, left), min(high, right), color=GREY, alpha=0.12, lw=0)
    for bound in bounds:
        axes.axvline(bound, color=GREY, ls="--", lw=0.8)
    for at, cell in enumerate(cells):
        of_cell = rows[rows["cell"] == cell]
        colour = OUTCOMES[str(of_cell["outcome"].iloc[0])][0]
        for value in of_cell["value"]:
            _point(axes, float(value), at, colour, left, right)
    axes.set_ylim(len(cells) - 0.4, -0.6)
    axes.set_yticks(range(len(cells)), [written(textwrap.shorten(cell, _LABEL, placeholder=" …")) for cell in cells])
    axes.tick_params(axis="y", length=0, labelsize=6)
    axes.xaxis.set_major_locator(MaxNLocator(6))
    axes.set_xlabel(written(str(rows["of"].iloc[0])), fontsize=7)
    plain(axes)
    axes.set_title("\n".join(map(written, textwrap.wrap(str(rows["words"].iloc[0]), _LETTERS))), loc="left", fontsize=7)


def _point(axes: Axes, value: float, row: int, colour: str, left: float, right: float) -> None:
    if math.isfinite(value):
        axes.plot(value, row, "o", color=colour, ms=4, mec="white", mew=0.4)
        return
    edge = right if value > 0 else left
    axes.plot(edge, row, ">" if value > 0 else "<", color=colour, ms=5, clip_on=False)
