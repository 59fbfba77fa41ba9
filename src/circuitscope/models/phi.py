"""Φ of a layer of a model: whole, reduced over channels, or in slices that bound the memory."""

from collections.abc import Iterator, Sequence
from typing import Any, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from circuitscope.errors import UserError, unknown
from circuitscope.mixers.phi import Factor, check_fits, product
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
        size = 4 * batch * count * pos**2
        check_fits(size, tokens.device, f"Φ of {batch} sequences and {count} channels at length {pos}")
        return product(chosen, slice(0, count)).expand(batch, count, pos, pos).contiguous()
    total = torch.zeros(batch, pos, pos, device=tokens.device)
    for _, part in phi_chunks(model, tokens, layer, factors):
        total = total + (part.abs() if reduce == "mean_abs" else part).sum(dim=1)
    return total / count


def phi_chunks(
    model: HookedLM,
    tokens: Int[Tensor, "batch pos"],
    layer: int,
    factors: str | Sequence[str] = "phi",
    chunk: int | None = None,
) -> Iterator[tuple[slice, Float[Tensor, "batch channel dest src"]]]:
    """Φ in slices of channels (or heads): pairs of the slice and Φ there, about 16 MB at a time."""
    chosen, count = _chosen(model, tokens, layer, factors)
    batch, pos = tokens.shape
    chunk = chunk or max(1, int(_CHUNK_BYTES // (4 * batch * pos**2)))
    for start in range(0, count, chunk):
        channels = slice(start, min(start + chunk, count))
        yield channels, product(chosen, channels).expand(batch, -1, pos, pos)


def factor_names(model: HookedLM, layer: int) -> tuple[str, ...]:
    """Names that `factors` takes for a layer, in the order in which they multiply."""
    names: tuple[str, ...] = _mixer(model, layer).factor_names
    return names


def _chosen(model: HookedLM, tokens: Tensor, layer: int, factors: str | Sequence[str]) -> tuple[list[Factor], int]:
    """The factors asked for, and how many channels (or heads) their product has."""
    mixer = _mixer(model, layer)
    if factors == "composed":
        names: Sequence[str] = mixer.factor_names
    elif factors == "phi":
        names = mixer.core
    else:
        names = [factors] if isinstance(factors, str) else list(factors)
    for name in names:
        if name not in mixer.factor_names:
            raise unknown("factor", name, [*mixer.factor_names, "phi", "composed"])
    if mixer.no_composed and len(names) > 1 and not set(names) <= set(mixer.core):
        raise UserError(mixer.no_composed)
    every = mixer.factors(model.mixer_input(tokens, layer % model.config.n_layers))
    found = [factor for factor in every if factor.name in names]
    return found, max(factor.size for factor in found)


def _mixer(model: HookedLM, layer: int) -> Any:
    n = model.config.n_layers
    if not -n <= layer < n:
        raise UserError(f"layer must be from 0 to {n - 1}, got {layer}")
    mixer = model.layers[layer].mixer
    if mixer.no_phi:
        raise UserError(f"layer {layer % n} is {model.config.mixers[layer].name}: {mixer.no_phi}")
    return mixer
