"""Marks on a heatmap: edges pointed at by an outline of their cell, of one shape and colour for each set of edges."""

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patheffects import withStroke

from circuitscope.errors import UserError

Edges = tuple[Sequence[int], Sequence[int]]  # destinations and sources
_LOOKS = (("s", "#FFFFFF"), ("o", "#FF5CE0"), ("D", "#FFFFFF"), ("^", "#FF5CE0"))  # inside a black outline
_REACH = {"D": 2**-0.5}  # how large a marker of this shape may be to fit its cell


def check_marks(marks: Mapping[str, Edges]) -> dict[str, Edges]:
    """Refuses more sets of edges than there are shapes to tell them apart."""
    if len(marks) > len(_LOOKS):
        raise UserError(f"a heatmap marks at most {len(_LOOKS)} sets of edges, got {len(marks)}: {', '.join(marks)}")
    return dict(marks)


def draw_marks(axes: Axes, marks: Mapping[str, Edges], cell: float) -> None:
    """Outlines the cells; `cell` is their side in points. White or pink within black shows on every colour."""
    width = min(max(cell / 12, 0.35), 1.2)  # of the coloured line; black reaches as far on both sides
    for (dest, src), (marker, colour) in zip(marks.values(), _LOOKS, strict=False):
        size = max(cell - 3 * width, cell / 4) * _REACH.get(marker, 1.0)
        axes.scatter(
            src,
            dest,
            s=size**2,
            marker=marker,
            facecolors="none",
            edgecolors=colour,
            linewidths=width,
            path_effects=[withStroke(linewidth=3 * width, foreground="black")],
        )


def mark_entries(marks: Mapping[str, Edges]) -> list[Any]:
    """The legend entries of the marks."""
    return [
        Line2D(
            [],
            [],
            marker=marker,
            ls="",
            mfc="none",
            mec=colour,
            ms=6 * _REACH.get(marker, 1.0),
            mew=1,
            label=name,
            path_effects=[withStroke(linewidth=2.6, foreground="black")],
        )
        for name, (marker, colour) in zip(marks, _LOOKS, strict=False)
    ]
