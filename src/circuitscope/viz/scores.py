"""Circuit scores over training, one panel per score: every place of one run, or the best place of several runs."""

from collections.abc import Mapping, Sequence
from textwrap import fill
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from circuitscope.analysis.phases.timeline import at_places, curve_at, place_name, strongest
from circuitscope.analysis.scores.registry import shown_in
from circuitscope.errors import UserError, unknown
from circuitscope.viz.labels import legend_below, line_entry, names_beside, shade_entry
from circuitscope.viz.registry import figure as figure_of
from circuitscope.viz.step_axis import Bumps, StepAxis, mark_bumps
from circuitscope.viz.style import COLOURS, Sheet, look, pens, plain, written

NAMED = 6  # places with a colour of their own
_OTHERS = "0.75"  # grey, of all other places
_WIDE = {1: 5.5, 2: 3.6}  # inches of a panel by how many stand side by side; else 2.7
_EVERY_STEP = StepAxis()
Place = tuple[Any, Any, str]  # layer, head, factor


@figure_of("scores")
def scores(
    frames: Mapping[str, pd.DataFrame],
    *,
    names: Sequence[str] | None = None,
    bump: Bumps = None,
    axis: StepAxis = _EVERY_STEP,
) -> Sheet:
    """A panel for each score, its value over steps with a band of ± a standard error.

    Of one run every place is drawn: heads, or whole layers by factor where the units are channels. Six places have the
    same colour in all panels: those that end highest or nearest to it in some panel. The others are grey. Of several
    runs each has its colour, and is drawn at the place where the score ends highest, which is named beside the panel.

    Args:
        frames: by name of the run, the table `circuitscope.analyze` gives.
        names: of scores; by default all that the runs have.
        bump: first and last step of the loss bump; of several runs by the name of the run.
        axis: which steps are drawn, and whether on a log scale.
    """
    if not frames:
        raise UserError("a figure of scores needs at least one run")
    have = {
        name: (meaning, score.edges is not None)
        for score in shown_in("figure")
        for name, meaning in score.means.items()
        if any((frame.score == name).any() for frame in frames.values())
    }
    for name in names or ():
        if name not in have:
            raise unknown("score", name, have)
    chosen = list(have if names is None else names)
    if not chosen:
        raise UserError("the runs have no scores to draw")
    columns = min(len(chosen), 3)
    lines = -(-len(chosen) // columns)
    wide = _WIDE.get(columns, 2.7)
    kept: list[pd.DataFrame] = []
    with look():
        figure = Sheet(
            table=lambda: pd.concat(kept, ignore_index=True),
            figsize=(wide * columns, 2.1 * lines + 0.3),
            layout="constrained",
        )
        grid = figure.subplots(lines, columns, squeeze=False, sharex=True, sharey=True).ravel()
        panels = dict(zip(chosen, grid, strict=False))
        if len(frames) == 1:
            ((run, frame),) = frames.items()
            entries = _places(panels, frame, run, kept)
        else:
            entries = _runs(panels, frames, kept)
        for n, (score, axes) in enumerate(panels.items()):
            meaning, of_edges = have[score]
            axes.set_title(fill(f"{score.replace('_', ' ')}: {meaning}", int(12 * wide)), fontsize=8)
            axes.set_ylabel("share of the weight" if of_edges else "value")
            axes.set_xlabel(axis.label if n + columns >= len(chosen) else "")
            plain(axes)
            axes.tick_params(labelbottom=True, labelleft=n % columns == 0)
            if n % columns:
                axes.set_ylabel("")
        drawn = [axes.dataLim for axes in panels.values()]
        grid[0].set_ylim(min(-0.02, *(d.y0 for d in drawn)), max(1.02, *(d.y1 for d in drawn)))  # which all share
        axis.apply(list(panels.values()))
        own = {run: colour for run, (colour, _) in zip(frames, pens(len(frames)), strict=True)}
        entries += mark_bumps(list(panels.values()), bump, own)
        for axes in grid[len(chosen) :]:
            axes.set_visible(False)
        title = (
            written(next(iter(frames)))
            if len(frames) == 1
            else "Each run where the score ends highest, named beside the panel"
        )
        figure.suptitle(title, x=0.01, ha="left")
        legend_below(figure, [*entries, shade_entry("bands: ± a standard error")])
    return figure


def _places(panels: Mapping[str, Axes], frame: pd.DataFrame, run: str, kept: list[pd.DataFrame]) -> list[Any]:
    """Draws every place of one run; gives the legend entries."""
    curves: dict[str, dict[Place, pd.DataFrame]] = {}
    for score in panels:
        by_place = at_places(frame, score).groupby(["layer", "head", "factor"], dropna=False, sort=True)
        curves[score] = {_key(of.iloc[0]): of.sort_values("step") for _, of in by_place}
    best: dict[Place, tuple[int, float]] = {}  # rank and value where a place stands highest
    names: dict[Place, str] = {}
    for of in curves.values():
        ends = sorted(((float(rows.value.iloc[-1]), place) for place, rows in of.items()), key=lambda end: -end[0])
        for rank, (value, place) in enumerate(ends):
            best[place] = min(best.get(place, (rank, -value)), (rank, -value))
            names[place] = place_name(of[place].iloc[0])
    given = list(names.values())
    names = {p: f"{name} {p[2]}" if given.count(name) > 1 else name for p, name in names.items()}  # of two factors
    named = sorted(sorted(best, key=lambda place: best[place])[:NAMED], key=_order)
    colour = dict(zip(named, COLOURS, strict=False))
    for score, axes in panels.items():
        for place, rows in sorted(curves[score].items(), key=lambda item: item[0] in colour):  # grey ones behind
            _curve(axes, rows, names[place], run, score, colour.get(place, _OTHERS), "-", names[place], kept)
    others = len(names) - len(named)
    entries = [line_entry(names[place], colour[place]) for place in named]
    return entries + ([line_entry(f"{others} other place{'s' * (others > 1)}", _OTHERS)] if others else [])


def _key(row: "pd.Series[Any]") -> Place:
    layer, head = (None if pd.isna(row[name]) else int(row[name]) for name in ("layer", "head"))
    return layer, head, str(row.factor)


def _order(place: Place) -> tuple[int, int, str]:
    layer, head, factor = place
    return (-1 if layer is None else layer), (1 << 30 if head is None else head), factor


def _runs(panels: Mapping[str, Axes], frames: Mapping[str, pd.DataFrame], kept: list[pd.DataFrame]) -> list[Any]:
    """Draws the best place of every run; gives the legend entries."""
    own = dict(zip(frames, pens(len(frames)), strict=True))
    for score, axes in panels.items():
        ends = []
        for run, frame in frames.items():
            place = strongest(frame, score)
            if place is not None:
                name = place_name(place)
                _curve(axes, curve_at(frame, place), name, run, score, *own[run], f"{run}, {name}", kept)
                ends.append((float(place.value), name, own[run][0]))
        names_beside(axes, [(name, colour) for _, name, colour in sorted(ends, key=lambda end: -end[0])])
    return [line_entry(run, colour, ls=style) for run, (colour, style) in own.items()]


def _curve(
    axes: Axes,
    rows: pd.DataFrame,
    place: str,
    run: str,
    score: str,
    colour: str,
    style: str,
    label: str,
    kept: list[pd.DataFrame],
) -> None:
    step, value = rows.step.to_numpy(float), rows.value.to_numpy(float)
    error = np.nan_to_num(rows.stderr.to_numpy(float))
    axes.plot(step, value, color=colour, ls=style, lw=1.4, marker="o", ms=2, label=written(label))
    axes.fill_between(step, value - error, value + error, color=colour, alpha=0.2, lw=0)
    kept.append(
        pd.DataFrame(
            {"run": run, "score": score, "place": place, "step": rows.step, "value": value, "stderr": rows.stderr}
        )
    )
