"""The Φ figure of a run: a layer's mixing matrices on one held-out example, at one checkpoint or several."""

from collections.abc import Sequence
from pathlib import Path

from circuitscope.analysis.checkpoints.runner import data_of, saved_steps
from circuitscope.analysis.checkpoints.steps import Steps, choose_steps
from circuitscope.analysis.scores.edges import named_edges
from circuitscope.errors import UserError, shown
from circuitscope.models.hooked_lm import HookedLM
from circuitscope.runs.run import Run
from circuitscope.tasks import Batch, Layout
from circuitscope.viz.heatmap import Axis, Scale, heatmap
from circuitscope.viz.panels import MOST, Heads, Panel, core_name, factors_to_draw, read_panels, strongest_heads
from circuitscope.viz.style import Sheet, written

FEW_HEADS = 8  # of attention are shown one by one; more, and channels, as a mean
_SEQUENCES = 32  # that heads are ranked on


def phi_figure(
    run: Run | str | Path,
    layer: int = 0,
    *,
    steps: Steps = None,
    example: int = 0,
    factors: str | Sequence[str] | None = None,
    heads: Heads | None = None,
    top: int | None = None,
    by: str | None = None,
    scale: Scale | None = None,
    mark: Sequence[str] = (),
) -> Sheet:
    """Attention or Φ of a layer on one example of the test split.

    Args:
        steps: checkpoints, one panel each; the last unless told.
        example: which held-out example, from 0.
        factors: names of factors, "phi", "composed", or "all" of them side by side. Unless told all at one step; over
            several steps the composed matrix, or Φ where there is none.
        heads: heads or channels by number, "all", "mean", "mean_abs". Unless told every head of attention up to 8 of
            them, mean |Φ| of all others.
        top: in place of `heads` the so many strongest by a score at the last of the steps.
        by: the score, a set of edges as `analysis.edges.named_edges` takes it; recall on tasks with pairs, induction
            on repeated blocks.
        scale: "signed", "share" or "log", as `viz.heatmap.heatmap` says.
        mark: sets of edges to point at, such as "recall" and "binding".
    """
    run = Run.of(run)
    saved = saved_steps(run)
    chosen = choose_steps(saved[-1:] if steps is None else steps, saved)
    if len(chosen) > MOST:
        raise UserError(f"{len(chosen)} steps are more than a figure holds ({MOST}); name some, such as 0:2000:200")
    if top is not None and heads is not None:
        raise UserError("give heads by number or the strongest of them, not both")
    if by is not None and top is None:
        raise UserError(f"by {by} ranks the strongest heads: say how many with top")
    batch = example_of(run, example)
    model = run.load(chosen[-1])
    wanted = factors if factors is not None else ("all" if len(chosen) == 1 else _whole(model, layer))
    names = list(factors_to_draw(model, layer, wanted))
    layer = layer % model.config.n_layers
    notes: dict[tuple[str, int], str] = {}
    if top is not None:
        whole = _whole(model, layer)
        ranked_on = whole if whole in names else names[0]
        by = by or default_score(batch.layout)
        ranked = strongest_heads(model, data_of(run, _SEQUENCES).own, layer, ranked_on, by, top)
        heads = [r.head for r in ranked]
        notes = {(ranked_on, r.head): f"{by} {r.score:.2f}" for r in ranked}
    heads = heads if heads is not None else _heads(model, layer, names)
    panels: list[Panel] = []
    for step in chosen:
        here = model if step == chosen[-1] else run.load(step)
        panels += read_panels(here, batch.tokens[0], layer, factors=names, heads=heads, step=step, notes=notes)
        if len(panels) > MOST:
            raise UserError(f"more panels than a figure holds ({MOST}); ask for fewer steps, factors or heads")
    marks = {}
    for name in mark:
        edges = named_edges(name, batch.layout)
        marks[name] = (edges.dest.tolist(), edges.src.tolist())
    return heatmap(
        panels,
        axis=Axis(batch.tokens[0].tolist(), batch.layout.roles[0].tolist()),
        scale=scale,
        title=_title(run, chosen, layer, example, panels),
        marks=marks,
        about={"run": run.name, "layer": layer, "example": example},
    )


def example_of(run: Run, example: int) -> Batch:
    """One held-out example, of those the analysis uses."""
    if example < 0:
        raise UserError(f"example must be 0 or more, got {shown(example)}")
    config = run.config
    return config.task.batch(example, split="test", size=1, seed=config.train.batch_seed)


def default_score(layout: Layout) -> str:
    """What heads are ranked by on such sequences."""
    if layout.value_pos is not None:
        return "recall"
    return "induction" if layout.period is not None else "previous_token"


def _whole(model: HookedLM, layer: int) -> str:
    """The matrix that says most: all factors composed, or Φ where they cannot be."""
    every = factors_to_draw(model, layer)
    return "composed" if "composed" in every else core_name(model.layers[layer].mixer.core)


def _heads(model: HookedLM, layer: int, names: Sequence[str]) -> Heads:
    mixer = model.layers[layer].mixer
    few = mixer.d_head > 1 and mixer.n_heads <= FEW_HEADS
    return "all" if few and names == [core_name(mixer.core)] else "mean_abs"


def _title(run: Run, steps: Sequence[int], layer: int, example: int, panels: Sequence[Panel]) -> str:
    """All that the panels have in common."""
    factors, heads = ({getattr(p, name) for p in panels} for name in ("factor", "head"))
    parts = [
        written(run.name),
        f"step {steps[0]}" if len(steps) == 1 else "",
        f"layer {layer} ({run.config.model.mixers[layer].name})",
        factors.pop() if len(factors) == 1 else "",
        heads.pop() if len(heads) == 1 else "",
        f"test example {example}",
    ]
    return " · ".join(part for part in parts if part)
