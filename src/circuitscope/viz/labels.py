"""What figures of curves say outside their panels: one legend below, and names of levels and curves to the right."""

from collections.abc import Iterable, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from circuitscope.viz.style import GREY, Sheet, written

_LINE = 8.5  # points from one name to the next below it


def legend_below(figure: Sheet, handles: Sequence[Any]) -> None:
    """One legend for the whole figure below its panels, in as many columns as fit; the figure grows by its height."""
    for rows in range(1, len(handles) + 1):
        columns = -(-len(handles) // rows)
        legend = figure.legend(
            handles=handles,
            loc="outside lower left",
            ncols=columns,
            frameon=False,
            borderpad=0.2,
            borderaxespad=0.2,
            columnspacing=1.4,
            handlelength=1.8,
        )
        size = legend.get_window_extent()
        if columns == 1 or size.width <= figure.bbox.width:
            figure.set_figheight(figure.get_figheight() + size.height / figure.dpi)
            return
        legend.remove()


def line_entry(label: str, colour: str, **line: Any) -> Line2D:
    """A legend entry of a line."""
    return Line2D([], [], color=colour, label=written(label), **{"lw": 1.8, **line})


def shade_entry(label: str, colour: str = GREY) -> Patch:
    """A legend entry of a band or a shaded stretch."""
    return Patch(color=colour, alpha=0.25, lw=0, label=written(label))


def names_beside(axes: Axes, names: Iterable[tuple[str, str]]) -> None:
    """Names in their colours, one below the other, to the right of a panel."""
    for i, (name, colour) in enumerate(names):
        axes.annotate(
            written(name),
            (1, 1),
            xycoords="axes fraction",
            xytext=(3, -_LINE * i),
            textcoords="offset points",
            color=colour,
            fontsize=6.5,
            va="top",
            annotation_clip=False,
        )


def name_levels(axes: Axes, word: str, levels: dict[float, str]) -> None:
    """Dotted lines across a panel at these heights, in these colours, with their names to the right of it.

    Levels too close to each other for a name each have one name together. Call it when the vertical range is set.
    """
    low, high = axes.get_ylim()
    points = axes.get_window_extent().height / axes.figure.dpi * 72
    room = 9 * (1 + word.count("\n")) / points * (high - low)
    together: list[list[float]] = []
    for level in sorted(levels):
        axes.axhline(level, color=levels[level], ls=":", lw=1)
        if together and level - together[-1][-1] < room:
            together[-1].append(level)
        else:
            together.append([level])
    for near in together:
        axes.annotate(
            f"{word} {', '.join(f'{level:.3g}' for level in near)}",
            (1, sum(near) / len(near)),
            xycoords=axes.get_yaxis_transform(),
            xytext=(3, 0),
            textcoords="offset points",
            color=levels[near[0]] if len(near) == 1 else GREY,
            fontsize=7,
            va="center",
            annotation_clip=False,
        )
