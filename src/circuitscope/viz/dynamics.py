"""Training dynamics: loss, the task's metric and circuit scores on one step axis, with the loss bump of each run."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from circuitscope.analysis.causal.parts import Circuit
from circuitscope.analysis.scores.curves import followed
from circuitscope.analysis.scores.registry import shown_in
from circuitscope.arguments import explained
from circuitscope.errors import UserError
from circuitscope.models.naming import model_name
from circuitscope.runs.run import Run
from circuitscope.viz.labels import legend_below, line_entry, name_levels, names_beside, shade_entry
from circuitscope.viz.seeds import Band, Group, groups_of
from circuitscope.viz.step_axis import Bump, StepAxis
from circuitscope.viz.style import COLOURS, GREY, Sheet, look, pens, plain, save, written

_THIN: Any = {"lw": 0.8, "alpha": 0.45}  # training loss
_EVERY_STEP = StepAxis()


@explained
def dynamics(
    runs: Sequence[Run],
    *,
    scores: Sequence[pd.DataFrame | None] | None = None,
    circuits: Sequence[Circuit | None] | None = None,
    bump: Bump | Sequence[Bump | None] | None = None,
    together: bool = True,
    axis: StepAxis = _EVERY_STEP,
) -> Sheet:
    """Loss above, the task's metric below it, then the scores: in one panel for one run, in a panel each for several.

    The band of a run is the spread over evaluation batches (loss, metric) or ± one standard error (scores). Runs that
    differ only in their seed are drawn as one curve, their mean, with a band from the lowest to the highest. The bump
    of one run is shaded behind all panels; the bumps of several are bars of their colours on top.

    Args:
        scores: for each run the table `circuitscope.analyze` gives; drawn are the scores that are registered for this
            figure, each where the circuit has it or, if no circuit names it, where it ends highest.
        circuits: for each run its circuit, None where it is not known.
        bump: first and last step of the loss bump, for one run; or a list, one for each run, None where there is none.
        together: whether runs that differ only in their seed are drawn as one curve.
        axis: which steps are drawn, and whether on a log scale.
    """
    if not runs:
        raise UserError("a figure of dynamics needs at least one run")
    bumps = _bumps(bump, len(runs))
    tables = list(scores) if scores is not None else [None] * len(runs)
    if len(tables) != len(runs) or len(bumps) != len(runs):
        raise UserError(f"scores and bumps are one for each of {len(runs)} runs, got {len(tables)} and {len(bumps)}")
    known = list(circuits) if circuits is not None else [None] * len(runs)
    if len(known) != len(runs):
        raise UserError(f"circuits are one for each of {len(runs)} runs, got {len(known)}")
    groups = groups_of(runs, together)
    labels = {
        name: name.replace("_", " ") + (" on repeated blocks" if score.on == "repeats" else "")
        for score in shown_in("dynamics")
        for name in score.means
        if any(t is not None and (t.score == name).any() for t in tables)
    }
    with look():
        return _Drawing(groups, tables, known, bumps, labels, axis).draw()


def save_dynamics(runs: Sequence[Run], path: Path) -> Path:
    """Draws loss and accuracy to a file and returns its path."""
    return save(dynamics(runs), path)[0]


class _Drawing:
    """The panels of the figure: loss, metrics, scores, and above them the bumps of several runs."""

    def __init__(
        self,
        groups: list[Group],
        tables: Sequence[pd.DataFrame | None],
        circuits: Sequence[Circuit | None],
        bumps: Sequence[Bump | None],
        labels: dict[str, str],
        axis: StepAxis,
    ):
        self.groups, self.tables, self.circuits = groups, tables, circuits
        self.labels, self.axis = labels, axis
        self.pens = pens(len(groups))
        self.bumps = [[b for i in group.at if (b := bumps[i]) is not None] for group in groups]
        metrics = list(dict.fromkeys(_metric(group) for group in groups))
        panels = list(labels.values()) if len(groups) > 1 else ["scores"] if labels else []
        strip = 0.1 * len(groups) + 0.05 if len(groups) > 1 and any(self.bumps) else 0.0
        heights = [2.0] * (1 + len(metrics)) + [1.4 if len(panels) > 1 else 2.0] * len(panels)
        ratios = [strip, *heights] if strip else heights
        self.pen = _Pen()
        self.figure = Sheet(table=self.pen.table, figsize=(7, sum(ratios) + 0.4), layout="constrained")
        grid = self.figure.add_gridspec(len(ratios), 1, height_ratios=ratios)
        rows = list(range(len(ratios) - len(heights), len(ratios)))
        self.loss = self.figure.add_subplot(grid[rows[0]])
        below = [self.figure.add_subplot(grid[row], sharex=self.loss) for row in rows[1:]]
        self.metrics = dict(zip(metrics, below, strict=False))
        self.scores = dict(zip(panels, below[len(metrics) :], strict=True))
        self.strip = self.figure.add_subplot(grid[0], sharex=self.loss) if strip else None

    def draw(self) -> Sheet:
        self._curves()
        for label, axes in self.scores.items():
            drawn = axes.dataLim
            axes.set(ylabel=label.replace(" on ", "\non "), ylim=(min(-0.02, drawn.y0), max(1.02, drawn.y1)))
        self.loss.set_ylabel("loss")
        for metric, axes in self.metrics.items():
            axes.set_ylabel(metric)
            if metric == "accuracy":
                axes.set_ylim(-0.02, 1.02)
        every = [self.loss, *self.metrics.values(), *self.scores.values()]
        self.axis.apply(every)
        for axes in every:
            plain(axes)
            axes.tick_params(labelbottom=axes is every[-1])
        every[-1].set_xlabel(self.axis.label)
        for metric, axes in self.metrics.items():
            tasks = (group.runs[0].config.task for group in self.groups if _metric(group) == metric)
            words = dict.fromkeys(task.chance_words for task in tasks if task.chance is not None)
            name_levels(axes, " or ".join(words).replace(" of ", " of\n"), self._chances(metric))
        self._mark_bumps(every)
        where = ""
        if self.scores and len(self.groups) > 1:
            known = "where the circuit has it, else " if any(c is not None for c in self.circuits) else ""
            where = f"; each score {known}where it ends highest, named beside"
        self.figure.suptitle(written(_title(self.groups) + where), x=0.01, ha="left")
        legend_below(self.figure, list(self._legend()))
        return self.figure

    def _curves(self) -> None:
        for group, (colour, style) in zip(self.groups, self.pens, strict=True):
            _draw_metrics(self.pen, self.loss, self.metrics[_metric(group)], group, colour, style)
        several = len(self.groups) > 1
        for i, (name, label) in enumerate(self.labels.items()):
            axes = self.scores[label if several else "scores"]
            ends = []
            for group, (colour, style) in zip(self.groups, self.pens, strict=True):
                own = colour if several else COLOURS[(i + 1) % len(COLOURS)]  # the first is that of the loss
                found = self._draw_score(axes, group, name, own, style, label)
                if found is not None:
                    ends.append((*found, own))
            if several:
                names_beside(axes, [(where, own) for _, where, own in sorted(ends, key=lambda end: -end[0])])

    def _draw_score(
        self, axes: Axes, group: Group, score: str, colour: str, style: str, label: str
    ) -> tuple[float, str] | None:
        """Draws a score of a group, if it has it; gives the last value, and the place or places it is of."""
        tables = [(table, self.circuits[i]) for i in group.at if (table := self.tables[i]) is not None]
        found = [one for table, circuit in tables if (one := followed(table, score, circuit)) is not None]
        if not found:
            return None
        if len(found) > 1:
            band = Band.over([(one.rows.step, one.rows.value) for one in found])
        else:
            rows = found[0].rows
            value, error = rows.value.to_numpy(float), np.nan_to_num(rows.stderr.to_numpy(float))
            band = Band(rows.step.to_numpy(float), value, value - error, value + error)
        places = {one.where for one in found}
        where = places.pop() if len(places) == 1 else "each at its best place"
        edges = {one.edges for one in found}
        named = label.replace(score.replace("_", " "), edges.pop()) if edges != {score} and len(edges) == 1 else label
        chosen = found[0].chosen if len({one.by_circuit for one in found}) == 1 else "circuit or highest"
        line: Any = {"marker": "o", "ms": 2.5, "lw": 1.4, "ls": style}
        curve = found[0].edges if len(found) == 1 else score
        self.pen.draw(axes, f"{curve}, {where}", group.label, band, colour, f"{named}, {where} ({chosen})", **line)
        beside = where if named == label else f"{where}, {named}"
        return float(band.value[-1]), f"{beside} (circuit)" if chosen == "circuit" else beside

    def _chances(self, metric: str) -> dict[float, str]:
        """Chance levels with their colours: that of a run where runs differ and no other has this level."""
        by_level: dict[float, list[str]] = {}
        for group, (colour, _) in zip(self.groups, self.pens, strict=True):
            chance = group.runs[0].config.task.chance
            if _metric(group) == metric and chance is not None:
                by_level.setdefault(chance, []).append(colour)
        return {
            level: colours[0] if len(by_level) > 1 and len(colours) == 1 else GREY
            for level, colours in by_level.items()
        }

    def _mark_bumps(self, every: Sequence[Axes]) -> None:
        if len(self.groups) == 1:
            for first, last in self.bumps[0]:
                for axes in every:
                    axes.axvspan(first, last, color=GREY, alpha=0.18 / len(self.bumps[0]) ** 0.5, lw=0, zorder=0)
        if self.strip is None:
            return
        for row, (found, (colour, _)) in enumerate(zip(self.bumps, self.pens, strict=True)):
            for first, last in found:
                self.strip.barh(row, last - first, left=first, height=0.7, color=colour, alpha=0.8, ec=colour, lw=1)
        self.strip.set_ylim(len(self.groups) - 0.4, -0.6)
        self.strip.set_yticks([])
        self.strip.set_ylabel("loss\nbumps", rotation=0, ha="right", va="center")
        self.strip.spines[["left", "right", "top", "bottom"]].set_visible(False)
        self.strip.tick_params(which="both", bottom=False, labelbottom=False)
        self.strip.grid(axis="x", alpha=0.25)

    def _legend(self) -> Iterable[Any]:
        trained = any("train loss" in curve["curve"] for curve in self.pen.kept)
        if len(self.groups) == 1:
            yield line_entry("validation", COLOURS[0])
            if trained:
                yield line_entry("training", COLOURS[0], **_THIN)
            if self.bumps[0]:
                yield shade_entry(_span(self.bumps[0]), GREY)
            for axes in self.scores.values():
                yield from axes.get_legend_handles_labels()[0]
        else:
            for group, found, (colour, style) in zip(self.groups, self.bumps, self.pens, strict=True):
                bump = f", {_span(found)}" if found else ", no loss bump found" if any(self.bumps) else ""
                yield line_entry(group.label + bump, colour, ls=style)
            if trained:
                yield line_entry("thin lines: training", GREY, **_THIN)
        colour = GREY if len(self.groups) > 1 else COLOURS[0]  # grey shows the bump of one run
        yield shade_entry(_band_words(self.groups, bool(self.scores)), colour)


class _Pen:
    """Draws curves with bands and notes what it drew."""

    def __init__(self) -> None:
        self.kept: list[dict[str, Any]] = []

    def table(self) -> pd.DataFrame:
        """One row for each point of a curve."""
        return pd.concat([pd.DataFrame(curve) for curve in self.kept], ignore_index=True)

    def draw(self, axes: Axes, curve: str, of: str, band: Band, colour: str, label: str, **line: Any) -> None:
        if not len(band.step):
            raise UserError(f"{of}: the runs have no step of {curve} in common")
        axes.plot(band.step, band.value, color=colour, label=label, **{"lw": 1.6, **line})
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


def _draw_metrics(pen: _Pen, loss: Axes, metric: Axes, group: Group, colour: str, style: str) -> None:
    train, held = [], []
    for run in group.runs:
        rows = run.metrics
        if not len(rows) or not (rows.split == "validation").any():
            raise UserError(f"{run.path} has no metrics to draw yet")
        train.append(rows[rows.split == "train"])
        held.append(rows[rows.split == "validation"])
    if all(len(t) for t in train):
        band = Band.over([(t.step, t.loss) for t in train])
        pen.draw(loss, "train loss", group.label, band, colour, f"_{group.label}, train", **_THIN)
    for axes, name in ((loss, "loss"), (metric, _metric(group))):
        if len(held) > 1:
            band = Band.over([(h.step, h[name]) for h in held])
        else:
            (one,) = held
            batches = one[f"{name}_per_batch"]
            low, high = (batches.map(f).to_numpy(float) for f in (min, max))
            band = Band(one.step.to_numpy(float), one[name].to_numpy(float), low, high)
        pen.draw(axes, f"validation {name}", group.label, band, colour, written(group.label), ls=style)


def _bumps(bump: Any, n: int) -> list[Bump | None]:
    if bump is None:
        return [None] * n
    one = len(bump) == 2 and all(isinstance(x, int | float) for x in bump)
    return [tuple(bump)] * n if one else list(bump)


def _metric(group: Group) -> str:
    return group.runs[0].config.task.metric


def _span(found: Sequence[Bump]) -> str:
    steps = f"{min(b[0] for b in found):.0f} to {max(b[1] for b in found):.0f}"
    return f"loss bump, steps {steps}" if len(found) == 1 else f"{len(found)} loss bumps, steps {steps}"


def _band_words(groups: Sequence[Group], scores: bool) -> str:
    single, several = (any((len(g.runs) > 1) == many for g in groups) for many in (False, True))
    over = " or ".join(["batch"] * single + ["seed"] * several)
    return f"bands: lowest to highest {over}" + ("; of scores ± a standard error" if scores and single else "")


def _title(groups: Sequence[Group]) -> str:
    tasks = {(c.task.name, *c.task.sizes().items()): c.task for g in groups for c in [g.runs[0].config]}
    if len(tasks) > 1:
        return f"Training on {len(tasks)} tasks"
    (task,) = tasks.values()
    sizes = ", ".join(f"{name} {size}" for name, size in task.sizes().items())
    on = f"{task.name}" + (f" ({sizes})" if sizes else "")
    if len(groups) > 1:
        return f"Training on {on}"
    return f"{groups[0].label}: {model_name(groups[0].runs[0].config.model)} on {on}"
