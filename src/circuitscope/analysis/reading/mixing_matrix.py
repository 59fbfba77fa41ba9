"""The mixing matrix Φ of a layer of a model: whole, reduced over its units, or in slices that bound the memory."""

from collections.abc import Iterator, Sequence
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from circuitscope.analysis.reading.opened import opened
from circuitscope.arguments import explained
from circuitscope.errors import UserError, unknown
from circuitscope.lens import HookedModel, layer_index
from circuitscope.memory import check_fits
from circuitscope.mixers.reading import Product, Reading
from circuitscope.models.inputs import InputsLike

Reduce = Literal["mean", "mean_abs"]


@explained
def phi(
    model: HookedModel,
    tokens: InputsLike,
    layer: int,
    factors: str | Sequence[str] = "phi",
    reduce: Reduce | None = None,
) -> Float[Tensor, "batch *unit dest src"]:
    """The mixing matrix of a layer.

    Inside `with model.hooks(...)` this is the matrix of the hooked model, as it enters `hook_phi`: the hooks before
    that point act, in earlier layers and in this one, and `hook_phi` itself does not.

    Args:
        model: a HookedLM, or any model with TransformerLens's hooks; then Φ is its attention pattern.
        tokens: token numbers [batch, pos]; one sequence [pos] is a batch of one.
        layer: counted from 0; −1 is the last.
        factors: "phi" is the matrix between `hook_v` and `hook_z`; "composed" includes the conv before it and the gate
            after it; names of factors are multiplied in the mixer's order.
        reduce: None gives [batch, head or channel, dest, src]; "mean" and "mean_abs" average over heads or
            channels without building that axis and give [batch, dest, src].
    """
    if reduce not in (None, "mean", "mean_abs"):
        raise unknown("reduction", reduce, ["mean", "mean_abs"])
    reading, product = _matrix(model, tokens, layer, factors)
    weight = next(model.parameters())
    if reduce is None:
        size = product.size * _bytes(weight, reading)
        what = f"Φ of {reading.batch} sequences and {product.size} {product.unit}s at length {reading.length}"
        check_fits(size, weight.device, what)
        ((_, whole),) = reading.slices(product, units=product.size)
        return whole.contiguous()
    slices = _slices(weight, reading, product)  # first, because it refuses what does not fit
    total = torch.zeros(reading.batch, reading.length, reading.length, device=weight.device)
    for _, part in slices:
        total = total + (part.abs() if reduce == "mean_abs" else part).sum(dim=1)
    return total / product.size


@explained
def phi_chunks(
    model: HookedModel,
    tokens: InputsLike,
    layer: int,
    factors: str | Sequence[str] = "phi",
    chunk: int | None = None,
) -> Iterator[tuple[slice, Float[Tensor, "batch unit dest src"]]]:
    """Φ in slices of heads or channels: pairs of a slice and its Φ, about 8 MB at a time by default.

    The model runs once, at the call, with the hooks that are set then; each slice is built when it is asked for.
    """
    if chunk is not None and chunk < 1:
        raise UserError(f"chunk must be at least 1, got {chunk}")
    reading, product = _matrix(model, tokens, layer, factors)
    return _slices(next(model.parameters()), reading, product, chunk)


def _slices(
    weight: Tensor, reading: Reading, product: Product, units: int | None = None
) -> Iterator[tuple[slice, Float[Tensor, "batch unit dest src"]]]:
    """The slices of a product. The smallest slice is one unit, so one unit must fit into memory."""
    what = f"one channel of Φ of {reading.batch} sequences at length {reading.length}"
    check_fits(_bytes(weight, reading), weight.device, what, "use fewer or shorter sequences")
    return reading.slices(product, units=units)


def _bytes(weight: Tensor, reading: Reading) -> int:
    """The bytes of one unit's Φ for all sequences, in the type of the model's weights."""
    return int(reading.batch * reading.length**2 * weight.element_size())


def _matrix(
    model: HookedModel, tokens: InputsLike, layer: int, factors: str | Sequence[str]
) -> tuple[Reading, Product]:
    subject = opened(model)
    reading = subject.reading(tokens, layer)
    if reading.no_phi:
        layer = layer_index(model, layer)
        raise UserError(f"layer {layer} is {subject.called(layer)}: {reading.no_phi}")
    return reading, reading.product(factors)
