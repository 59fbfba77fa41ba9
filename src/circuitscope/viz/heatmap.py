"""Heatmaps of mixing matrices: attention and Φ, tokens on the axes coloured by role, the causal half alone.

Rows are destinations, columns sources. A diagonal factor (a gate) is a strip along the destinations. Sizes are
laid out in inches, so a figure of one length always has the same proportions.
"""

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import pandas as pd
from jaxtyping import Float
from matplotlib.axes import Axes
from matplotlib.colors import Normalize, to_rgb
from matplotlib.image import AxesImage
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, MaxNLocator
from torch import Tensor

from circuitscope.errors import UserError, unknown
from circuitscope.viz.marks import Edges, check_marks, draw_marks, mark_entries
from circuitscope.viz.roles import role_look
from circuitscope.viz.scales import SCALES, Array, Panel, Scale, as_drawn, colours, default_scale, scale_words
from circuitscope.viz.style import DPI, GREY, Sheet, look

_BLANK = "#E8E8E8"  # what lies after the destination
_TOKEN_SIZE = 5.5
_STRIP, _GAP, _TITLE, _TICKS = 0.07, 0.16, 0.19, 0.16  # inches


@dataclass(frozen=True)
class Axis:
    """What stands along both axes: the token and the role of each position; either may be missing."""

    tokens: Sequence[int] | None = None
    roles: Sequence[int] | None = None


def heatmap(
    panels: Sequence[Panel] | Float[Array, "dest src"] | Float[Tensor, "dest src"],
    *,
    axis: Axis | None = None,
    scale: Scale | str | None = None,
    title: str = "",
    marks: Mapping[str, Edges] | None = None,
    about: Mapping[str, Any] | None = None,
) -> Sheet:
    """Panels side by side: a column for each step or, of one step, for each factor; else heads in rows of four.

    Panels of one factor share their colours, so they can be compared.

    Args:
        panels: matrices to draw; a bare [dest, src] array is one.
        scale: signed, colours centred on 0; share, |Φ_ij| / Σ_j |Φ_ij|; log, |Φ| over at most 5 decades. By
            default attention and means of |Φ| are drawn as shares, all else signed.
        marks: edges to point at, by name: destinations and sources.
        about: columns to put before the numbers in the figure's `data`, such as the run.
    """
    chosen = [Panel(_array(panels), "")] if not isinstance(panels, Sequence) else list(panels)
    if not chosen:
        raise UserError("a heatmap needs at least one panel")
    scale = default_scale(chosen) if scale is None else scale
    if scale not in SCALES:
        raise unknown("scale", scale, SCALES)
    lengths = {len(panel.values) for panel in chosen}
    if len(lengths) > 1:
        raise UserError(f"panels of one figure have one length, got {sorted(lengths)}")
    axis = _checked(axis or Axis(), lengths.pop())
    with look():
        return _Layout(chosen, axis, scale, title, check_marks(marks or {})).draw(dict(about or {}))


def labelled(axis: Axis, length: int, spacing: float) -> list[int]:
    """Positions that get a label, at least `spacing` positions apart: those with a part in the task first."""
    if axis.tokens is None:
        return []
    order = range(length)
    if axis.roles is not None:
        roles = axis.roles
        order = sorted(order, key=lambda i: (role_look(roles[i]).quiet, i))  # type: ignore[assignment]
    chosen: list[int] = []
    taken = np.full(length, False)
    reach = int(np.ceil(spacing)) // 2 * 2  # of keys and values in turn both are labelled
    for i in order:
        if not taken[max(i - reach, 0) : i + reach + 1].any():
            chosen.append(i)
            taken[i] = True
    return sorted(chosen)


class _Layout:
    """Panels placed in a grid, in inches from the lower left corner."""

    def __init__(
        self,
        panels: list[Panel],
        axis: Axis,
        scale: Scale,
        title: str,
        marks: dict[str, Edges],
    ):
        self.panels, self.axis, self.scale, self.marks = panels, axis, scale, marks
        self.length = len(panels[0].values)
        steps, factors = (list(dict.fromkeys(getattr(p, name) for p in panels)) for name in ("step", "factor"))
        self.varying = {
            "factor": len(factors) > 1,
            "head": len({p.head for p in panels}) > 1,
            "step": len(steps) > 1,
        }
        self.below = len(steps) == 1 and len(factors) > 1  # colour bars under columns, else right of rows
        self.grid = self._grid(steps, factors)
        columns = max(len(row) for row in self.grid)
        squares = sum(not p.diagonal for p in max(self.grid, key=len))
        self.side = {0: 3.6, 1: 5.0, 2: 3.6, 3: 3.0}.get(squares, 2.6)
        self.widths = [self._width(c) for c in range(columns)]
        digits = max((len(str(t)) for t in axis.tokens or ()), default=0)
        self.label = 0.05 + digits * _TOKEN_SIZE * 0.64 / 72 if digits else 0.0
        self.strip = (_STRIP + 0.02 if axis.roles is not None else 0.0) + self.label
        self.left = 0.34 + (self.strip or 0.22)  # without tokens and roles positions stand there
        self.right = 0.32 if self.below else 0.95
        self.bottom = (
            0.28 + self.strip + (0.4 if self.below else 0.0) + (0.28 if axis.roles is not None or marks else 0)
        )
        self.width = max(self.left + sum(self.widths) + _GAP * (columns - 1) + self.right, 3.2)
        lines = textwrap.wrap(title, max(int(self.width / 0.082), 20))
        self.title = "\n".join(lines)
        self.top = 0.12 + 0.19 * len(lines) + (_TITLE if any(self.varying.values()) else 0.0) + _TICKS
        rows = len(self.grid)
        self.height = self.bottom + rows * self.side + (rows - 1) * (_GAP + _TITLE) + self.top

    def _grid(self, steps: list[int | None], factors: list[str]) -> list[list[Panel]]:
        if len(steps) > 1 or len(factors) == 1:
            rows: dict[tuple[str, int], list[Panel]] = {}
            seen: dict[tuple[str, int | None], int] = {}
            for p in self.panels:
                place = seen.get((p.factor, p.step), 0)
                seen[p.factor, p.step] = place + 1
                rows.setdefault((p.factor, place), []).append(p)
            grid = list(rows.values())
            if len(steps) > 1 and len(grid) > 1:
                return grid
            flat = [p for row in grid for p in row]
            wide = len(flat) if len(flat) <= 5 else 4
            return [flat[i : i + wide] for i in range(0, len(flat), wide)]
        by_factor = [[p for p in self.panels if p.factor == name] for name in factors]
        return [list(row) for row in zip(*by_factor, strict=True)]

    def _width(self, column: int) -> float:
        cell = [row[column] for row in self.grid if column < len(row)]
        if all(p.diagonal for p in cell):
            return max(0.32, 0.08 * max(len(self._heading(p)) for p in cell))
        return self.side

    def draw(self, about: dict[str, Any]) -> Sheet:
        dpi = max(DPI, int(np.ceil(2 * self.length / self.side)))  # no entry is less than two pixels
        figure = Sheet(table=lambda: self.table(about), figsize=(self.width, self.height), dpi=dpi)
        groups = {name: [p for p in self.panels if p.factor == name] for name in dict.fromkeys(self._names())}
        maps = {name: colours([as_drawn(p, self.scale) for p in group], self.scale) for name, group in groups.items()}
        last = {c: max(r for r, row in enumerate(self.grid) if c < len(row)) for c in range(len(self.widths))}
        barred: set[str] = set()
        for r, row in enumerate(self.grid):
            for c, panel in enumerate(row):
                axes = figure.add_axes(self._place(r, c, panel))
                image = self._image(axes, panel, *maps[panel.factor])
                self._decorate(axes, panel, first=c == 0, top=r == 0, lowest=r == last[c])
                if panel.diagonal and self.below:
                    if r == last[c]:
                        self._range_of(axes, maps[panel.factor][1])
                elif self.below and r == last[c]:
                    self._bar(figure, image, maps[panel.factor][1], panel, self._under(c))
                elif not self.below and panel.factor not in barred and c == len(row) - 1:
                    self._bar(figure, image, maps[panel.factor][1], panel, self._beside(r))
                    barred.add(panel.factor)
        figure.suptitle(self.title, x=0.1 / self.width, y=1 - 0.08 / self.height, ha="left", va="top")
        self._legend(figure)
        return figure

    def _names(self) -> list[str]:
        return [p.factor for p in self.panels]

    def _at(self, x: float, y: float, width: float, height: float) -> tuple[float, float, float, float]:
        return x / self.width, y / self.height, width / self.width, height / self.height

    def _x(self, column: int) -> float:
        return self.left + sum(self.widths[:column]) + _GAP * column

    def _y(self, row: int) -> float:
        return self.height - self.top - self.side * (row + 1) - (_GAP + _TITLE) * row

    def _place(self, row: int, column: int, panel: Panel) -> tuple[float, float, float, float]:
        width = self.widths[column]
        thin = max(self.side / 25, 0.12)
        if panel.diagonal:
            return self._at(self._x(column) + (width - thin) / 2, self._y(row), thin, self.side)
        return self._at(self._x(column), self._y(row), self.side, self.side)

    def _under(self, column: int) -> tuple[float, float, float, float]:
        lowest = max(r for r, row in enumerate(self.grid) if column < len(row))
        return self._at(self._x(column) + 0.1 * self.side, self._y(lowest) - self.strip - 0.3, 0.8 * self.side, 0.09)

    def _beside(self, row: int) -> tuple[float, float, float, float]:
        last = len(self.grid[row]) - 1
        x = self._x(last) + self.widths[last] + 0.32
        return self._at(x, self._y(row) + 0.15 * self.side, 0.09, 0.7 * self.side)

    def _image(self, axes: Axes, panel: Panel, colour_map: str, norm: Normalize) -> AxesImage:
        drawn = np.ma.masked_invalid(as_drawn(panel, self.scale))
        if panel.diagonal:
            drawn = drawn[:, None]
        axes.set_facecolor(_BLANK)
        return axes.imshow(drawn, cmap=colour_map, norm=norm, interpolation="none", aspect="auto")

    def _decorate(self, axes: Axes, panel: Panel, *, first: bool, top: bool, lowest: bool) -> None:
        axes.spines[:].set_linewidth(0.5)
        axes.spines[:].set_color(GREY)
        axes.set_title(self._heading(panel), pad=(_TICKS * 72 if top and not panel.diagonal else 0) + 3)
        axes.tick_params(
            bottom=False, left=False, labelbottom=False, labelleft=False, colors=GREY, labelsize=6.5, length=2, pad=1
        )
        if panel.diagonal:
            axes.tick_params(top=False, right=False)
        else:
            positions = _positions(self.length)
            axes.set_xticks(positions)
            axes.set_yticks(positions)
            axes.tick_params(top=top, labeltop=top, right=False, labelright=False)
            if self.axis.roles is None and self.axis.tokens is None:
                axes.tick_params(left=first, labelleft=first)
            draw_marks(axes, self.marks, cell=self.side * 72 / self.length)
            self._along(axes, "x", labels=lowest)
            if lowest:
                axes.set_xlabel("source token" if self.axis.tokens else "source", labelpad=72 * self.strip + 2)
        if first:
            self._along(axes, "y", labels=True)
            axes.set_ylabel("destination token" if self.axis.tokens else "destination", labelpad=72 * self.strip + 2)
            if self.axis.tokens is None and self.axis.roles is None:
                axes.yaxis.labelpad = 4

    def _heading(self, panel: Panel) -> str:
        parts = {"factor": panel.factor, "head": panel.head, "step": f"step {panel.step}"}
        if panel.diagonal and self.below:
            return panel.factor
        return ", ".join(text for name, text in parts.items() if self.varying[name] and text)

    def _along(self, axes: Axes, which: Literal["x", "y"], *, labels: bool) -> None:
        """A strip of role colours outside an axis, and the tokens beyond it."""
        thick = _STRIP / self.side
        wide = axes.get_position().width * self.width
        if which == "x":
            strip = axes.inset_axes((0, -thick - 0.02 / self.side, 1, thick))
        else:
            strip = axes.inset_axes((-(_STRIP + 0.02) / wide, 0, _STRIP / wide, 1))
        strip.spines[:].set_visible(False)
        strip.set_label(f"roles {which}")
        if self.axis.roles is not None:
            rgb = np.array([to_rgb(role_look(r).colour) for r in self.axis.roles])
            strip.imshow(rgb[None] if which == "x" else rgb[:, None], interpolation="none", aspect="auto")
        elif which == "x":
            strip.set_xlim(-0.5, self.length - 0.5)
        else:
            strip.set_ylim(self.length - 0.5, -0.5)
        strip.patch.set_visible(False)
        strip.tick_params(length=0, pad=1.5, labelsize=_TOKEN_SIZE)
        strip.set_xticks([])
        strip.set_yticks([])
        if not labels or self.axis.tokens is None:
            return
        spacing = 1.12 * _TOKEN_SIZE / (self.side * 72 / self.length)
        shown = labelled(self.axis, self.length, spacing)
        texts = [str(self.axis.tokens[i]) for i in shown]
        ticks = strip.set_xticks(shown, texts, rotation=90) if which == "x" else strip.set_yticks(shown, texts)
        for i, tick in zip(shown, ticks, strict=True):
            role = role_look(self.axis.roles[i]) if self.axis.roles is not None else None
            tick.label1.set_color("#7F7F7F" if role is None or role.quiet else role.colour)
            if role is not None and not role.quiet:
                tick.label1.set_fontweight("bold")

    def _bar(
        self,
        figure: Sheet,
        image: AxesImage,
        norm: Normalize,
        panel: Panel,
        place: tuple[float, float, float, float],
    ) -> None:
        axes = figure.add_axes(place)
        drawn = [as_drawn(p, self.scale) for p in self.panels if p.factor == panel.factor]
        most = max(float(np.abs(d[np.isfinite(d)]).max(initial=0)) for d in drawn)
        beyond = self.scale == "signed" and most > (norm.vmax or 0.0)
        bar = figure.colorbar(
            image,
            cax=axes,
            orientation="horizontal" if self.below else "vertical",
            extend="both" if beyond else "neither",
            extendfrac=0.03,
        )
        axes.set_label(f"colours of {panel.factor}")
        bar.outline.set_linewidth(0.5)  # type: ignore[operator]
        axes.tick_params(labelsize=6.5, length=2, colors=GREY)
        if self.scale == "share" and not panel.diagonal:
            bar.set_ticks([0, 0.05, 0.25, 0.5, 1], labels=["0", "0.05", "0.25", "0.5", "1"])
        elif self.scale != "log":
            bar.locator, bar.formatter = MaxNLocator(5), FuncFormatter(lambda x, _: f"{x:.3g}")
            bar.update_ticks()
        bar.set_label(scale_words(panel, self.scale), size=7.5, labelpad=1 if self.below else 3)

    def _range_of(self, axes: Axes, norm: Normalize) -> None:
        low, high = (norm.vmin or 0.0), (norm.vmax or 0.0)
        text = f"±{high:.2g}" if low == -high else f"{low:.1g} to\n{high:.2g}"
        axes.text(0.5, -0.02, text, transform=axes.transAxes, ha="center", va="top", fontsize=6.5, color=GREY)

    def _legend(self, figure: Sheet) -> None:
        handles: list[Any] = []
        if self.axis.roles is not None:
            present = [role_look(number) for number in sorted({int(r) for r in self.axis.roles})]
            handles += [Patch(color=r.colour, label=r.name) for r in sorted(present, key=lambda r: r.quiet)]
        handles += mark_entries(self.marks)
        if handles:
            figure.legend(
                handles=handles,
                loc="lower left",
                ncols=len(handles),
                frameon=False,
                bbox_to_anchor=(0.1 / self.width, 0.02 / self.height),
                borderpad=0.2,
                handlelength=1,
                columnspacing=1.2,
            )

    def table(self, about: dict[str, Any]) -> pd.DataFrame:
        """One row for each entry, of a causal matrix for each of its causal half: its value, and what was drawn."""
        frames = []
        for p in self.panels:
            drawn = as_drawn(p, self.scale)
            half = np.tri(self.length, dtype=bool) | (not p.causal)
            dest, src = (np.arange(self.length),) * 2 if p.diagonal else np.nonzero(half)
            at = dest if p.diagonal else (dest, src)
            frames.append(
                pd.DataFrame(
                    about
                    | {"step": p.step, "factor": p.factor, "head": p.head, "dest": dest, "src": src}
                    | {"value": p.values[at], "drawn": drawn[at]}
                )
            )
        return pd.concat(frames, ignore_index=True)


def _positions(length: int) -> list[int]:
    every = max(1, 2 ** int(np.ceil(np.log2(length / 8))))
    return list(range(0, length, every))


def _array(matrix: Any) -> Array:
    values = np.asarray(matrix.detach().cpu() if hasattr(matrix, "detach") else matrix, dtype=float)
    if values.ndim != 2 or values.shape[0] != values.shape[1] or not len(values):
        raise UserError(f"a heatmap draws a matrix [dest, src], got shape {list(values.shape)}")
    return values


def _checked(axis: Axis, length: int) -> Axis:
    for name, along in (("tokens", axis.tokens), ("roles", axis.roles)):
        if along is not None and len(along) != length:
            raise UserError(f"{name} must be given for each position: expected {length} of them, got {len(along)}")
    return axis
