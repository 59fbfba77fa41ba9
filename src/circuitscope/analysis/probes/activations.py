"""Activations at chosen positions: what a probe reads, gathered inside the hooks.

Only the chosen positions are kept, as float32; of a recurrent state the rest is never held longer than
the slice of sequences being run.
"""

import fnmatch
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor

from circuitscope.analysis.probes.targets import Examples
from circuitscope.analysis.reading.hooked import (
    Hooks,
    is_matrix,
    layer_of,
    logits_at,
    on_device_of,
    seen_at,
    slices,
    undisturbed,
)
from circuitscope.errors import UserError, unknown
from circuitscope.lens import HookedRootModule
from circuitscope.models.hooked_lm import HookedLM

Features = NDArray[np.float32]
State = Float[Tensor, "site head inner d_outer"]

MEMORY = 2e9  # bytes that the activations of one checkpoint may take
_READS = {"mamba": "hook_C", "s6": "hook_C", "mamba2": "hook_C", "deltanet": "hook_q", "gated_deltanet": "hook_q"}


def matching_hooks(model: HookedRootModule, patterns: Sequence[str]) -> list[str]:
    """Hooks that carry [batch, pos, …] and match one of the patterns, in the model's order.

    Large ones made on demand (the state) are taken only where the last part of the pattern is their name.
    """
    valid = [name for name in model.hook_dict if not is_matrix(name)]
    on_demand: frozenset[str] = getattr(model, "on_demand", frozenset())
    aliases: dict[str, str] = getattr(model, "aliases", {})
    found: set[str] = set()
    for pattern in patterns:
        if is_matrix(pattern):
            raise UserError(f"{pattern} carries a matrix, not an activation by position; a probe cannot read it")
        plain = "*" not in pattern.rsplit(".", 1)[-1]
        called = {**{name: name for name in valid}, **{a: name for a, name in aliases.items() if name in valid}}
        here = {n for a, n in called.items() if fnmatch.fnmatchcase(a, pattern) and (plain or n not in on_demand)}
        if not here:
            raise unknown("hook", pattern, valid)
        found |= here
    return [name for name in valid if name in found]


def collect(
    model: HookedRootModule,
    tokens: Tensor,
    hooks: Sequence[str],
    examples: Mapping[str, Examples],
    *,
    read_out: bool = False,
    memory: float = MEMORY,
) -> dict[tuple[str, str], Features]:
    """Activations [example, feature] by (hook, role), from one pass over the sequences.

    Args:
        read_out: contract a state with the mixer's own C (Mamba, Mamba2) or q (DeltaNet) at the anchor:
            what a query there would read if the state were still that of the position.
        memory: more bytes than this are refused.
    """
    tokens = on_device_of(model, tokens)
    reads = {hook: read_out_hook(model, hook) for hook in hooks} if read_out else {}
    with undisturbed(model):
        widths = _widths(model, tokens, hooks, reads)
        need = 4 * sum(len(e) for e in examples.values()) * sum(widths.values())
        if need > memory:
            raise UserError(
                f"the activations of these hooks would take {need / 1e9:.1f} GB, more than {memory / 1e9:.1f} GB;"
                " use fewer sequences, hooks or roles"
            )
        kept = {
            (hook, role): np.empty((len(e), widths[hook]), dtype=np.float32)
            for hook in hooks
            for role, e in examples.items()
        }
        for rows in slices(model, tokens, hooks):
            _run(model, tokens[rows], _gathering(model, hooks, reads, rows, examples, kept))
    return kept


def _gathering(
    model: HookedRootModule,
    hooks: Sequence[str],
    reads: Mapping[str, str],
    rows: slice,
    examples: Mapping[str, Examples],
    kept: dict[tuple[str, str], Features],
) -> Hooks:
    """Hooks that keep the activations of some sequences at the places of the examples."""
    seen: dict[str, Tensor] = {}

    def gathers(name: str) -> Callable[..., None]:
        def gather(value: Tensor, hook: Any) -> None:
            for role, e in examples.items():
                here = slice(*np.searchsorted(e.sequence, [rows.start, rows.stop]))
                sequence = torch.from_numpy(e.sequence[here] - rows.start).to(value.device)
                at = value[sequence, torch.from_numpy(e.pos[here]).to(value.device)]
                if name in reads:
                    by = seen[reads[name]][sequence, torch.from_numpy(e.anchor[here]).to(value.device)]
                    at = read(at, by)
                kept[name, role][here] = at.flatten(1).float().cpu().numpy()

        return gather

    def keep(value: Tensor, hook: Any) -> None:
        seen[str(hook.name)] = value

    return [*[(name, keep) for name in set(reads.values())], *[(name, gathers(name)) for name in hooks]]


def read(state: Tensor, by: Tensor) -> Float[Tensor, "site head d_outer"]:
    """State · C, or state · q: what is read from states [site, …] by vectors [site, …]."""
    heads = as_heads(state)
    by = by[:, None] if by.ndim == 2 else by
    return torch.einsum("shnd,shn->shd", heads, by.repeat_interleave(heads.shape[1] // by.shape[1], dim=1))


def as_heads(state: Tensor) -> State:
    """States [site, channel, state] or [site, head, state, d_head] with the axis that is read third."""
    return state.mT[:, None] if state.ndim == 3 else state


def read_out_hook(model: HookedRootModule, hook: str) -> str:
    """The hook of the vector by which a mixer reads its state."""
    layer = layer_of(hook)
    mixers = model.config.mixers if isinstance(model, HookedLM) else []
    kind = mixers[layer].name if layer is not None and layer < len(mixers) else "no mixer of this package"
    if not hook.endswith(".hook_state"):
        raise UserError(f"read_out is for hook_state, which it contracts with the mixer's own C or q; got {hook}")
    if kind not in _READS:
        raise UserError(f"read_out needs a mixer that reads its state by the token: {', '.join(_READS)}; got {kind}")
    return hook.removesuffix("hook_state") + _READS[kind]


def read_groups(model: HookedRootModule, hook: str) -> int:
    """How many vectors a mixer reads its state by: one for each group of heads."""
    read_out_hook(model, hook)
    layer = layer_of(hook)
    assert isinstance(model, HookedLM)
    assert layer is not None
    mixer = model.layers[layer].mixer
    if mixer.d_head == 1:
        return 1
    return int(getattr(mixer.config, "n_groups", mixer.n_heads))


def embedding_of(model: HookedRootModule) -> Features:
    """The model's token embedding [token, d_model]."""
    weight = model.embed.weight if isinstance(model, HookedLM) else getattr(model, "W_E", None)
    if not isinstance(weight, Tensor):
        raise UserError("this model has no token embedding W_E; use the model 'logistic'")
    return np.asarray(weight.detach().float().cpu().numpy())


def _widths(model: HookedRootModule, tokens: Tensor, hooks: Sequence[str], reads: Mapping[str, str]) -> dict[str, int]:
    """Features of each hook, seen on one sequence."""
    widths = {}
    seen = seen_at(model, tokens[:1], hooks)
    for name in hooks:
        value = seen[name]
        if value.ndim < 3 or value.shape[:2] != tokens[:1].shape:
            raise UserError(f"{name} carries {tuple(value.shape)}; a probe reads [batch, pos, …]")
        heads = as_heads(value[:, 0]) if name in reads else None
        widths[name] = int(value[0, 0].numel() if heads is None else heads.shape[1] * heads.shape[3])
    return widths


def _run(model: HookedRootModule, tokens: Tensor, hooks: Hooks) -> None:
    logits_at(model, tokens, torch.empty(0, dtype=torch.long, device=tokens.device), hooks)
