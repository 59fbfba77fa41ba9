"""The two paths of a mixer: the fused kernel or, when a hook asks for it, the product with Φ or a conv's matrix."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from circuitscope.hooks import wanted
from circuitscope.kernels.short_conv import short_conv, short_conv_phi
from circuitscope.memory import check_fits
from circuitscope.mixers.reading import Build
from circuitscope.mixers.state import Carry

Heads = Float[Tensor, "batch pos head d_head"]
Channels = Float[Tensor, "batch pos channel"]
Phi = Float[Tensor, "batch head dest src"]


def mix(
    mixer: Any,
    v: Heads,
    *,
    phi: Callable[[], Phi],
    fused: Callable[[Heads], Heads],
    state: Callable[[Heads, Callable[[Tensor], Tensor]], Heads] | None = None,
    within: Sequence[nn.Module] = (),
) -> Heads:
    """Computes z from v by the path that the hooks ask for: fused, through Φ, or through the recurrent state.

    Args:
        mixer: a mixer with hook_v, hook_phi, hook_z and, if `state` is given, hook_state.
        phi: builds Φ; called only when something listens to `hook_phi` or to a hook of `within`.
        fused: the kernel, v → z.
        state: the recurrence with its states passed through a function, (v, edit) → z.
        within: the hooks that `phi` calls while it builds Φ.
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
    point: nn.Module,
    u: Channels,
    *,
    matrix: Callable[[slice], Float[Tensor, "channel dest src"]],
    bias: Float[Tensor, " channel"] | None,
    fused: Callable[[Channels], Channels],
) -> tuple[Channels, Build]:
    """A short conv or token shift of u, and its matrix for slices of the channels, as a `Factor` builds it.

    The conv is fused unless something listens to `point`. Then the matrix of all channels [batch, channel, dest, src]
    goes through the hook; u is multiplied by what comes back, and the slices are taken from it.
    """
    if not wanted(point):
        return fused(u), lambda part: matrix(part)[None]
    batch, pos, channel = u.shape
    check_fits(batch * channel * pos**2 * u.element_size(), u.device, "the hooked matrix of a conv")
    used: Tensor = point(matrix(slice(0, channel)).expand(batch, channel, pos, pos).clone())
    out = torch.einsum("bcij,bjc->bic", used, u)
    return out if bias is None else out + bias, lambda part: used[:, part]


def short_convolve_parts(
    points: Sequence[nn.Module],
    u: Channels,
    sizes: Sequence[int],
    weight: Float[Tensor, "channel tap"],
    bias: Float[Tensor, " channel"] | None,
    carry: Carry | None = None,
) -> list[tuple[Float[Tensor, "batch pos _channel"], Build]]:
    """One causal short conv over the channels of several parts of a mixer, such as q, k and v, each with its own hook.

    Gives for each part what `convolve` gives. Unless something listens to one of the hooks, one kernel does all parts.
    In a step the conv goes on from the state; the matrices are those of the step's own positions.
    """
    length, weights = u.shape[1], weight.split(list(sizes))
    if carry is None and wanted(*points):
        biases = [None] * len(weights) if bias is None else bias.split(list(sizes))
        parts = zip(points, u.split(list(sizes), dim=-1), weights, biases, strict=True)
        return [short_convolve(*part) for part in parts]
    whole = short_conv(u, weight, bias) if carry is None else carry.convolved(u, weight, bias)
    done = whole.split(list(sizes), dim=-1)
    return list(zip(done, (_banded(of_part, length) for of_part in weights), strict=True))


def _banded(weight: Float[Tensor, "channel tap"], length: int) -> Build:
    """The matrix of a causal short conv, for slices of its channels."""
    return lambda part: short_conv_phi(weight[part], length)[None]


def short_convolve(
    point: nn.Module,
    u: Channels,
    weight: Float[Tensor, "channel tap"],
    bias: Float[Tensor, " channel"] | None,
    ahead: int = 0,
    carry: Carry | None = None,
) -> tuple[Channels, Build]:
    """A depthwise short conv of u, causal if no tap is `ahead`, and its matrix, as `convolve` gives them.

    In a step the conv goes on from the state; the matrix is that of the step's own positions.
    """
    length = u.shape[1]
    if carry is not None:
        return carry.convolved(u, weight, bias), _banded(weight, length)
    return convolve(
        point,
        u,
        matrix=lambda part: short_conv_phi(weight[part], length, ahead),
        bias=bias,
        fused=lambda u: short_conv(u, weight, bias, ahead),
    )
