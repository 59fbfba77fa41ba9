"""Shows what a model uses: the accuracy it loses when edges of a mixing matrix are cut or heads are ablated.

It works the same on attention and on every Φ, on a HookedLM and on any model with TransformerLens's hook
names. "Head" is an attention head, an SSD head or a channel. The batch runs in slices, which bound the
memory that a per-channel Φ takes; the result is that of one run. The model is left as it was.

Not here: moving activations between two prompts (`causal.patching`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any, Literal, NamedTuple, get_args

import torch
from jaxtyping import Float, Int
from torch import Tensor

from circuitscope.analysis.draws import seeded
from circuitscope.analysis.reading.hooked import (
    Hooks,
    keeping,
    logits_at,
    matrix_hook,
    on_device_of,
    seen_at,
    slices,
    undisturbed,
)
from circuitscope.analysis.reading.opened import opened
from circuitscope.analysis.scores.edges import Edges, named_edges
from circuitscope.arguments import explained
from circuitscope.devices import on_cpu, widened
from circuitscope.errors import UserError, shown, unknown
from circuitscope.lens import HookedModel, layer_index
from circuitscope.progress import working
from circuitscope.tasks import Batch, check_batch

Matrix = Float[Tensor, "batch head dest src"]
Heads = Float[Tensor, "batch pos head d_head"]
Inputs = Int[Tensor, "batch pos"] | Float[Tensor, "batch pos channel"]
PerSequence = Float[Tensor, " batch"]
How = Literal["zero", "mean", "resample"]
Chosen = int | Sequence[int] | Int[Tensor, " chosen"] | None  # heads or channels; None is all of them
Before = dict[tuple[str, ...], PerSequence]  # accuracies without an edit, by the hooks that carry what is edited


@dataclass(frozen=True)
class Effect:
    """What an intervention costs: means of accuracy over n sequences.

    `lost` is before − after; `stderr` is its standard error, paired by sequence (nan for one sequence).
    """

    before: float
    after: float
    lost: float
    stderr: float
    n: int

    @property
    def share(self) -> float:
        """The share of the accuracy that is lost; nan where there was none."""
        return self.lost / self.before if self.before else float("nan")

    @staticmethod
    def of(before: PerSequence, after: PerSequence) -> "Effect":
        """The effect from accuracies per sequence."""
        before, after = on_cpu([before, after])
        lost, n = before - after, len(before)
        stderr = float(lost.std()) / n**0.5 if n > 1 else float("nan")
        return Effect(float(before.mean()), float(after.mean()), float(lost.mean()), stderr, n)


class Accuracies(NamedTuple):
    """The accuracy on each sequence without an intervention and with it, where the model is."""

    before: PerSequence
    after: PerSequence


@explained
def accuracy(model: HookedModel, batch: Batch, hooks: Hooks = ()) -> PerSequence:
    """Share of the labelled positions of each sequence whose largest logit is the label's.

    Where labels are vectors, it is the mean of what `Batch.right` gives, such as the explained variance.

    Args:
        hooks: pairs of a hook's name and a function (value, hook) → value, as `run_with_hooks` takes
            them. Every activation they see covers the whole batch and all positions.
    """
    _check_labels(batch)
    with undisturbed(model):
        return _share_right(model, on_device_of(model, batch.inputs), batch.to("cpu"), hooks)


@explained
def cut(matrix: Matrix, edges: Edges, *, heads: int | Sequence[int] | None = None, renormalize: bool = False) -> Matrix:
    """A copy of a mixing matrix with M[dest, src] = 0 on the edges, in all heads or in some.

    Args:
        renormalize: scale what is left of a row to the row's former sum, as if the softmax had never
            seen those positions. Only for matrices without negative entries; an emptied row stays zero.
    """
    if matrix.ndim != 4 or len(matrix) != len(edges.dests) or matrix.shape[2:] != (edges.length, edges.length):
        raise UserError(
            f"the matrix is {tuple(matrix.shape)}, but the edges are of {len(edges.dests)} sequences"
            f" of length {edges.length}; expected [batch, head, dest, src]"
        )
    return _cut(matrix, edges, slice(0, len(matrix)), heads, renormalize)


@explained
def knock_out(
    model: HookedModel,
    batch: Batch,
    edges: Edges | str,
    *,
    layer: int | Sequence[int],
    heads: int | Sequence[int] | None = None,
    factor: str = "phi",
    renormalize: bool = False,
    before: Before | None = None,
) -> Effect:
    """Accuracy lost when M[dest, src] is set to 0 on a set of edges.

    Args:
        edges: a set of edges, or its name, as `analysis.named_edges` takes it: "recall", "query<-filler".
        layer: one layer, or several that are cut at once.
        heads: which heads or channels are cut, one or several; all by default.
        factor: the matrix to cut: "phi", which turns values into z, or a factor with a hook of its own: "conv", the
            short conv before the values, or "shift", RWKV's token shift.
        renormalize: see `cut`.
        before: accuracies without the cut, which several knockouts in one model on one batch share; they are added to
            it and taken from it.
    """
    return Effect.of(*with_edges_cut(model, batch, edges, layer, heads, factor, renormalize, before))


def with_edges_cut(
    model: HookedModel,
    batch: Batch,
    edges: Edges | str,
    layer: int | Sequence[int],
    heads: Chosen = None,
    factor: str = "phi",
    renormalize: bool = False,
    before: Before | None = None,
) -> Accuracies:
    """The accuracies behind `knock_out`, where the model is."""
    check_batch(batch)
    chosen = named_edges(edges, batch.layout) if isinstance(edges, str) else edges
    if len(chosen.dests) != len(batch) or chosen.length != batch.length:
        raise UserError(
            f"the edges are of {len(chosen.dests)} sequences of length {chosen.length},"
            f" the batch has {len(batch)} of length {batch.length}"
        )
    layers = list(layer) if isinstance(layer, Sequence) else [layer]
    tokens = on_device_of(model, batch.inputs)
    with undisturbed(model):
        names = [matrix_hook(model, i, factor, tokens) for i in layers]

    def edit(rows: slice, seen: dict[str, Tensor]) -> Hooks:
        def cutting(matrix: Matrix, hook: Any) -> Matrix:
            return _cut(matrix, chosen, rows, heads, renormalize)

        return [(name, cutting) for name in names]

    return _effect(model, batch, names, edit, before)


@explained
def ablate(
    model: HookedModel,
    batch: Batch,
    *,
    layer: int,
    heads: int | Sequence[int] | None = None,
    how: How = "zero",
    frozen: bool = True,
    seed: int = 0,
) -> Effect:
    """Accuracy lost when the output z of heads or channels is replaced.

    Args:
        heads: which heads or channels, one or several; by default all of the layer.
        how: "zero"; "mean", over the sequences of the batch, at each position; or "resample", what the
            heads give on another sequence of the batch; each sequence is used once.
        frozen: Φ (the pattern) of all later layers stays as it is without the ablation, so that only
            what the heads pass on as values is lost; False lets Φ change.
        seed: seed for the choice of the other sequence.
    """
    return Effect.of(*with_heads_replaced(model, batch, layer, heads, how, frozen, seed))


def with_heads_replaced(
    model: HookedModel,
    batch: Batch,
    layer: int,
    heads: Chosen = None,
    how: How = "zero",
    frozen: bool = True,
    seed: int = 0,
) -> Accuracies:
    """The accuracies behind `ablate`, where the model is."""
    check_batch(batch)
    layer, name = layer_index(model, layer), opened(model).hook(layer, "hook_z")
    if how not in get_args(How):
        raise unknown("ablation", how, get_args(How))
    tokens = on_device_of(model, batch.inputs)
    later = _matrices_after(model, layer, tokens) if frozen else []
    other = _derangement(len(tokens), seed).to(tokens.device) if how == "resample" else None
    mean = _mean_at(model, tokens, name) if how == "mean" else None

    def edit(rows: slice, seen: dict[str, Tensor]) -> Hooks:
        given = mean if other is None else seen_at(model, tokens[other[rows]], [name])[name]

        def replacing(z: Heads, hook: Any) -> Heads:
            z, which = z.clone(), _heads(heads, z.shape[2])
            z[:, :, which] = 0 if given is None else given[:, :, which].to(z.dtype)
            return z

        return [(name, replacing), *[(phi, _always(seen[phi])) for phi in later]]

    return _effect(model, batch, later, edit)


def _effect(
    model: HookedModel,
    batch: Batch,
    through: list[str],
    edit: Callable[[slice, dict[str, Tensor]], Hooks],
    known: Before | None = None,
) -> Accuracies:
    """Accuracy before and after an edit, slice by slice.

    `edit(rows, seen)` gives the hooks for some sequences; `seen` holds what the hooks `through` carry
    without the edit. Both runs take the code path that those hooks require, so an edit that changes nothing
    loses nothing.
    """
    _check_labels(batch)
    tokens, batch = on_device_of(model, batch.inputs), batch.to("cpu")
    before, after = [], []
    was = None if known is None else known.get(tuple(through))
    with undisturbed(model):
        for rows in slices(model, tokens, through, int(batch.has_label().sum(dim=1).max())):
            working(f"sequence {rows.start} of {len(tokens)} with {', '.join(through) or 'all'} edited")
            seen: dict[str, Tensor] = {}
            if was is None:
                before.append(_share_right(model, tokens[rows], batch.part(rows), keeping(through, seen)))
            after.append(_share_right(model, tokens[rows], batch.part(rows), edit(rows, seen)))
    was = torch.cat(before) if was is None else was
    if known is not None:
        known[tuple(through)] = was
    return Accuracies(was, torch.cat(after))


def _share_right(model: HookedModel, inputs: Inputs, batch: Batch, hooks: Hooks) -> PerSequence:
    """The share where the model is, from inputs there; the batch is on the CPU, where its labels are known."""
    where, count = (x.to(inputs.device) for x in (batch.labelled()[0], batch.has_label().sum(dim=1)))
    right = batch.right(logits_at(model, inputs, where, hooks))
    total = torch.zeros(len(inputs), device=inputs.device, dtype=right.dtype)
    return total.index_add_(0, where // batch.length, right) / count


def _check_labels(batch: Batch) -> None:
    check_batch(batch)
    without = ~batch.has_label().any(dim=1)
    if without.any():
        raise UserError(
            f"accuracy needs a labelled position in every sequence; sequence {int(without.int().argmax())} has none"
        )


def _cut(matrix: Matrix, edges: Edges, rows: slice, heads: Chosen, renormalize: bool) -> Matrix:
    """`cut` for the matrix of the sequences `rows`; the edges are those of all sequences."""
    if renormalize and (matrix < 0).any():
        raise UserError(
            "renormalize is for attention: this matrix has negative entries, and a share of a signed sum means nothing"
        )
    here = (edges.sequence >= rows.start) & (edges.sequence < rows.stop)
    sequence, dest, src = (
        x[here, None].to(matrix.device) for x in (edges.sequence - rows.start, edges.dest, edges.src)
    )
    out = matrix.clone()
    which = torch.as_tensor(_heads(heads, matrix.shape[1]), dtype=torch.long, device=matrix.device)
    out[sequence, which, dest, src] = 0
    if not renormalize:
        return out
    left = out.sum(dim=-1, keepdim=True)
    return out * torch.where(left > 0, matrix.sum(dim=-1, keepdim=True) / left, torch.ones_like(left))


def _heads(heads: Chosen, count: int) -> list[int] | Int[Tensor, " chosen"]:
    if heads is None:
        return list(range(count))
    if isinstance(heads, Tensor):  # whether its numbers are in range is not asked: that would wait for a GPU
        return heads
    heads = [heads] if isinstance(heads, int) else heads
    for head in heads:
        if not isinstance(head, Integral) or not 0 <= head < count:
            raise UserError(f"the layer has {count} heads or channels, 0 to {count - 1}; got {shown(head)}")
    return list(heads)


def _matrices_after(model: HookedModel, layer: int, tokens: Inputs) -> list[str]:
    """Hooks of Φ in the later layers."""
    try:
        with undisturbed(model):
            return [matrix_hook(model, i, "phi", tokens) for i in range(layer + 1, opened(model).n_layers)]
    except UserError as error:
        raise UserError(f"frozen=True holds Φ of every later layer; {error}; use frozen=False") from None


def _derangement(n: int, seed: int) -> Int[Tensor, " batch"]:
    """For each sequence another one, each used once: a random cycle through all."""
    if n < 2:
        raise UserError(f"resample takes z from another sequence; expected a batch of at least 2, got {n}")
    cycle = torch.randperm(n, generator=seeded(seed))
    out = torch.empty_like(cycle)
    out[cycle] = cycle.roll(1)
    return out


def _mean_at(model: HookedModel, tokens: Inputs, name: str) -> Float[Tensor, "one pos head d"]:
    """Mean over all sequences of what a hook carries, by position."""
    total: Tensor | float = 0.0
    with undisturbed(model):
        for rows in slices(model, tokens, [name]):
            total = total + widened(seen_at(model, tokens[rows], [name])[name]).sum(dim=0, keepdim=True)
    assert isinstance(total, Tensor)
    return total / len(tokens)


def _always(value: Tensor) -> Callable[..., Tensor]:
    """A hook that gives this value, whatever it receives."""
    return lambda _, hook: value
