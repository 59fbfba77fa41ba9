"""Where a model can be opened, and runs that leave it as it was.

Hooks are found by name: this package's (`blocks.i.mixer.hook_phi`) or TransformerLens's
(`blocks.i.attn.hook_pattern`), so HookedLM, any other HookedRootModule and TransformerBridge all serve.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from numbers import Integral
from typing import Any, Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from circuitscope.errors import UserError, shown
from circuitscope.hooks import HookedRootModule
from circuitscope.models import HookedLM

Tokens = Int[Tensor, "batch pos"]
Hooks = Sequence[tuple[str, Callable[..., Tensor | None]]]
Point = Literal["phi", "conv", "z"]

SLICE_BYTES = 64e6  # what the hooked activations of the sequences run at once may take
_POINTS: dict[Point, tuple[str, ...]] = {
    "phi": ("mixer.hook_phi", "attn.hook_pattern"),
    "conv": ("mixer.hook_phi_conv",),
    "z": ("mixer.hook_z", "attn.hook_z"),
}
_MATRICES = ("hook_phi", "hook_phi_conv", "hook_pattern", "hook_attn_scores")


def n_layers(model: HookedRootModule) -> int:
    """How many blocks the hook names of a model speak of."""
    numbers = [int(found[1]) for name in model.hook_dict if (found := re.match(r"blocks\.(\d+)\.", name))]
    if not numbers:
        raise UserError("the model has no hooks named blocks.0.…; expected a HookedLM or TransformerLens's hook names")
    return 1 + max(numbers)


def layer_of(name: str) -> int | None:
    """The layer a hook's name speaks of."""
    found = re.match(r"blocks\.(\d+)\.", name)
    return int(found[1]) if found else None


def check_layer(model: HookedRootModule, layer: int) -> int:
    """The layer, counted from 0."""
    n = n_layers(model)
    if not isinstance(layer, Integral) or not -n <= layer < n:
        raise UserError(f"layer must be from 0 to {n - 1}, got {shown(layer)}")
    return int(layer) % n


def hook_at(model: HookedRootModule, layer: int, point: Point) -> str:
    """Name of the hook that carries Φ (attention: the pattern), the matrix of the short conv, or z, in a layer."""
    layer = check_layer(model, layer)
    names = [f"blocks.{layer}.{end}" for end in _POINTS[point]]
    for name in names:
        if name in model.hook_dict:
            return name
    if not isinstance(model, HookedLM):
        raise UserError(f"layer {layer} has no {point}: expected a hook named {' or '.join(names)}")
    kind, mixer = model.config.mixers[layer].name, model.layers[layer].mixer
    if mixer.no_phi:
        raise UserError(f"layer {layer} is {kind}: {mixer.no_phi}")
    raise UserError(f"layer {layer} is {kind} and has no short conv before its values; expected factor 'phi'")


def is_matrix(name: str) -> bool:
    """Whether a hook carries [batch, head, dest, src]; any other carries [batch, pos, …]."""
    return name.rsplit(".", 1)[-1] in _MATRICES


@contextmanager
def undisturbed(model: HookedRootModule, gradients: bool = False) -> Iterator[None]:
    """Evaluation mode, and gradients on or off; afterwards every module is back in the mode it was in."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.set_grad_enabled(gradients):
            yield
    finally:
        for module, training in modes:
            module.training = training


def on_device_of(model: HookedRootModule, tensor: Tensor) -> Tensor:
    """The tensor where the model's parameters are."""
    parameter = next(model.parameters(), None)
    return tensor if parameter is None else tensor.to(parameter.device)


def logits_at(
    model: HookedRootModule, tokens: Tokens, where: Int[Tensor, " label"], hooks: Hooks = ()
) -> Float[Tensor, "label vocab"]:
    """Logits at flat positions row · length + pos. Every hook sees whole activations [batch, pos, …].

    A HookedLM unembeds at these positions alone; of any other model all logits are taken.
    """
    out = _run(model, tokens, hooks).flatten(0, 1)[where]
    return F.linear(out, model.W_U.T) if isinstance(model, HookedLM) else out


def seen_at(model: HookedRootModule, tokens: Tokens, names: Sequence[str]) -> dict[str, Tensor]:
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


def slices(model: HookedRootModule, tokens: Tokens, names: Sequence[str], labels: int = 0) -> list[slice]:
    """The batch in slices of so many sequences that what these hooks carry stays within SLICE_BYTES.

    So do the logits, of which a HookedLM makes those at `labels` positions a sequence.
    """
    if not len(tokens):
        raise UserError("the batch has no sequences; expected at least 1")
    seen: dict[str, Tensor] = {}
    out = _run(model, tokens[:1], keeping(names, seen))
    logits = labels * model.config.vocab_size * out.element_size() if isinstance(model, HookedLM) else _bytes(out)
    size = max(1, logits, sum(_bytes(value) for value in seen.values()))
    rows = max(1, int(SLICE_BYTES // size))
    return [slice(start, min(start + rows, len(tokens))) for start in range(0, len(tokens), rows)]


def _run(model: HookedRootModule, tokens: Tokens, hooks: Hooks) -> Float[Tensor, "batch pos out"]:
    """Logits, or of a HookedLM what its unembedding reads."""
    with model.hooks(fwd_hooks=list(hooks)):
        out: Tensor = model.hidden(tokens) if isinstance(model, HookedLM) else model(tokens)
    return out


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
