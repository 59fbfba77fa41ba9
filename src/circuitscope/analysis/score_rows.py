"""All circuit scores of one model as tidy rows: what `analyze` saves for a checkpoint."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from circuitscope.analysis.answers import Answers, answers
from circuitscope.analysis.edges import EDGES, ON_PAIRS, ON_REPEATS, Edges, named_edges
from circuitscope.analysis.matrices import Reading
from circuitscope.analysis.scores import Weighting, summarize, weights_on
from circuitscope.analysis.weights import compositions, copying_scores
from circuitscope.errors import UserError, unknown
from circuitscope.hooks import HookedRootModule
from circuitscope.models import HookedLM
from circuitscope.tasks import Batch, Induction, Layout, Task

Row = dict[str, Any]

COLUMNS = {
    "run": "string",
    "step": "int64",
    "layer": "Int64",
    "head": "Int64",
    "factor": "string",
    "score": "string",
    "weighting": "string",
    "value": "float64",
    "stderr": "float64",
    "n": "int64",
}
SCORES = (*EDGES, "copying", "composition", "model")


class Data:
    """The sequences that scores are computed on: the task's own (held out), and repeated random blocks.

    Args:
        longest: positions the model can take.
        seed: of the examples.
    """

    def __init__(self, task: Task, *, longest: int, sequences: int = 256, seed: int = 0):
        self.sequences = sequences
        self.own = task.batch(0, split="test", size=sequences, seed=seed)
        self.repeats: Batch | None = None
        if isinstance(task, Induction):
            self.repeats = self.own
        elif min(longest, 101) >= 9:
            repeats = Induction.fitting(min(longest, 101), task.needs()["vocab_size"])
            self.repeats = repeats.batch(0, split="test", size=sequences, seed=seed)
        self.sets: dict[str, list[Edges]] = {}

    def edges(self, names: Sequence[str], on: str) -> list[Edges]:
        """The named sets of edges on "own" or "repeats" sequences, those that exist there."""
        key = f"{on}:{','.join(names)}"
        if key not in self.sets:
            batch = self.own if on == "own" else self.repeats
            fits = [n for n in names if batch is not None and _on(n, batch.layout) == on]
            self.sets[key] = [named_edges(n, batch.layout) for n in fits] if batch is not None else []
        return self.sets[key]


def _on(name: str, layout: Layout) -> str | None:
    """Which sequences a score belongs on, or None where this layout cannot have it."""
    if name in ON_REPEATS:
        return "repeats" if layout.period is not None else None
    if name in ON_PAIRS and layout.value_pos is None:
        return None
    return "own"


def check_scores(names: Sequence[str] | None, task: Task) -> tuple[str, ...]:
    """The scores asked for, refused where the task cannot have them; all that it can have if none are named."""
    layout = task.batch(0, split="test", size=1).layout
    possible = tuple(n for n in SCORES if not (n in ON_PAIRS and layout.value_pos is None))
    for name in names or ():
        if name not in SCORES:
            raise unknown("score", name, SCORES)
        if name not in possible:
            raise UserError(
                f"{name} needs a task with keys, values and queries, and {task.name} has none; valid: "
                + ", ".join(possible)
            )
    return tuple(names or possible)


@torch.no_grad()
def score_rows(model: HookedRootModule, data: Data, names: Sequence[str]) -> Iterator[Row]:
    """Rows (without run and step) of every score, layer, factor and head.

    Row with no head: the whole layer, |Φ| summed over its heads. Row with no layer: the whole model.
    """
    edge_names = [n for n in names if n in EDGES]
    where, target = data.own.labelled()
    wants_model = "model" in names
    own = Reading(model, data.own.tokens, at=where if wants_model else None)
    yield from _matrix_rows(own, data.edges(edge_names, "own"))
    if wants_model:
        yield from model_rows(answers(own.logit_slices(), target), data.own)
    if data.repeats is not None and (sets := data.edges(edge_names, "repeats")):
        yield from _matrix_rows(Reading(model, data.repeats.tokens), sets)
    if isinstance(model, HookedLM):
        if "copying" in names:
            yield from _copying_rows(model, data)
        if "composition" in names:
            yield from _composition_rows(model)


def _matrix_rows(reading: Reading, sets: list[Edges]) -> Iterator[Row]:
    whole: Tensor | None = None
    for layer, factor, heads, of, matrix in reading:
        weightings: list[Weighting] = ["raw"] if factor == "pattern" else ["abs", "signed"]
        for (name, weighting), per_sequence in weights_on(sets, matrix, weightings).items():
            value, stderr, n = summarize(per_sequence)
            for i, (v, e) in enumerate(zip(value.tolist(), stderr.tolist(), strict=True)):
                yield _row(layer, heads.start + i, factor, name, weighting, v, e, n)
        if of == 1:
            continue
        part = matrix.abs().sum(dim=1, keepdim=True) if matrix.stride(0) else _shared(matrix)
        whole = part if heads.start == 0 or whole is None else whole + part
        if heads.stop == of:
            for (name, weighting), per_sequence in weights_on(sets, whole, ["abs"]).items():
                value, stderr, n = summarize(per_sequence)
                yield _row(layer, None, factor, name, weighting, value.item(), stderr.item(), n)


def _shared(matrix: Tensor) -> Tensor:
    """Σ over heads of |M| where all sequences share one matrix."""
    return matrix[:1].abs().sum(dim=1, keepdim=True).expand(len(matrix), -1, -1, -1)


def _copying_rows(model: HookedLM, data: Data) -> Iterator[Row]:
    if data.repeats is None:
        return
    assert data.repeats.layout.period is not None
    blocks = {"copying": data.repeats.tokens[:, 1 : 1 + data.repeats.layout.period]}
    if data.own.layout.value_pos is not None and data.own.layout.value_pos.shape[1] > 1:
        blocks["copying_values"] = data.own.tokens.gather(1, data.own.layout.value_pos)
    for name, tokens in blocks.items():
        for layer, per_sequence in copying_scores(model, tokens).items():
            value, stderr, n = summarize(per_sequence)
            for head, (v, e) in enumerate(zip(value.tolist(), stderr.tolist(), strict=True)):
                yield _row(layer, head, "ov", name, "share", v, e, n)


def _composition_rows(model: HookedLM) -> Iterator[Row]:
    for c in compositions(model):
        reads = f"L{c.earlier[0]}H{c.earlier[1]}"
        yield _row(*c.later, reads, f"{c.through}_composition", "norm", c.value, c.spread, 1)


def model_rows(given: Answers, batch: Batch) -> Iterator[Row]:
    """What the model as a whole does, from its answers at the labelled positions.

    accuracy, loss; in_context, the loss at the later half of a sequence's labels minus at the earlier;
    loss_at_position by position (`factor`); accuracy_at_distance by how far a query is from its key.
    """
    where, target = batch.labelled()
    length, n = batch.tokens.shape[1], len(batch)
    sequence, pos = where // length, where % length
    loss, right = given.loss, (given.token == target).float()
    for name, what in (("accuracy", right), ("loss", loss)):
        value, stderr, _ = summarize(_per_sequence(what, torch.ones_like(what), sequence, n)[:, None])
        yield _row(None, None, "model", name, "mean", value.item(), stderr.item(), n)
    labels = torch.zeros(n, dtype=torch.long).index_add_(0, sequence, torch.ones_like(sequence))
    if bool((labels >= 2).all()):
        place = torch.arange(len(sequence)) - (labels.cumsum(0) - labels)[sequence]
        late = (place >= labels[sequence] / 2).float()
        later, earlier = (_per_sequence(loss, keep, sequence, n) for keep in (late, 1 - late))
        value, stderr, _ = summarize((later - earlier)[:, None])
        yield _row(None, None, "model", "in_context", "mean", value.item(), stderr.item(), n)
    yield from _binned("loss_at_position", loss, pos, [(p, p) for p in pos.unique().tolist()])
    if batch.layout.key_pos is not None and batch.layout.query_pos is not None:
        asked = torch.zeros(n, length, dtype=torch.long)
        assert batch.layout.query_pair is not None
        asked.scatter_(1, batch.layout.query_pos, batch.layout.key_pos.gather(1, batch.layout.query_pair))
        bins = [(2**i, 2 ** (i + 1) - 1) for i in range(length.bit_length())]
        yield from _binned("accuracy_at_distance", right, pos - asked[sequence, pos], bins)


def _binned(name: str, what: Tensor, of: Tensor, bins: list[tuple[int, int]]) -> Iterator[Row]:
    """Means over the labels whose `of` lies in a bin; n counts these labels."""
    for low, high in bins:
        here = what[(of >= low) & (of <= high)]
        if len(here) > 1:
            stderr = here.std().item() / len(here) ** 0.5
            called = str(low) if low == high else f"{low}-{high}"
            yield _row(None, None, called, name, "mean", here.mean().item(), stderr, len(here))


def _per_sequence(what: Tensor, keep: Tensor, sequence: Tensor, batch: int) -> Tensor:
    """Mean by sequence over the labels kept."""
    total = torch.zeros(batch).index_add_(0, sequence, what * keep)
    return total / torch.zeros(batch).index_add_(0, sequence, keep).clamp(min=1)


def _row(
    layer: int | None, head: int | None, factor: str, score: str, weighting: str, value: float, stderr: float, n: int
) -> Row:
    return {
        "layer": layer,
        "head": head,
        "factor": factor,
        "score": score,
        "weighting": weighting,
        "value": value,
        "stderr": stderr,
        "n": n,
    }
