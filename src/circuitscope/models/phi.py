"""Φ of a layer of a model: whole, reduced over channels, or in slices that bound the memory."""

from collections.abc import Iterator, Sequence
from numbers import Integral
from typing import Any, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from circuitscope.errors import UserError, shown, unknown
from circuitscope.memory import check_fits
from circuitscope.mixers.phi import Factor, product
from circuitscope.models.hooked_lm import HookedLM

Reduce = Literal["mean", "mean_abs"]
_CHUNK_BYTES = 16e6


def phi(
    model: HookedLM,
    tokens: Int[Tensor, "batch pos"],
    layer: int,
    factors: str | Sequence[str] = "phi",
    reduce: Reduce | None = None,
) -> Float[Tensor, "batch head dest src"]:
    """The mixing matrix of a layer.

    Under `model.hooks(...)` it is the one that the hooked model uses, as it enters `hook_phi`: hooks before it act,
    in earlier layers and in this one; `hook_phi` itself does not.

    Args:
        factors: "phi", what stands between `hook_v` and `hook_z`; "composed", with the conv before
            and the gate after it; or names of factors, multiplied in the mixer's order.
        reduce: None gives [batch, head or channel, dest, src]; "mean" and "mean_abs" fold over heads or
            channels without building that axis and give [batch, dest, src].
    """
    if reduce not in (None, "mean", "mean_abs"):
        raise unknown("reduction", reduce, ["mean", "mean_abs"])
    chosen, count = _chosen(model, tokens, layer, factors)
    batch, pos = tokens.shape
    if reduce is None:
        size = count * _bytes(model, tokens)
        check_fits(size, tokens.device, f"Φ of {batch} sequences and {count} channels at length {pos}")
        return product(chosen, slice(0, count)).expand(batch, count, pos, pos).contiguous()
    chunk = _chunk(model, tokens)
    total = torch.zeros(batch, pos, pos, device=tokens.device)
    for _, part in _slices(chosen, count, tokens, chunk):
        total = total + (part.abs() if reduce == "mean_abs" else part).sum(dim=1)
    return total / count


def phi_chunks(
    model: HookedLM,
    tokens: Int[Tensor, "batch pos"],
    layer: int,
    factors: str | Sequence[str] = "phi",
    chunk: int | None = None,
) -> Iterator[tuple[slice, Float[Tensor, "batch channel dest src"]]]:
    """Φ in slices of channels (or heads): pairs of the slice and Φ there, about 16 MB at a time.

    The model runs once, at the call, with the hooks of that moment; the slices are built as they are asked for.
    """
    if chunk is not None and chunk < 1:
        raise UserError(f"chunk must be at least 1, got {chunk}")
    chosen, count = _chosen(model, tokens, layer, factors)
    return _slices(chosen, count, tokens, chunk or _chunk(model, tokens))


def factor_names(model: HookedLM, layer: int) -> tuple[str, ...]:
    """Names that `factors` takes for a layer, in the order in which they multiply."""
    names: tuple[str, ...] = _mixer(model, layer).factor_names
    return names


def _slices(
    chosen: list[Factor], count: int, tokens: Tensor, chunk: int
) -> Iterator[tuple[slice, Float[Tensor, "batch channel dest src"]]]:
    batch, pos = tokens.shape
    for start in range(0, count, chunk):
        channels = slice(start, min(start + chunk, count))
        yield channels, product(chosen, channels).expand(batch, -1, pos, pos)


def _bytes(model: HookedLM, tokens: Tensor) -> int:
    """Of Φ of one channel, for all sequences."""
    batch, pos = tokens.shape
    return int(batch * pos**2 * model.embed.weight.element_size())


def _chunk(model: HookedLM, tokens: Tensor) -> int:
    """Channels a slice. One is the least there is, so one must fit."""
    size = _bytes(model, tokens)
    what = f"one channel of Φ of {tokens.shape[0]} sequences at length {tokens.shape[1]}"
    check_fits(size, tokens.device, what, "use fewer or shorter sequences")
    return max(1, int(_CHUNK_BYTES // max(size, 1)))


def _chosen(model: HookedLM, tokens: Tensor, layer: int, factors: str | Sequence[str]) -> tuple[list[Factor], int]:
    """The factors asked for, and how many channels (or heads) their product has."""
    mixer = _mixer(model, layer)
    if tokens.ndim != 2:
        raise UserError(f"tokens must be [batch, pos], got shape {list(tokens.shape)}")
    if factors == "composed":
        names: Sequence[str] = mixer.factor_names
    elif factors == "phi":
        names = mixer.core
    else:
        names = [factors] if isinstance(factors, str) else list(factors)
    if not names:
        raise UserError(f"factors is empty; valid: {', '.join([*mixer.factor_names, 'phi', 'composed'])}")
    for name in names:
        if name not in mixer.factor_names:
            raise unknown("factor", name, [*mixer.factor_names, "phi", "composed"])
    if mixer.no_composed and len(set(names)) > 1 and not set(names) <= set(mixer.core):
        raise UserError(mixer.no_composed)
    every = mixer.factors(model.mixer_input(tokens, layer % model.config.n_layers))
    found = [factor for factor in every if factor.name in names]
    return found, max(factor.size for factor in found)


def _mixer(model: HookedLM, layer: int) -> Any:
    n = model.config.n_layers
    if not isinstance(layer, Integral) or not -n <= layer < n:
        raise UserError(f"layer must be from 0 to {n - 1}, got {shown(layer)}")
    mixer = model.layers[layer].mixer
    if mixer.no_phi:
        raise UserError(f"layer {layer % n} is {model.config.mixers[layer].name}: {mixer.no_phi}")
    return mixer
