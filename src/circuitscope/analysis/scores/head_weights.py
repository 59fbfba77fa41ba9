"""Scores of attention heads read from their weights: copying (OV) and composition (QK with OV)."""

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any, NamedTuple, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor

from circuitscope.analysis.reading.gradients import without_gradients
from circuitscope.analysis.reading.hooked import keeping, on_device_of
from circuitscope.analysis.reading.opened import opened
from circuitscope.analysis.scores.weight_on_edges import PerSequence
from circuitscope.arguments import explained
from circuitscope.devices import on_cpu
from circuitscope.errors import UserError
from circuitscope.lens import HookedModel, layer_index

_DRAWS = 32


@explained
def copying_score(model: HookedModel, layer: int, tokens: Int[Tensor, "batch pos"]) -> PerSequence:
    """How far a head raises the logit of the token it attends to, in −1..1.

    For each position j, the final norm's weight and the unembedding turn W_O v_j into logits of the tokens of the
    sequence. The logits are centred and negative ones dropped; s is the share of token j in the rest. The score is
    2s − 1 (0 where nothing is raised), averaged over positions. The tokens of a sequence must differ. On n tokens,
    a head that copies nothing scores about 2/n − 1.
    """
    layer = layer_index(model, layer)
    if layer not in opened(model).attention():
        raise UserError(f"copying is a score of attention heads; layer {layer} is {opened(model).called(layer)}")
    return copying_scores(model, tokens, [layer])[layer]


@torch.no_grad()
def copying_scores(
    model: HookedModel, tokens: Int[Tensor, "batch pos"], layers: Sequence[int] | None = None
) -> dict[int, PerSequence]:
    """`copying_score` by layer, by default of all attention layers, in one pass of the model."""
    if not distinct(tokens):
        raise UserError("copying needs sequences of distinct tokens")
    tokens = on_device_of(model, tokens)
    chosen = list(opened(model).attention()) if layers is None else layers
    if not chosen:
        return {}
    names = {i: f"blocks.{i}.mixer.hook_v" for i in chosen}
    values: dict[str, Tensor] = {}
    own: Any = model  # only this package's models answer `attention()` with layers
    with own.hooks(fwd_hooks=[*keeping(list(names.values()), values)]):
        own.hidden(tokens, at=tokens.new_empty(0))  # what follows the last mixer is not needed
    unembedded = own.W_U.T[tokens]
    return {i: _copying(own, i, values[name], unembedded) for i, name in names.items()}


def distinct(tokens: Int[Tensor, "batch pos"]) -> bool:
    """Whether no sequence has a token twice."""
    ordered = tokens.sort(dim=1).values
    return not bool((ordered[:, 1:] == ordered[:, :-1]).any())


def _copying(
    model: Any,
    layer: int,
    v: Float[Tensor, "batch pos head d_head"],
    unembedded: Float[Tensor, "batch pos d_model"],
) -> PerSequence:
    """The copying score of a layer from its values and the unembeddings of the tokens."""
    y = torch.einsum("bjhd,hdm->bhjm", v, opened(model).attention()[layer].W_O)
    y = (y - y.mean(dim=-1, keepdim=True)) * model.ln_final.weight
    logits = torch.einsum("bhjm,btm->bhjt", y, unembedded)
    raised = (logits - logits.mean(dim=-1, keepdim=True)).relu()
    total = raised.sum(dim=-1)
    some = total > 1e-5 * y.norm(dim=-1)  # smaller totals are rounding errors
    share = raised.diagonal(dim1=-2, dim2=-1) / torch.where(some, total, torch.ones_like(total))
    return torch.where(some, 2 * share - 1, 0).mean(dim=-1)


class Composition(NamedTuple):
    """How strongly a later head reads what an earlier head writes, through its queries, keys or values."""

    earlier: tuple[int, int]
    later: tuple[int, int]
    through: str  # "q", "k" or "v"
    value: float
    baseline: float
    spread: float  # standard deviation of the baseline over draws


@without_gradients
@explained
def compositions(model: HookedModel) -> Iterator[Composition]:
    """‖W_OV W‖ / (‖W_OV‖ ‖W‖) minus the mean of that over Gaussian matrices of the same shapes.

    W is the later head's W_QK, read through the queries (q) or the keys (k), or its W_OV (v). Norms are Frobenius
    norms, and the weight of the later layer's norm is folded in.
    """
    layers = opened(model).attention()
    weights = [
        part
        for layer, mixer in layers.items()
        for part in (mixer.W_Q, mixer.W_K, mixer.W_V, mixer.W_O, cast(Any, model).blocks[layer].ln1.weight)
    ]
    numbers = on_cpu(weights)
    by_layer = {layer: numbers[5 * i : 5 * i + 5] for i, layer in enumerate(layers)}
    for later, mixer in layers.items():
        W_Q, W_K, W_V, W_O, norm = by_layer[later]
        norm = norm[:, None]
        for earlier, writer in layers.items():
            if earlier >= later:
                continue
            for g in range(writer.n_heads):
                written = by_layer[earlier][2][g] @ by_layer[earlier][3][g]
                for h in range(mixer.n_heads):
                    q, k = norm * W_Q[h], norm * W_K[h]
                    readers = {
                        "q": q @ k.T,
                        "k": k @ q.T,
                        "v": norm * W_V[h] @ W_O[h],
                    }
                    for through, reader in readers.items():
                        baseline, spread = _baseline(written.shape[0], writer.d_head, mixer.d_head)
                        value = _ratio(written, reader) - baseline
                        yield Composition((earlier, g), (later, h), through, value, baseline, spread)


def _ratio(written: Float[Tensor, "d_model d_model"], reader: Float[Tensor, "d_model d_model"]) -> float:
    both = (written @ reader).norm() / (written.norm() * reader.norm())
    return float(torch.nan_to_num(both))


@lru_cache(maxsize=64)
def _baseline(d_model: int, d_written: int, d_read: int) -> tuple[float, float]:
    generator = torch.Generator().manual_seed(0)

    def draw(inner: int) -> Float[Tensor, "d_model d_model"]:
        narrow = torch.randn(d_model, inner, generator=generator)
        return narrow @ torch.randn(inner, d_model, generator=generator)

    ratios = torch.tensor([_ratio(draw(d_written), draw(d_read)) for _ in range(_DRAWS)])
    return float(ratios.mean()), float(ratios.std())
