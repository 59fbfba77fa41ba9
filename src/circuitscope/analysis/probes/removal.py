"""Does the model use what a probe reads? The accuracy it loses when that is projected out of its activations."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from circuitscope.analysis.causal.interventions import Effect, PerSequence, accuracy
from circuitscope.analysis.probes.states import readable_state, state_at
from circuitscope.analysis.reading.hooked import on_device_of, seen_at, slices, undisturbed
from circuitscope.arguments import explained
from circuitscope.devices import on_cpu
from circuitscope.errors import UserError
from circuitscope.lens import HookedModel
from circuitscope.mixers.reading import State
from circuitscope.tasks import Batch

Where = Bool[Tensor, "batch pos"]
Directions = Float[Tensor, "direction feature"]
Span = Float[Tensor, "_direction _feature"]  # each group of heads has its own sizes


@explained
def remove(
    model: HookedModel,
    batch: Batch,
    hook: str,
    where: Where,
    directions: Any,
    *,
    mean: Any = None,
    read_out: bool = False,
) -> Effect:
    """The accuracy a model loses on its task when x ← x − Uᵀ U (x − μ) at chosen positions, with U the directions.

    A recurrent state is edited only at the first chosen position of each sequence: later states carry the edit on, and
    a second edit would remove the same thing again.

    Args:
        where: a mask of the positions.
        directions: U, orthonormal rows [direction, feature].
        mean: μ, a flattened activation, or a whole state with `read_out`; by default the mean over these positions of
            the batch.
        read_out: the features are what is read from a state, [head, outer]. U is removed from every row over which
            the read-out sums, so that no vector C or q can read it.
    """
    mean = mean_at(model, batch, hook, where) if mean is None else mean
    before = accuracy_without(model, batch, hook, where, None)
    return Effect.of(before, accuracy_without(model, batch, hook, where, directions, mean=mean, read_out=read_out))


def accuracy_without(
    model: HookedModel,
    batch: Batch,
    hook: str,
    where: Where,
    directions: Any,
    *,
    mean: Any = 0.0,
    read_out: bool = False,
) -> PerSequence:
    """Accuracy per sequence with the directions removed as `remove` does it; with None by the same path, unedited."""
    if where.shape != batch.layout.roles.shape or not where.any():
        raise UserError(f"expected positions as a mask {tuple(batch.layout.roles.shape)} with at least one true")
    U = torch.zeros(0, 1) if directions is None else torch.as_tensor(np.asarray(directions), dtype=torch.float32)
    if U.ndim != 2 or not torch.allclose(U @ U.T, torch.eye(len(U)), atol=1e-3):
        raise UserError("expected directions as orthonormal rows [direction, feature]")
    where = _edited(model, batch, hook, where)
    center = torch.as_tensor(np.asarray(mean), dtype=torch.float32)
    state = readable_state(model, batch.inputs, hook).state if read_out else None
    labels = int(batch.has_label().sum(dim=1).max())
    with undisturbed(model):
        parts = slices(model, on_device_of(model, batch.inputs), [hook], labels)
    found = []
    for rows in parts:
        edit = _unchanged if directions is None else _projecting(where[rows], U, center, state)
        found.append(accuracy(model, batch.part(rows), [(hook, edit)]))
    return torch.cat(found)


def mean_at(model: HookedModel, batch: Batch, hook: str, where: Where) -> Tensor:
    """The mean of what a hook carries at the chosen positions; of a state, at the first in each sequence."""
    total: Any = 0.0
    where = _edited(model, batch, hook, where)
    tokens = on_device_of(model, batch.inputs)
    with undisturbed(model):
        for rows in slices(model, tokens, [hook]):
            (seen,) = on_cpu([seen_at(model, tokens[rows], [hook])[hook]])
            total = total + seen[where[rows]].double().sum(dim=0)
    assert isinstance(total, Tensor)
    return (total / where.sum()).float()


def _edited(model: HookedModel, batch: Batch, hook: str, where: Where) -> Where:
    """The positions to edit: all that are chosen; of a state, the first in each sequence."""
    return where if state_at(model, batch.inputs, hook) is None else where & (where.cumsum(dim=1) == 1)


def random_directions(count: int, features: int, seed: int = 0) -> Any:
    """Random orthonormal directions [count, feature]."""
    return np.linalg.qr(np.random.default_rng(seed).normal(size=(features, count)))[0].T


def _projecting(where: Where, U: Directions, mean: Tensor, state: State | None) -> Callable[..., Tensor]:
    """A hook function that removes directions from flat activations, or from what is read from a state."""
    spans = None if state is None else _by_group(U, state.groups)

    def project(value: Tensor, hook: Any) -> Tensor:
        value = value.clone()
        on, V = where.to(value.device), U.to(value.device, value.dtype)
        x = value[on]
        center = mean.to(x.device, x.dtype)
        away = x - (center.reshape(x.shape[1:]) if center.ndim else center)
        if state is None or spans is None:
            gone = (away.flatten(1) @ V.T @ V).reshape(x.shape)
        else:
            gone = state.from_heads(_inside(state.as_heads(away), spans))
        value[on] = x - gone
        return value

    return project


def _by_group(U: Directions, groups: int) -> list[Span]:
    """An orthonormal basis of the directions within each group of heads.

    A vector of its own reads each group, so the directions must be removed from each group separately.
    """
    bases = []
    for part in U.reshape(len(U), groups, -1).unbind(dim=1):
        _, size, rows = torch.linalg.svd(part, full_matrices=False)
        bases.append(rows[size > 1e-5 * size.max()])
    return bases


def _inside(heads: Float[Tensor, "site head inner outer"], spans: list[Span]) -> Tensor:
    """The part of states that lies in the spans, for every row over which a read-out sums."""
    found = []
    for part, span in zip(heads.chunk(len(spans), dim=1), spans, strict=True):
        rows, V = part.transpose(1, 2), span.to(part.device, part.dtype)
        found.append((rows.flatten(2) @ V.T @ V).reshape(rows.shape).transpose(1, 2))
    return torch.cat(found, dim=1)


def _unchanged(value: Tensor, hook: Any) -> Tensor:
    return value
