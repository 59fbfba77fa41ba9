"""The activations that a probe reads: what chosen hooks carry at chosen positions.

Only the chosen positions are kept, as float32. Everything else, such as whole recurrent states, is in memory for one
slice of the sequences at a time.
"""

import fnmatch
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from jaxtyping import Float, Int
from numpy.typing import NDArray
from torch import Tensor

from circuitscope.analysis.probes.states import ReadableState, readable_state
from circuitscope.analysis.probes.targets import ProbeExamples
from circuitscope.analysis.reading.hooked import is_matrix, on_device_of, seen_at, slices, undisturbed
from circuitscope.arguments import explained
from circuitscope.devices import on_cpu
from circuitscope.errors import UserError, unknown
from circuitscope.lens import HookedModel

Features = NDArray[np.float32]

MEMORY = 2e9  # bytes that the activations of one checkpoint may take


def matching_hooks(model: HookedModel, patterns: Sequence[str]) -> list[str]:
    """Hooks that carry [batch, pos, …] and match one of the patterns, in the model's order.

    Hooks whose activations are large and made on demand (the state) match only a pattern that names them: the last part
    of the pattern must hold no *.
    """
    points = model.hook_dict
    valid = [name for name in points if not is_matrix(model, name)]
    called = {**{name: name for name in points}, **getattr(model, "aliases", {})}
    found: set[str] = set()
    for pattern in patterns:
        here = {name for alias, name in called.items() if fnmatch.fnmatchcase(alias, pattern)}
        if here and here.isdisjoint(valid):
            raise UserError(f"{pattern} carries a matrix, not an activation by position; a probe cannot read it")
        if "*" in pattern.rsplit(".", 1)[-1]:
            here = {name for name in here if not getattr(points[name], "on_demand", False)}
        if here.isdisjoint(valid):
            raise unknown("hook", pattern, valid)
        found |= here
    return [name for name in valid if name in found]


@explained
def collect(
    model: HookedModel,
    tokens: Int[Tensor, "batch pos"] | Float[Tensor, "batch pos channel"],
    hooks: Sequence[str],
    examples: Mapping[str, ProbeExamples],
    *,
    read_out: bool = False,
    memory: float = MEMORY,
) -> dict[tuple[str, str], Features]:
    """Activations [example, feature] by (hook, role), from one pass over the sequences.

    Args:
        read_out: contract each state with the vector by which the mixer reads it, C (Mamba, Mamba2) or q (DeltaNet),
            taken at the anchor: what a query there would read if the state had not changed since the position.
        memory: how many bytes the activations may take; more are refused.
    """
    tokens = on_device_of(model, tokens)
    states = {hook: readable_state(model, tokens, hook) for hook in hooks} if read_out else {}
    with undisturbed(model):
        widths = _widths(model, tokens, hooks, states)
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
            seen = seen_at(model, tokens[rows], [*hooks, *(by for _, by in states.values())])
            found: list[tuple[NDArray[np.float32], Tensor]] = []  # where features go, and the features
            for role, e in examples.items():
                here = slice(*np.searchsorted(e.sequence, [rows.start, rows.stop]))
                sequence, pos, anchor = (
                    torch.from_numpy(x[here]).to(tokens.device) for x in (e.sequence - rows.start, e.pos, e.anchor)
                )
                for hook in hooks:
                    at = seen[hook][sequence, pos]
                    if hook in states:
                        at = states[hook].state.read(at, seen[states[hook].by][sequence, anchor])
                    found.append((kept[hook, role][here], at.flatten(1).float()))
            for (place, _), features in zip(found, on_cpu([part for _, part in found]), strict=True):
                place[:] = features.numpy()
    return kept


def _widths(
    model: HookedModel, tokens: Tensor, hooks: Sequence[str], states: Mapping[str, ReadableState]
) -> dict[str, int]:
    """How many features each hook has, found by running one sequence."""
    widths = {}
    seen = seen_at(model, tokens[:1], hooks)
    for name in hooks:
        value = seen[name]
        if value.ndim < 3 or value.shape[:2] != tokens[:1].shape[:2]:
            raise UserError(f"{name} carries {tuple(value.shape)}; a probe reads [batch, pos, …]")
        heads = states[name].state.as_heads(value[:, 0]) if name in states else None
        widths[name] = int(value[0, 0].numel() if heads is None else heads.shape[1] * heads.shape[3])
    return widths
