"""Diagonal state-space models with fixed (input-independent) dynamics: S4D's kernel, its states, H3's shift-SSM.

With A, C complex, one input and one output per channel and B = 1,

    h_t = Ā h_{t−1} + B̄ u_t,    y_t = 2 Re Σ_n C_n h_tn + D u_t,    h_{−1} = 0,

so y = K * u + D u with K_l = 2 Re Σ_n C_n B̄_n Ā_n^l. The factor 2 Re stands for the conjugate half of the state.
zoh:      Ā = e^{ΔA},                  B̄ = (e^{ΔA} − 1)/A
bilinear: Ā = (1 + ΔA/2)/(1 − ΔA/2),   B̄ = Δ/(1 − ΔA/2)     (H3)

Parameters are real, so optimizers and safetensors take them: A = −exp(log_A_real) + i A_imag, C as pairs
(re, im). States are complex tensors [batch, pos, channel, state]; torch.view_as_real gives a real view of them.
Reference: s4d_kernel_reference steps through the recurrence. The convolution is in long_conv.
"""

from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
from jaxtyping import Complex, Float
from torch import Tensor

from circuitscope.devices import widened
from circuitscope.kernels.linear_scan import linear_scan
from circuitscope.kernels.long_conv import long_conv

Discretization = Literal["zoh", "bilinear"]


class S4DParams(NamedTuple):
    """The parameters of one S4D layer, all real: A = −exp(log_A_real) + i A_imag, C as (re, im), Δ = e^{log_dt}."""

    log_A_real: Float[Tensor, "channel state"]
    A_imag: Float[Tensor, "channel state"]
    C: Float[Tensor, "channel state 2"]
    log_dt: Float[Tensor, " channel"]
    discretization: Discretization = "zoh"


def s4d_lin(channels: int, states: int) -> tuple[Float[Tensor, "channel state"], Float[Tensor, "channel state"]]:
    """(log_A_real, A_imag) of S4D-Lin, A_n = −½ + iπn; `states` counts conjugate pairs, that is N/2."""
    real = torch.full((channels, states), 0.5).log()
    imaginary = torch.pi * torch.arange(states, dtype=torch.float32)
    return real, imaginary.repeat(channels, 1)


def s4d_kernel_reference(params: S4DParams, length: int) -> Float[Tensor, "channel pos"]:
    """K_l = 2 Re Σ_n C_n h_ln, the answer of the recurrence h_l = Ā h_{l−1} to an impulse, h_0 = B̄."""
    A_bar, B_bar, C = _discretize(params)
    h, K = B_bar, []
    for _ in range(length):
        K.append(2 * (C * h).sum(-1).real)
        h = A_bar * h
    return torch.stack(K, dim=-1).to(params.C.dtype)


def s4d_kernel(params: S4DParams, length: int) -> Float[Tensor, "channel pos"]:
    """K_l = 2 Re Σ_n C_n B̄_n Ā_n^l for l < length.

    With l = a s + b the power splits into Ā^{as} Ā^b: one product of two thin matrices per channel, about
    2 √length powers per state, and no [channel, state, length] array. The powers are taken in float64, because
    the phase l Δ Im A reaches thousands of radians; the sum over n is in the parameters' own precision.
    """
    A_bar, B_bar, C = _discretize(params)
    step = max(1, int(length**0.5))
    fine = _powers(A_bar, step)
    coarse = _powers(fine[..., -1] * A_bar, -(-length // step)) * (C * B_bar)[..., None]
    dtype = params.C.dtype
    # 2 Re(xᵀ y) as one real product of stacked parts; autocast would round it
    left = torch.cat([coarse.real, -coarse.imag], dim=1).to(dtype)
    right = torch.cat([fine.real, fine.imag], dim=1).to(dtype)
    with torch.autocast(left.device.type, enabled=False):
        product = left.transpose(1, 2) @ right
    return 2 * product.flatten(1)[:, :length]


def s4d_start(params: S4DParams, batch: int) -> Complex[Tensor, "batch channel state"]:
    """h before the first position."""
    return torch.zeros(batch, *params.A_imag.shape, dtype=params.C.dtype.to_complex(), device=params.C.device)


def s4d_steps(
    u: Float[Tensor, "batch pos channel"],
    params: S4DParams,
    D: Float[Tensor, " channel"],
    initial: Complex[Tensor, "batch channel state"],
) -> tuple[Float[Tensor, "batch pos channel"], Complex[Tensor, "batch channel state"]]:
    """The recurrence above, one position after the other: y, and h after the last position."""
    A_bar, B_bar, C = (part.to(initial.dtype) for part in _discretize(params))
    h, y = initial, []
    for u_t in u.unbind(1):
        h = A_bar * h + B_bar * u_t[..., None]
        y.append(2 * (C * h).sum(-1).real + D * u_t)
    return torch.stack(y, 1) if y else torch.zeros_like(u), h


def s4d_with_state_edit(
    u: Float[Tensor, "batch pos channel"],
    params: S4DParams,
    D: Float[Tensor, " channel"] | None,
    edit: Callable[[Complex[Tensor, "batch pos channel state"]], Complex[Tensor, "batch pos channel state"]],
) -> Float[Tensor, "batch pos channel"]:
    """The layer's output after `edit` was called once with all states.

    The difference δ_t = edit(h)_t − h_t is added to the state at t and carried on by the recurrence:
    h'_t = Ā h'_{t−1} + B̄ u_t + δ_t. An edit at one position therefore sets the state there to what was written and
    reaches all later outputs. Edits at several positions add up: where the states are replaced at t and again at
    t' > t, h'_{t'} is the written value plus the decayed δ_t, since `edit` saw the unedited states (a copy of them,
    which it may write into).
    """
    A_bar, B_bar, C = (part.to(u.dtype.to_complex()) for part in _discretize(params))
    rates = A_bar.expand(1, u.shape[1], *A_bar.shape)
    states = linear_scan(rates, u[..., None] * B_bar)
    delta = edit(states.clone()) - states
    y: Tensor = 2 * ((states + linear_scan(rates, delta)) * C).sum(-1).real
    return y if D is None else torch.addcmul(y, u, D)


def shift_ssm(
    u: Float[Tensor, "batch pos channel"],
    c: Float[Tensor, "channel state"],
    D: Float[Tensor, " channel"] | None = None,
) -> Float[Tensor, "batch pos channel"]:
    """H3's shift-SSM: y_t = Σ_{s<N} c_s u_{t−s} + D u_t, a learned causal filter whose state is the last N inputs."""
    return long_conv(u, c, D)


def _discretize(
    params: S4DParams,
) -> tuple[Complex[Tensor, "channel state"], Complex[Tensor, "channel state"], Complex[Tensor, "channel state"]]:
    """Ā, B̄ and C, in complex128, or in complex64 on a device without float64."""
    A = torch.complex(-widened(params.log_A_real).exp(), widened(params.A_imag))
    C = torch.view_as_complex(widened(params.C).contiguous())
    dt = widened(params.log_dt).exp()[:, None]
    dtA = dt * A
    if params.discretization == "zoh":
        return dtA.exp(), dt * _expm1_over(dtA), C
    if params.discretization == "bilinear":
        return (1 + dtA / 2) / (1 - dtA / 2), dt / (1 - dtA / 2), C
    raise ValueError(f"discretization {params.discretization!r} is not one of: zoh, bilinear")


def _expm1_over(z: Complex[Tensor, "*shape"]) -> Complex[Tensor, "*shape"]:
    """(e^z − 1)/z without cancellation: near 0 its series, whose next term is below the last digit of its numbers."""
    small = z.abs() < (1e-3 if z.dtype == torch.complex128 else 0.1)
    safe = torch.where(small, torch.ones_like(z), z)
    series = 1 + z / 2 * (1 + z / 3 * (1 + z / 4 * (1 + z / 5 * (1 + z / 6))))
    return torch.where(small, series, (safe.exp() - 1) / safe)


def _powers(base: Complex[Tensor, "*shape"], count: int) -> Complex[Tensor, "*shape power"]:
    """base^0, ..., base^{count−1} by doubling: no logarithm, so a base of 0 is as good as any."""
    powers, ratio = torch.ones_like(base)[..., None], base
    while powers.shape[-1] < count:
        powers = torch.cat([powers, powers * ratio[..., None]], dim=-1)
        ratio = ratio * ratio
    return powers[..., :count]
