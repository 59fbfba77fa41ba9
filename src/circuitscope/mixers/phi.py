"""Φ as an object: its factors, their product in channel slices, and the two paths of a mixer.

A mixer is z = Φ · v. Φ may itself be a product, and what stands around it (a short conv before the
values, a gate after the product) may be multiplied on: `Factor`s in order from left to right.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from circuitscope.hooks import HookPoint, wanted
from circuitscope.memory import check_fits

Matrix = Float[Tensor, "batch channel dest src"]
Heads = Float[Tensor, "batch pos head d_head"]
Build = Callable[[slice], Tensor]


@dataclass(frozen=True)
class Factor:
    """One factor of a mixing matrix.

    It lives on `size` channels (or heads). `build(part)` gives it for a slice of those: a matrix
    [batch, channel, dest, src] or, where `diagonal`, its diagonal [batch, channel, pos]; batch may be 1.
    """

    name: str
    size: int
    build: Build
    diagonal: bool = False


def product(factors: Sequence[Factor], channels: slice) -> Matrix:
    """F_1 · F_2 · … for a slice of the channels of the finest factor; a lone diagonal becomes a matrix.

    A factor that lives on heads is repeated over the channels of each head.
    """
    size = max(factor.size for factor in factors)
    diagonal, out = True, None
    for factor in factors:
        part = _spread_over(factor, channels, size // factor.size)
        if out is None:
            out, diagonal = part, factor.diagonal
        elif diagonal:
            out, diagonal = (out if factor.diagonal else out[..., :, None]) * part, factor.diagonal
        elif factor.diagonal:
            out = out * part[..., None, :]
        elif len(part) == 1:  # one matrix for all sequences: a single product a channel
            out = torch.einsum("bcij,cjk->bcik", out, part[0])
        else:
            out = out @ part
    assert out is not None
    return torch.diag_embed(out) if diagonal else out


def _spread_over(factor: Factor, channels: slice, per_head: int) -> Tensor:
    if per_head == 1:
        return factor.build(channels)
    first, last = channels.start // per_head, (channels.stop - 1) // per_head
    part = factor.build(slice(first, last + 1))
    heads = torch.arange(channels.start, channels.stop, device=part.device) // per_head - first
    return part[:, heads]


def mix(
    mixer: Any,
    v: Heads,
    *,
    phi: Callable[[], Matrix],
    fused: Callable[[Heads], Heads],
    state: Callable[[Heads, Callable[[Tensor], Tensor]], Heads] | None = None,
    within: Sequence[HookPoint] = (),
) -> Heads:
    """z from v by the path the hooks ask for: fused, through Φ, or through the recurrent state.

    Args:
        mixer: has hook_v, hook_phi, hook_z and, with `state`, hook_state.
        phi: builds Φ; called only when `hook_phi` or a hook of `within` is listened to.
        fused: the kernel, v → z.
        state: the recurrence with its states passed through a function, (v, edit) → z.
        within: hooks that `phi` passes through on its way.
    """
    v = mixer.hook_v(v)
    if wanted(mixer.hook_phi, *within):
        check_fits(v.shape[0] * v.shape[2] * v.shape[1] ** 2 * v.element_size(), v.device, "hook_phi")
        z = torch.einsum("bhij,bjhd->bihd", mixer.hook_phi(phi()), v)
        if state is not None and wanted(mixer.hook_state):
            z = z + (state(v, mixer.hook_state) - state(v, lambda states: states))
    elif state is not None and wanted(mixer.hook_state):
        z = state(v, mixer.hook_state)
    else:
        z = fused(v)
    out: Tensor = mixer.hook_z(z)
    return out


def convolve(
    hook: HookPoint,
    u: Float[Tensor, "batch pos channel"],
    *,
    matrix: Callable[[slice], Float[Tensor, "channel dest src"]],
    bias: Float[Tensor, " channel"] | None,
    fused: Callable[[Tensor], Tensor],
) -> tuple[Float[Tensor, "batch pos channel"], Build]:
    """A causal short conv or token shift of u, and its matrix for slices of the channels, as a `Factor` builds it.

    Fused, unless `hook` is listened to: then the matrix of all channels [batch, channel, dest, src] goes through the
    hook, and what comes back is what u is multiplied by and what the slices are taken from.
    """
    if not wanted(hook):
        return fused(u), lambda part: matrix(part)[None]
    batch, pos, channel = u.shape
    check_fits(batch * channel * pos**2 * u.element_size(), u.device, "hook_phi_conv")
    used: Tensor = hook(matrix(slice(0, channel)).expand(batch, channel, pos, pos).clone())
    out = torch.einsum("bcij,bjc->bic", used, u)
    return out if bias is None else out + bias, lambda part: used[:, part]
