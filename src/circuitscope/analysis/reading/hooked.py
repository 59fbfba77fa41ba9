"""Runs a model with hooks, in slices of the batch so that memory stays bounded, and leaves the model as it was.

Hooks are found by name: this package's (`blocks.i.mixer.hook_phi`) or TransformerLens's
(`blocks.i.attn.hook_pattern`), so this works for HookedLM, any other HookedRootModule and TransformerBridge.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from circuitscope.analysis.reading.opened import opened
from circuitscope.errors import UserError
from circuitscope.lens import HookedModel

Tokens = Int[Tensor, "batch pos"] | Float[Tensor, "batch pos channel"]  # or vectors
Hooks = Sequence[tuple[str, Callable[..., Tensor | None]]]

SLICE_BYTES = 64e6  # that the hooked activations of one slice of the batch may take
_MATRICES = ("hook_phi", "hook_phi_conv", "hook_pattern", "hook_attn_scores")  # in models whose hooks do not name axes


def matrix_hook(model: HookedModel, layer: int, factor: str, tokens: Tokens) -> str:
    """The name of the hook at which a matrix of a layer can be edited; `factor` is the name of a factor, or "phi"."""
    subject = opened(model)
    reading = subject.reading(tokens[:1], layer)
    if reading.no_phi:
        raise UserError(f"layer {layer} is {subject.called(layer)}: {reading.no_phi}")
    product = reading.product(factor)
    if not product.hook:
        editable = [p.name for p in reading.products(diagonal=True).values() if p.hook]
        raise UserError(
            f"layer {layer} is {subject.called(layer)}, where {factor} cannot be edited by itself;"
            f" expected phi or {', '.join(editable)}"
        )
    return subject.hook(layer, product.hook)


def is_matrix(model: HookedModel, name: str) -> bool:
    """Whether a hook carries a matrix [batch, unit, dest, src]; every other hook carries [batch, pos, …]."""
    axes = getattr(model.hook_dict.get(name), "axes", None)
    return axes[-2:] == ("dest", "src") if axes else name.rsplit(".", 1)[-1] in _MATRICES


@contextmanager
def undisturbed(model: HookedModel, gradients: bool = False) -> Iterator[None]:
    """Sets evaluation mode and switches gradients on or off; afterwards every module is back in its former mode."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.set_grad_enabled(gradients):
            yield
    finally:
        for module, training in modes:
            module.training = training


def on_device_of(model: HookedModel, tensor: Tensor) -> Tensor:
    """The tensor on the device of the model's parameters."""
    parameter = next(opened(model).model.parameters(), None)
    return tensor if parameter is None else tensor.to(parameter.device)


def logits_at(
    model: HookedModel, tokens: Tokens, where: Int[Tensor, " label"], hooks: Hooks = ()
) -> Float[Tensor, "label vocab"]:
    """Logits at flat positions row · length + pos. Every hook sees whole activations [batch, pos, …].

    A model of this package computes logits only at these positions; any other model computes all logits.
    """
    return opened(model).to_logits(_run(model, tokens, hooks).flatten(0, 1)[where])


def seen_at(model: HookedModel, tokens: Tokens, names: Sequence[str]) -> dict[str, Tensor]:
    """What the named hooks carry."""
    seen: dict[str, Tensor] = {}
    _run(model, tokens, keeping(names, seen))
    for name in names:
        if name not in seen:
            raise UserError(f"the hook {name} carries nothing in this model")
    return seen


def keeping(names: Sequence[str], seen: dict[str, Tensor]) -> Hooks:
    """Hooks that put what they carry into `seen` and change nothing."""

    def keeps(name: str) -> Callable[..., None]:
        def keep(value: Tensor, hook: Any) -> None:
            seen[name] = value.detach()

        return keep

    return [(name, keeps(name)) for name in names]


def slices(model: HookedModel, tokens: Tokens, names: Sequence[str], labels: int = 0) -> list[slice]:
    """Slices of the batch that are so small that what these hooks carry takes at most SLICE_BYTES per slice.

    The same holds for the logits; a model of this package computes them at `labels` positions per sequence.
    """
    if not len(tokens):
        raise UserError("the batch has no sequences; expected at least 1")
    seen: dict[str, Tensor] = {}
    out = _run(model, tokens[:1], keeping(names, seen))
    carried = sum(value.numel() * value.element_size() for value in seen.values())
    rows = max(1, int(SLICE_BYTES // max(1, opened(model).logit_bytes(out, labels), carried)))
    return [slice(start, min(start + rows, len(tokens))) for start in range(0, len(tokens), rows)]


def _run(model: HookedModel, tokens: Tokens, hooks: Hooks) -> Float[Tensor, "batch pos out"]:
    with model.hooks(fwd_hooks=list(hooks)):
        return opened(model).before_logits(tokens)
