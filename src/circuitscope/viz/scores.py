"""Circuit scores over training, one panel per score: every place of one run, or one place of each of several runs.

Binding and recall are drawn on the edges that the run's circuit names, where it is known, and else on their own.
"""

from collections.abc import Mapping, Sequence
from textwrap import fill
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from circuitscope.analysis.causal.parts import Circuit
from circuitscope.analysis.scores.curves import Followed, at_places, followed, place_name
from circuitscope.analysis.scores.edges import STEPS
from circuitscope.analysis.scores.registry import shown_in
from circuitscope.errors import UserError, unknown
from circuitscope.viz.labels import legend_below, line_entry, names_beside, shade_entry
from circuitscope.viz.registry import figure as figure_of
from circuitscope.viz.step_axis import Bumps, StepAxis, mark_bumps
from circuitscope.viz.style import COLOURS, GREY, Sheet, look, pens, plain, written

NAMED = 6  # places with a colour of their own
_EVEN = "_even"  # label of a line that shows what even rows would score
_OTHERS = "0.75"  # grey, of all other places
_WIDE = {1: 5.5, 2: 3.6}  # inches of a panel by how many stand side by side; else 2.7
_LINE, _OF_CIRCUIT = 1.4, 2.6  # width of a curve, and of one that the circuit names
_EVERY_STEP = StepAxis()
Place = tuple[Any, Any, str]  # layer, head, factor


@figure_of("scores")
def scores(
    frames: Mapping[str, pd.DataFrame],
    *,
    names: Sequence[str] | None = None,
    circuits: Mapping[str, Circuit | None] | None = None,
    bump: Bumps = None,
    axis: StepAxis = _EVERY_STEP,
) -> Sheet:
    """A panel for each score, its value over steps with a band of ± a standard error.

    Of one run every place is drawn: heads, or whole layers by factor where the units are channels. Six places have the
    same colour in all panels: those that the circuit names, and those that end highest or nearest to it in some panel.
    The others are grey. Of several runs each has its colour, and is drawn at the place that its circuit names or, if
    there is none, where the score ends highest; the place is named beside the panel. Dotted lines show what a matrix
    with even rows would score.

    Args:
        frames: by name of the run, the table `circuitscope.analyze` gives.
        names: of scores; by default all that the runs have.
        circuits: by name of the run its circuit, where it is known: its edges, such as recall+1, are drawn.
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
        known = circuits or {}
        of_runs = {
            score: {run: f for run, frame in frames.items() if (f := followed(frame, score, known.get(run)))}
            for score in chosen
        }
        if len(frames) == 1:
            ((run, frame),) = frames.items()
            entries = _places(panels, frame, run, {s: f.get(run) for s, f in of_runs.items()}, kept)
        else:
            entries = _runs(panels, list(frames), of_runs, kept)
        by_circuit = any(f.by_circuit for of in of_runs.values() for f in of.values())
        if by_circuit:
            entries.append(line_entry("thick: named by the circuit", GREY, lw=_OF_CIRCUIT))
        if any(line.get_label() == _EVEN for axes in panels.values() for line in axes.lines):
            entries.append(line_entry("dotted: even weight on all positions that may be read", GREY, lw=1, ls=":"))
        for n, (score, axes) in enumerate(panels.items()):
            meaning, of_edges = have[score]
            edges = next(iter(of_runs[score].values())).edges if len(frames) == 1 and of_runs[score] else score
            axes.set_title(fill(f"{edges.replace('_', ' ')}: {meaning}{_moved(edges)}", int(12 * wide)), fontsize=8)
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
        figure.suptitle(_title(list(frames), chosen, by_circuit), x=0.01, ha="left")
        legend_below(figure, [*entries, shade_entry("bands: ± a standard error")])
    return figure


def _title(runs: Sequence[str], chosen: Sequence[str], by_circuit: bool) -> str:
    """The name of the run, or how a place of each run was chosen; and on which edges binding and recall are drawn."""
    if len(runs) > 1:
        where = "Each run where its circuit has the score, else where it ends highest" if by_circuit else ""
        return f"{where or 'Each run where the score ends highest'}, named beside the panel"
    steps = [score for score in chosen if score in STEPS]
    if by_circuit or not steps:
        return written(runs[0])
    return f"{written(runs[0])}; {' and '.join(steps)} on fixed edges, no circuit known"


def _moved(edges: str) -> str:
    """In words, by how many positions edges are moved."""
    offset = edges.partition("+")[2]
    return f", {offset} position{'s' * (offset != '1')} later" if offset else ""


def _places(
    panels: Mapping[str, Axes],
    frame: pd.DataFrame,
    run: str,
    chosen: Mapping[str, Followed | None],
    kept: list[pd.DataFrame],
) -> list[Any]:
    """Draws every place of one run; gives the legend entries."""
    curves: dict[str, dict[Place, pd.DataFrame]] = {}
    best: dict[Place, tuple[int, float]] = {}  # rank and value where a place stands highest; the circuit's come first
    names: dict[Place, str] = {}
    of_circuit: set[tuple[str, Place]] = set()
    for score in panels:
        found = chosen[score]
        rows = at_places(frame, score if found is None else found.edges)
        by_place = rows.groupby(["layer", "head", "factor"], dropna=False, sort=True)
        curves[score] = {_key(of.iloc[0]): of.sort_values("step") for _, of in by_place}
        if found is not None and found.by_circuit:
            place = _key(found.rows.iloc[0])
            curves[score][place] = found.rows
            of_circuit.add((score, place))
            best[place] = (-1, 0.0)
        ends = sorted(((float(r.value.iloc[-1]), place) for place, r in curves[score].items()), key=lambda end: -end[0])
        for rank, (value, place) in enumerate(ends):
            best[place] = min(best.get(place, (rank, -value)), (rank, -value))
            names[place] = place_name(curves[score][place].iloc[0])
    given = list(names.values())
    names = {p: f"{name} {p[2]}" if given.count(name) > 1 else name for p, name in names.items()}  # of two factors
    named = sorted(sorted(best, key=lambda place: best[place])[:NAMED], key=_order)
    colour = dict(zip(named, COLOURS, strict=False))
    for score, axes in panels.items():
        even = []
        for place, rows in sorted(curves[score].items(), key=lambda item: item[0] in colour):  # grey ones behind
            wide = _OF_CIRCUIT if (score, place) in of_circuit else _LINE
            _curve(axes, rows, names[place], run, colour.get(place, _OTHERS), "-", names[place], kept, wide)
            even.append((rows, colour.get(place, GREY)))
        _baselines(axes, even)
    others = len(names) - len(named)
    entries = [line_entry(names[place], colour[place]) for place in named]
    return entries + ([line_entry(f"{others} other place{'s' * (others > 1)}", _OTHERS)] if others else [])


def _baselines(axes: Axes, drawn: Sequence[tuple[pd.DataFrame, str]]) -> None:
    """A dotted line where a matrix with even rows would be; in the colour of its only curve if curves differ in it."""
    levels: dict[float, set[str]] = {}
    for rows, colour in drawn:
        even = float(rows.even.iloc[-1])
        if np.isfinite(even):
            levels.setdefault(round(even, 3), set()).add(colour)
    for level, colours in levels.items():
        only = next(iter(colours)) if len(levels) > 1 and len(colours) == 1 else GREY
        axes.axhline(level, color=only, lw=0.9, ls=":", zorder=1, label=_EVEN)


def _key(row: "pd.Series[Any]") -> Place:
    layer, head = (None if pd.isna(row[name]) else int(row[name]) for name in ("layer", "head"))
    return layer, head, str(row.factor)


def _order(place: Place) -> tuple[int, int, str]:
    layer, head, factor = place
    return (-1 if layer is None else layer), (1 << 30 if head is None else head), factor


def _runs(
    panels: Mapping[str, Axes],
    runs: Sequence[str],
    chosen: Mapping[str, Mapping[str, Followed]],
    kept: list[pd.DataFrame],
) -> list[Any]:
    """Draws one place of every run; gives the legend entries."""
    own = dict(zip(runs, pens(len(runs)), strict=True))
    for score, axes in panels.items():
        ends = []
        for run, found in chosen[score].items():
            name = found.where if found.edges == score else f"{found.where}, {found.edges}"
            wide = _OF_CIRCUIT if found.by_circuit else _LINE
            _curve(axes, found.rows, found.where, run, *own[run], f"{run}, {name}", kept, wide)
            ends.append((float(found.rows.value.iloc[-1]), name, own[run][0]))
        _baselines(axes, [(found.rows, own[run][0]) for run, found in chosen[score].items()])
        names_beside(axes, [(name, colour) for _, name, colour in sorted(ends, key=lambda end: -end[0])])
    return [line_entry(run, colour, ls=style) for run, (colour, style) in own.items()]


def _curve(
    axes: Axes,
    rows: pd.DataFrame,
    place: str,
    run: str,
    colour: str,
    style: str,
    label: str,
    kept: list[pd.DataFrame],
    wide: float,
) -> None:
    step, value = rows.step.to_numpy(float), rows.value.to_numpy(float)
    error = np.nan_to_num(rows.stderr.to_numpy(float))
    axes.plot(step, value, color=colour, ls=style, lw=wide, marker="o", ms=2, label=written(label))
    axes.fill_between(step, value - error, value + error, color=colour, alpha=0.2, lw=0)
    columns = {"score": rows.score, "place": place, "step": rows.step}
    columns |= {"value": value, "stderr": rows.stderr, "even": rows.even}
    kept.append(pd.DataFrame({"run": run, **columns}))
