"""What the shown examples look like at each checkpoint: the chosen matrices, and what the model answers."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from circuitscope.analysis.checkpoints.runner import checkpoints
from circuitscope.analysis.pictures.choice import View
from circuitscope.analysis.pictures.examples import ShownExamples
from circuitscope.analysis.reading.opened import Walk, opened
from circuitscope.analysis.scores.answers import answers
from circuitscope.devices import on_cpu
from circuitscope.errors import UserError
from circuitscope.lens import HookedModel
from circuitscope.models.dtype import default_dtype
from circuitscope.progress import Progress
from circuitscope.runs.run import Run

Answer = tuple[int, float | None]  # the token, and the probability of the right one


@dataclass(frozen=True)
class Snapshot:
    """One checkpoint.

    Args:
        matrices: for every view the matrix [dest, src] of each example.
        answers: for each of the task's own examples the answer at every label.
    """

    step: int
    matrices: dict[View, list[Float[Tensor, "_dest _src"]]]
    answers: list[list[Answer]]


def snapshots(
    run: Run, steps: Sequence[int], examples: ShownExamples, views: Sequence[View], progress: Progress
) -> Iterator[Snapshot]:
    """The shown examples at each of these checkpoints; damaged ones are left out with a warning."""
    progress.start("pictures", len(steps))
    read = 0
    for step, model in checkpoints(run, steps, progress):
        yield snapshot(model, step, examples, views)
        progress.advance(step)
        read += 1
    if not read:
        raise UserError(f"no checkpoint of {run.path} could be read")


@torch.no_grad()
@default_dtype(torch.float32)
def snapshot(model: HookedModel, step: int, examples: ShownExamples, views: Sequence[View]) -> Snapshot:
    """The shown examples in one model, with one pass per length; all comes to the CPU by one transfer."""
    where, target = examples.own.labelled()
    walks = [opened(model).walk(batch.inputs, at=where if i == 0 else None) for i, batch in enumerate(examples.batches)]
    found: dict[View, list[Tensor]] = {view: [] for view in views}
    for walk in walks:
        for view, several in _chosen(walk, views):
            found[view] += several
    said: list[list[Answer]] = [[] for _ in range(len(examples.own))]
    given = []
    if not target.is_floating_point():  # answers that are vectors are written down in no picture
        given = [*answers(walks[0].logit_slices(), target.to(walks[0].inputs.device))]
    moved = iter(on_cpu([*given, *(matrix for several in found.values() for matrix in several)]))
    losses, tokens = (next(moved).tolist() for _ in given) if given else ([], [])
    found = {view: [next(moved) for _ in several] for view, several in found.items()}
    for index, token, loss in zip(where.tolist() if given else (), tokens, losses, strict=True):
        right = round(math.exp(-loss), 4) if math.isfinite(loss) else None
        said[index // examples.own.length].append((token, right))
    return Snapshot(step, found, said)


def _chosen(walk: Walk, views: Sequence[View]) -> Iterator[tuple[View, list[Float[Tensor, "dest src"]]]]:
    """Each view with its matrices, one per example, from one pass."""
    at = {(view.source.layer, view.source.factor, view.head): view for view in views}
    total: Tensor | None = None
    for mixing in walk.matrices():
        for head in range(mixing.units.start, mixing.units.stop):
            if view := at.get((mixing.layer, mixing.product.name, head)):
                yield view, list(mixing.matrix[:, head - mixing.units.start].clone())
        if view := at.get((mixing.layer, mixing.product.name, None)):
            part = mixing.matrix.abs().sum(dim=1)
            total = part if mixing.units.start == 0 or total is None else total + part
            if mixing.is_last:
                yield view, list(total / mixing.product.size)
