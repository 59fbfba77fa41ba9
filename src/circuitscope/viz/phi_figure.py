"""The Φ figure of a run: a layer's mixing matrices on one held-out example, at one checkpoint or several."""

from collections.abc import Sequence
from pathlib import Path

from circuitscope.analysis.checkpoints.steps import ChosenSteps
from circuitscope.analysis.pictures.layer import LayerPictures, Picture, UnitChoice, layer_pictures
from circuitscope.analysis.scores.edges import named_edges
from circuitscope.arguments import explained
from circuitscope.runs.run import Run
from circuitscope.viz.heatmap import Axis, heatmap
from circuitscope.viz.scales import Panel, Scale
from circuitscope.viz.style import Sheet, written

_MEANS = {"mean": "mean", "mean_abs": "mean |·|"}


@explained
def phi_figure(
    run: Run | str | Path,
    layer: int = 0,
    *,
    steps: ChosenSteps = None,
    example: int = 0,
    factors: str | Sequence[str] | None = None,
    heads: UnitChoice | None = None,
    top: int | None = None,
    by: str | None = None,
    scale: Scale | str | None = None,
    mark: Sequence[str] = (),
) -> Sheet:
    """Attention or Φ of a layer on one example of the test split.

    Args:
        steps: checkpoints, one panel each; by default the last.
        example: which held-out example, from 0.
        factors: names of factors, "phi", "composed", or "all" of them side by side. By default all at one step and,
            over several steps, the composed matrix, or Φ where there is none.
        heads: heads or channels by number, "all", "mean", "mean_abs". By default each of up to 8 heads where Φ is
            per head and shown alone, and the mean of |Φ| otherwise.
        top: in place of `heads`: how many of the strongest by a score, at the last of the steps.
        by: that score, a set of edges as `named_edges` takes it; by default recall on tasks with pairs and induction
            on repeated blocks.
        scale: "signed", "share" or "log", as `viz.heatmap.heatmap` says.
        mark: sets of edges to point at, such as "recall" and "binding".
    """
    run = Run.of(run)
    found = layer_pictures(run, layer, steps=steps, example=example, factors=factors, units=heads, top=top, by=by)
    panels = [Panel(p.values, p.factor, _head(p), p.step, p.entries, p.causal) for p in found.pictures]
    layout = found.example.layout
    edges = {name: named_edges(name, layout) for name in mark}
    return heatmap(
        panels,
        axis=Axis(found.example.names(0), layout.roles[0].tolist()),
        scale=scale,
        title=_title(run, found, example, panels),
        marks={name: (e.dest.tolist(), e.src.tolist()) for name, e in edges.items()},
        about={"run": run.name, "layer": found.layer, "example": example},
    )


def _head(picture: Picture) -> str:
    """Which head or channel, or what mean of them: "head 0", "channel 3 (recall 0.95)", "mean of 16 channels"."""
    if isinstance(picture.which, str):
        return f"{_MEANS[picture.which]} of {picture.of} {picture.unit}{'s' if picture.of != 1 else ''}"
    note = f" ({picture.score[0]} {picture.score[1]:.2f})" if picture.score else ""
    return f"{picture.unit} {picture.which}{note}"


def _title(run: Run, found: LayerPictures, example: int, panels: Sequence[Panel]) -> str:
    """All that the panels have in common."""
    factors, heads = ({getattr(p, name) for p in panels} for name in ("factor", "head"))
    parts = [
        written(run.name),
        f"step {found.steps[0]}" if len(found.steps) == 1 else "",
        f"layer {found.layer} ({found.mixer})",
        factors.pop() if len(factors) == 1 else "",
        heads.pop() if len(heads) == 1 else "",
        f"test example {example}",
    ]
    return " · ".join(part for part in parts if part)
