"""All circuit scores of one model as tidy rows: what `analyze` saves for a checkpoint."""

import math
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from circuitscope.analysis.checkpoints.in_order import readable_at_once
from circuitscope.analysis.reading.gradients import without_gradients
from circuitscope.analysis.reading.opened import Walk, opened
from circuitscope.analysis.registry import Row, analysis
from circuitscope.analysis.scores.answers import Judged, judged
from circuitscope.analysis.scores.head_weights import compositions, copying_scores, distinct
from circuitscope.analysis.scores.held_out import HeldOut, check_scores, scores_left_out, with_later
from circuitscope.analysis.scores.of_layers import EdgeSets, layer_weights
from circuitscope.analysis.scores.registry import SCORES, Score, Sequences, row_score
from circuitscope.analysis.scores.weight_on_edges import summarize
from circuitscope.devices import on_cpu
from circuitscope.lens import HookedModel
from circuitscope.tasks import Batch

Weights = tuple[dict[str, Any], Tensor]  # what the rows of some weights say besides, and [sequence, unit]
COLUMNS = {
    "layer": "Int64",
    "head": "Int64",
    "factor": "string",
    "unit": "string",
    "score": "string",
    "weighting": "string",
    "value": "float64",
    "stderr": "float64",
    "n": "int64",
    "even": "float64",
}


@analysis(
    "scores",
    "Binding, recall and the other circuit scores of every layer, head and channel.",
    COLUMNS,
    means={
        "head": "number of the head or channel; empty for the whole layer",
        "factor": "the matrix: a factor of Φ, Φ itself, or all factors composed",
        "unit": "what head counts: heads or channels",
        "weighting": "raw: shares as they are; abs: |Φ| over its row sum; signed: Φ over the row sum of |Φ|",
        "even": "the score of a matrix whose rows are even over all positions that it may read; empty if not on edges",
    },
    leaves_out=lambda run: scores_left_out(run.config.task),
    depends_on=lambda run: sorted(with_later(check_scores(None, run.config.task))),
    at_once=lambda run, sequences: readable_at_once(run.config.model, sequences * run.config.task.max_length),
)
def every_score(model: HookedModel, data: HeldOut) -> Iterator[Row]:
    """Rows of all scores that the task can have, and of the edges that a circuit may have instead of theirs."""
    return score_rows(model, data, with_later(check_scores(None, data.task)))


@without_gradients
def score_rows(model: HookedModel, data: HeldOut, names: Sequence[str]) -> Iterator[Row]:
    """Rows (without run and step) of every score, layer, factor and unit.

    A row without a head is about the whole layer, with |Φ| summed over its units. A row without a layer is about the
    whole model.
    """
    weights, given = _passes(model, data, names, "own", answers="model" in names)
    found = on_cpu([*(per_sequence for _, per_sequence in weights), *given])
    yield from _weight_rows(weights, found[: len(weights)])
    if given:
        yield from model_rows(Judged(*found[len(weights) :]), data.own)
    for on in ("repeats", "new period"):
        if data.edges(names, on) is not None:
            weights, _ = _passes(model, data, names, on)
            yield from _weight_rows(weights, on_cpu([per_sequence for _, per_sequence in weights]))
    for rows in (SCORES[name].rows for name in names if "+" not in name):
        if rows is not None:
            yield from rows(model, data)


def _passes(
    model: HookedModel, data: HeldOut, names: Sequence[str], on: Sequences, answers: bool = False
) -> tuple[list[Weights], list[Tensor]]:
    """Weights on edges of all sequences of a kind, and what is judged of the model's answers if that is asked for."""
    every, whole = data.edges(names, on), data.batch(on)
    on_a_cpu = all(parameter.device.type == "cpu" for parameter in model.parameters())
    pieces = data.pieces(names, on) if on_a_cpu or whole is None else [(whole, every)]
    of_pieces, given = [], []
    for batch, edges in pieces:
        walk = opened(model).walk(batch.inputs, at=batch.labelled()[0] if answers else None)
        of_pieces.append(list(_weights(walk, edges, every)))
        if answers:
            given.append(judged(walk.logit_slices(), batch, walk.inputs.device))
    joined = [torch.cat([per_sequence for _, per_sequence in one]) for one in zip(*of_pieces, strict=True)]
    said = [said for said, _ in of_pieces[0]]
    return list(zip(said, joined, strict=True)), [torch.cat(part) for part in zip(*given, strict=True)]


def _weights(walk: Walk, edges: EdgeSets | None, all_edges: EdgeSets | None) -> Iterator[Weights]:
    """Weights on edges, where the model is, each with what its rows say besides.

    On the edges after the value, which only a circuit asks for, these are weights of heads or of whole layers, not of
    every channel. Without edges only the pass is made, because it gives the logits.
    """
    if edges is None or all_edges is None:
        deque(walk, maxlen=0)
        return
    for layer, product, of_units, whole in layer_weights(walk, edges):
        place: dict[str, Any] = {"layer": layer, "factor": product.name, "unit": product.unit}
        even = all_edges.even(product)
        for (name, weighting), per_sequence in of_units.items():
            if "+" not in name or (product.unit == "head" and weighting != "signed"):
                said = {"score": name, "weighting": weighting, "even": even[name], "of_units": True}
                yield {**said, **place}, per_sequence
        for name, per_sequence in whole.items():
            yield {"score": name, "weighting": "abs", "even": even[name], "of_units": False, **place}, per_sequence


def _weight_rows(weights: list[Weights], found: list[Tensor]) -> Iterator[Row]:
    """The rows of `_weights`, whose values are now on the CPU."""
    for (said, _), per_sequence in zip(weights, found, strict=True):
        place = {key: part for key, part in said.items() if key != "of_units"}
        value, stderr, n = summarize(per_sequence)
        for head, (v, e) in enumerate(zip(value.tolist(), stderr.tolist(), strict=True)):
            yield _row(value=v, stderr=e, n=n, head=head if said["of_units"] else None, **place)


@row_score(
    "copying",
    {"copying_values": "OV: raises the value it reads", "copying": "OV: raises the token it reads"},
    shown=("table",),
)
def copying_rows(model: HookedModel, data: HeldOut) -> Iterator[Row]:
    """Copying of attention heads on random tokens, and on the values of the task's own sequences."""
    if data.repeats is None:
        return
    blocks = {"copying": _one_block(data.repeats)}
    if data.own.layout.value_pos is not None and data.own.layout.value_pos.shape[1] > 1:
        values = data.own.values()
        if distinct(values):  # a task may bind two keys to one value
            blocks["copying_values"] = values
    for name, tokens in blocks.items():
        scores = copying_scores(model, tokens)
        for layer, per_sequence in zip(scores, on_cpu(list(scores.values())), strict=True):
            value, stderr, n = summarize(per_sequence)
            for head, (v, e) in enumerate(zip(value.tolist(), stderr.tolist(), strict=True)):
                yield _row(name, "share", v, e, n, layer=layer, head=head, factor="ov", unit="head")


def _one_block(batch: Batch) -> Int[Tensor, "batch token"]:
    """The first tokens of each sequence's block, as many as the shortest block has."""
    assert batch.layout.period is not None
    size = int(torch.as_tensor(batch.layout.period).min())
    first = torch.as_tensor(batch.layout.first_block).reshape(-1, 1)
    at = (first + torch.arange(size)).expand(len(batch), -1)
    return batch.tokens.gather(1, at)


@row_score(
    "composition",
    {
        "k_composition": "reads the earlier head by keys",
        "q_composition": "reads the earlier head by queries",
        "v_composition": "reads the earlier head by values",
    },
    shown=("table",),
)
def composition_rows(model: HookedModel, data: HeldOut) -> Iterator[Row]:
    """Composition of attention heads, from their weights; `factor` names the earlier head."""
    for c in compositions(model):
        layer, head = c.later
        reads = f"L{c.earlier[0]}H{c.earlier[1]}"
        yield _row(
            f"{c.through}_composition",
            *("norm", c.value, c.spread, 1),
            layer=layer,
            head=head,
            factor=reads,
            unit="head",
        )


MODEL = Score(  # computed from logits of the same pass as the weights on edges
    "model",
    {
        "accuracy": "share of the labels answered right",
        "explained_variance": "1 minus the squared error over that of answering 0, where labels are vectors",
        "loss": "cross-entropy at the labels, or squared error",
        "in_context": "loss at the later half of a sequence's labels minus loss at the earlier half",
        "loss_at_position": "loss by position",
        "accuracy_at_distance": "accuracy by how far a query is from its key",
    },
)
SCORES.add(MODEL.name, MODEL, __name__)


def model_rows(given: Judged, batch: Batch) -> Iterator[Row]:
    """What the model as a whole does, from its answers at the labelled positions.

    The rows are accuracy (or what the batch's judge measures) and loss; in_context, the loss at the later half of a
    sequence's labels minus the loss at the earlier half; loss_at_position, by position
    (`factor`); accuracy_at_distance, by how far a query is from its key.
    """
    where, _ = batch.labelled()
    length, n = batch.length, len(batch)
    sequence, pos = where // length, where % length
    loss, right = given
    for name, what in ((batch.judge.measures.replace(" ", "_"), right), ("loss", loss)):
        value, stderr, _ = summarize(_per_sequence(what, torch.ones_like(what), sequence, n)[:, None])
        yield _row(name, "mean", value.item(), stderr.item(), n)
    labels = torch.zeros(n, dtype=torch.long).index_add_(0, sequence, torch.ones_like(sequence))
    if bool((labels >= 2).all()):
        place = torch.arange(len(sequence)) - (labels.cumsum(0) - labels)[sequence]
        late = (place >= labels[sequence] / 2).float()
        later, earlier = (_per_sequence(loss, keep, sequence, n) for keep in (late, 1 - late))
        value, stderr, _ = summarize((later - earlier)[:, None])
        yield _row("in_context", "mean", value.item(), stderr.item(), n)
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
            yield _row(name, "mean", here.mean().item(), stderr, len(here), factor=called)


def _per_sequence(what: Tensor, keep: Tensor, sequence: Tensor, batch: int) -> Tensor:
    """Mean per sequence over the labels to keep."""
    total = torch.zeros(batch).index_add_(0, sequence, what * keep)
    return total / torch.zeros(batch).index_add_(0, sequence, keep).clamp(min=1)


def _row(
    score: str,
    weighting: str,
    value: float,
    stderr: float,
    n: int,
    *,
    layer: int | None = None,
    head: int | None = None,
    factor: str = "model",
    unit: str | None = None,
    even: float = math.nan,
) -> Row:
    return {
        "layer": layer,
        "head": head,
        "factor": factor,
        "unit": unit,
        "score": score,
        "weighting": weighting,
        "value": value,
        "stderr": stderr,
        "n": n,
        "even": even,
    }
