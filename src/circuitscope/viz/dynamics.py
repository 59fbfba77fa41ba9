"""Training dynamics: train and validation loss, accuracy and circuit scores on one step axis, the loss bump shaded."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.patches import Patch

from circuitscope.analysis.phases.timeline import curve_at, place_name, strongest
from circuitscope.analysis.scores.registry import shown_in
from circuitscope.errors import UserError
from circuitscope.models.naming import model_name
from circuitscope.runs.run import Run
from circuitscope.viz.seeds import Band, Group, groups_of
from circuitscope.viz.style import COLOURS, GREY, Sheet, look, plain, save, written

Bump = tuple[float, float]


def dynamics(
    runs: Sequence[Run],
    *,
    scores: Sequence[pd.DataFrame | None] | None = None,
    bump: Bump | Sequence[Bump | None] | None = None,
    together: bool = True,
) -> Sheet:
    """Loss above, accuracy below it, then the scores: all in one panel for one run, in a panel each for several runs.

    The band of a run is the spread over evaluation batches (loss, accuracy) or ± one standard error (scores). Runs that
    differ only in their seed are drawn as one curve, their mean, with a band from the lowest to the highest.

    Args:
        scores: for each run the table `circuitscope.analyze` gives; drawn are the scores that are registered for this
            figure, each where it ends highest.
        bump: first and last step of the loss bump, for one run; or a list, one for each run.
        together: whether runs that differ only in their seed are drawn as one curve.
    """
    if not runs:
        raise UserError("a figure of dynamics needs at least one run")
    bumps = _bumps(bump, len(runs))
    tables = list(scores) if scores is not None else [None] * len(runs)
    if len(tables) != len(runs) or len(bumps) != len(runs):
        raise UserError(f"scores and bumps are one for each of {len(runs)} runs, got {len(tables)} and {len(bumps)}")
    groups = groups_of(runs, together)
    kept: list[dict[str, Any]] = []
    labels = {
        name: name.replace("_", " ") + (" on repeated blocks" if score.on == "repeats" else "")
        for score in shown_in("dynamics")
        for name in score.means
        if any(t is not None and (t.score == name).any() for t in tables)
    }
    panels = list(labels.values()) if len(groups) > 1 else ["scores"] if labels else []
    heights = [2.5, 2.5, *[1.7 if len(panels) > 1 else 2.3] * len(panels)]
    with look():
        figure = Sheet(
            table=lambda: pd.concat([pd.DataFrame(curve) for curve in kept], ignore_index=True),
            figsize=(7, sum(heights)),
            layout="constrained",
        )
        loss, accuracy, *rest = figure.subplots(len(heights), 1, sharex=True, height_ratios=heights)
        pen = _Pen(kept)
        for group, colour in zip(groups, COLOURS * len(groups), strict=False):
            _draw_metrics(pen, loss, accuracy, group, colour)
            for i, (name, label) in enumerate(labels.items()):
                if len(groups) == 1:
                    _draw_score(pen, rest[0], group, tables, name, COLOURS[i % len(COLOURS)], label)
                else:
                    _draw_score(pen, rest[i], group, tables, name, colour, group.label)
        _draw_chance(accuracy, runs)
        shaded = _shade([loss, accuracy, *rest], groups, bumps)
        loss.set_ylabel("loss")
        metrics = sorted({run.config.task.metric for run in runs})
        if metrics == ["accuracy"]:
            accuracy.set(ylabel="query accuracy", ylim=(-0.02, 1.02))
        else:
            accuracy.set_ylabel(" or ".join(metrics))
        for axes, label in zip(rest, panels, strict=True):
            drawn = axes.dataLim
            axes.set(ylabel=label.replace(" on ", "\non "), ylim=(min(-0.02, drawn.y0), max(1.02, drawn.y1)))
            axes.legend(frameon=False)
        [loss, accuracy, *rest][-1].set_xlabel("step")
        loss.legend(handles=[*loss.get_legend_handles_labels()[0], *shaded], frameon=False)
        for axes in (loss, accuracy, *rest):
            plain(axes)
        figure.suptitle(written(_title(groups)), x=0.01, ha="left")
    return figure


def save_dynamics(runs: Sequence[Run], path: Path) -> Path:
    """Draws loss and accuracy to a file and returns its path."""
    return save(dynamics(runs), path)[0]


class _Pen:
    """Draws curves with bands and notes what it drew."""

    def __init__(self, kept: list[dict[str, Any]]):
        self.kept = kept

    def draw(self, axes: Axes, curve: str, of: str, band: Band, colour: str, label: str, **line: Any) -> None:
        if not len(band.step):
            raise UserError(f"{of}: the runs have no step of {curve} in common")
        axes.plot(band.step, band.value, color=colour, label=written(label), **{"lw": 1.8, **line})
        if (band.high > band.low).any():
            axes.fill_between(band.step, band.low, band.high, color=colour, alpha=0.2, lw=0)
        self.kept.append(
            {
                "run": of,
                "curve": curve,
                "step": band.step.astype(int),
                "value": band.value,
                "low": band.low,
                "high": band.high,
            }
        )


def _draw_metrics(pen: _Pen, loss: Axes, accuracy: Axes, group: Group, colour: str) -> None:
    train, held = [], []
    for run in group.runs:
        rows = run.metrics
        if not len(rows) or not (rows.split == "validation").any():
            raise UserError(f"{run.path} has no metrics to draw yet")
        train.append(rows[rows.split == "train"])
        held.append(rows[rows.split == "validation"])
    if all(len(t) for t in train):
        band = Band.over([(t.step, t.loss) for t in train])
        pen.draw(loss, "train loss", group.label, band, colour, f"{group.label}, train", lw=0.8, alpha=0.45)
    metric = group.runs[0].config.task.metric
    for axes, name, label in ((loss, "loss", f"{group.label}, validation"), (accuracy, metric, group.label)):
        if len(held) > 1:
            band = Band.over([(h.step, h[name]) for h in held])
        else:
            (one,) = held
            batches = one[f"{name}_per_batch"]
            low, high = (batches.map(f).to_numpy(float) for f in (min, max))
            band = Band(one.step.to_numpy(float), one[name].to_numpy(float), low, high)
        pen.draw(axes, f"validation {name}", group.label, band, colour, label)


def _draw_score(
    pen: _Pen,
    axes: Axes,
    group: Group,
    tables: Sequence[pd.DataFrame | None],
    score: str,
    colour: str,
    label: str,
) -> None:
    curves, places = [], []
    for i in group.at:
        table = tables[i]
        place = None if table is None else strongest(table, score)
        if table is not None and place is not None:
            curves.append(curve_at(table, place))
            places.append(place_name(place))
    if not curves:
        return
    if len(curves) > 1:
        band = Band.over([(c.step, c.value) for c in curves])
    else:
        (one,) = curves
        value, error = one.value.to_numpy(float), np.nan_to_num(one.stderr.to_numpy(float))
        band = Band(one.step.to_numpy(float), value, value - error, value + error)
    where = places[0] if len(set(places)) == 1 else "each at its best place"
    pen.draw(axes, f"{score}, {where}", group.label, band, colour, f"{label}, {where}", marker="o", ms=2.5, lw=1.4)


def _draw_chance(accuracy: Axes, runs: Sequence[Run]) -> None:
    for chance in sorted({level for run in runs if (level := run.config.task.chance) is not None}):
        accuracy.axhline(chance, color="0.5", ls=":", lw=1)
        accuracy.annotate(
            f"any value of the context: {chance:.3g}",
            (0, chance),
            xytext=(4, 3),
            textcoords="offset points",
            color="0.35",
            fontsize=8,
        )


def _shade(every: Sequence[Axes], groups: Sequence[Group], bumps: Sequence[Bump | None]) -> list[Patch]:
    """Shades the bumps behind all panels, grey for one group, else in its colour; gives their legend entries."""
    handles = []
    for group, colour in zip(groups, COLOURS * len(groups), strict=False):
        found = [b for i in group.at if (b := bumps[i]) is not None]
        for first, last in found:
            for axes in every:
                shade = GREY if len(groups) == 1 else colour
                axes.axvspan(first, last, color=shade, alpha=0.18 / len(found) ** 0.5, lw=0, zorder=0)
        if found:
            span = f"{min(b[0] for b in found):.0f} to {max(b[1] for b in found):.0f}"
            whose = f"{group.label}, " if len(groups) > 1 else ""
            shade = GREY if len(groups) == 1 else colour
            handles.append(Patch(color=shade, alpha=0.25, lw=0, label=written(f"{whose}loss bump, steps {span}")))
    return handles


def _bumps(bump: Any, n: int) -> list[Bump | None]:
    if bump is None:
        return [None] * n
    one = len(bump) == 2 and all(isinstance(x, int | float) for x in bump)
    return [tuple(bump)] * n if one else list(bump)


def _title(groups: Sequence[Group]) -> str:
    if len(groups) > 1:
        return ""
    config = groups[0].runs[0].config
    sizes = ", ".join(str(size) for size in config.task.sizes().values())
    return f"{groups[0].label}: {model_name(config.model)} on {config.task.name}" + (f" ({sizes})" if sizes else "")
