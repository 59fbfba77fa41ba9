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
from circuitscope.viz.registry import figure as figure_of
from circuitscope.viz.style import COLOURS, Sheet, look, plain, written

NAMED = 6  # places with a colour of their own


@figure_of("scores")
def scores(frames: Mapping[str, pd.DataFrame], *, names: Sequence[str] | None = None) -> Sheet:
    """A panel for each score, its value over steps with a band of ± a standard error.

    Of one run every place is drawn: heads, or whole layers by factor where the units are channels; those beyond the
    six that end highest in grey. Of several runs the place of each where the score ends highest.

    Args:
        frames: by name of the run, the table `circuitscope.analyze` gives.
        names: of scores; by default all that the runs have.
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
    kept: list[pd.DataFrame] = []
    with look():
        figure = Sheet(
            table=lambda: pd.concat(kept, ignore_index=True),
            figsize=(3.6 * columns, 2.6 * lines + 0.3),
            layout="constrained",
        )
        grid = figure.subplots(lines, columns, squeeze=False, sharex=True, sharey=True).ravel()
        for axes, score in zip(grid, chosen, strict=False):
            if len(frames) == 1:
                ((run, frame),) = frames.items()
                _places(axes, frame, score, run, kept)
            else:
                _runs(axes, frames, score, kept)
            meaning, of_edges = have[score]
            axes.set_title(fill(f"{score.replace('_', ' ')}: {meaning}", 46))
            axes.set_xlabel("step")
            axes.set_ylabel("share of the weight" if of_edges else "value")
            plain(axes)
            if axes.get_legend_handles_labels()[0]:
                axes.legend(frameon=False, fontsize=6.5)
            axes.label_outer()
            axes.tick_params(labelbottom=True)
        drawn = [axes.dataLim for axes in grid[: len(chosen)]]
        grid[0].set_ylim(min(-0.02, *(d.y0 for d in drawn)), max(1.02, *(d.y1 for d in drawn)))  # which all share
        for axes in grid[len(chosen) :]:
            axes.set_visible(False)
        figure.suptitle(
            written(next(iter(frames))) if len(frames) == 1 else "Where each score ends highest", x=0.01, ha="left"
        )
    return figure


def _places(axes: Axes, frame: pd.DataFrame, score: str, run: str, kept: list[pd.DataFrame]) -> None:
    curves = [
        (place_name(of.iloc[0]), of.sort_values("step"))
        for _, of in at_places(frame, score).groupby(["layer", "head", "factor"], dropna=False, sort=True)
    ]
    if not curves:
        return
    best = sorted(range(len(curves)), key=lambda i: -float(curves[i][1].value.iloc[-1]))[:NAMED]
    grey = [i for i in range(len(curves)) if i not in best]
    for n, i in enumerate([*grey, *sorted(best)]):
        place, rows = curves[i]
        colour = "0.75" if i in grey else COLOURS[(n - len(grey)) % len(COLOURS)]
        others = f"{len(grey)} others" if n == 0 else f"_{place}"
        _curve(axes, rows, place, run, score, colour, others if i in grey else place, kept)


def _runs(axes: Axes, frames: Mapping[str, pd.DataFrame], score: str, kept: list[pd.DataFrame]) -> None:
    for (run, frame), colour in zip(frames.items(), COLOURS * len(frames), strict=False):
        place = strongest(frame, score)
        if place is not None:
            name = place_name(place)
            _curve(axes, curve_at(frame, place), name, run, score, colour, f"{written(run)}, {name}", kept)


def _curve(
    axes: Axes, rows: pd.DataFrame, place: str, run: str, score: str, colour: Any, label: str, kept: list[pd.DataFrame]
) -> None:
    step, value = rows.step.to_numpy(float), rows.value.to_numpy(float)
    error = np.nan_to_num(rows.stderr.to_numpy(float))
    axes.plot(step, value, color=colour, lw=1.4, marker="o", ms=2, label=label)
    axes.fill_between(step, value - error, value + error, color=colour, alpha=0.2, lw=0)
    kept.append(
        pd.DataFrame(
            {"run": run, "score": score, "place": place, "step": rows.step, "value": value, "stderr": rows.stderr}
        )
    )
