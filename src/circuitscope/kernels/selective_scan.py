"""Mamba's selective scan (S6) and its mixing matrix Φ: references, and who computes them.

    h_t = exp(Δ_t A) ⊙ h_{t−1} + Δ_t B_t x_t        h: [channel, state], A: [channel, state], B_t: [state]
    y_t = C_t · h_t + D ⊙ x_t
    y_i = Σ_j Φ_ij x_j,  Φ_ij = Σ_n C_in exp(A_n Σ_{k=j+1..i} Δ_k) Δ_j B_jn + D δ_ij,  one Φ per channel

Gu and Dao 2023, equation 2 with Mamba's discretization (exact for A, Euler for B). Δ comes in after
its softplus. Each public function picks its path per call from device and dtype; the kernels are
differentiable once, the torch paths any number of times. No modules, no projections, no gate.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from circuitscope.kernels.backends import (
    MAMBA_SSM,
    NUMBA,
    TRITON_PHI,
    TRITON_PHI_PROFILE,
    TRITON_SCAN,
    at_least_float32,
    first_that_serves,
)
from circuitscope.kernels.linear_scan import linear_scan
from circuitscope.kernels.opaque import opaque
from circuitscope.kernels.selective_scan_numba import SelectiveScan
from circuitscope.kernels.selective_scan_phi_numba import SelectiveScanPhi, phi_profile

SLICE = 2_000_000  # entries of Φ that are built at once where only sums of them are needed: 8 MB, a CPU's cache


# -- references ---------------------------------------------------------------------------------------


def selective_scan_reference(
    x: Float[Tensor, "batch pos channel"],
    dt: Float[Tensor, "batch pos channel"],
    A: Float[Tensor, "channel state"],
    B: Float[Tensor, "batch pos state"],
    C: Float[Tensor, "batch pos state"],
    D: Float[Tensor, " channel"] | None = None,
    initial: Float[Tensor, "batch channel state"] | None = None,
) -> Float[Tensor, "batch pos channel"]:
    """The first two equations above, one position after the other. initial is h before the first position."""
    return selective_scan_steps(x, dt, A, B, C, D, initial)[0]


def selective_scan_steps(
    x: Float[Tensor, "batch pos channel"],
    dt: Float[Tensor, "batch pos channel"],
    A: Float[Tensor, "channel state"],
    B: Float[Tensor, "batch pos state"],
    C: Float[Tensor, "batch pos state"],
    D: Float[Tensor, " channel"] | None = None,
    initial: Float[Tensor, "batch channel state"] | None = None,
) -> tuple[Float[Tensor, "batch pos channel"], Float[Tensor, "batch channel state"]]:
    """The reference's y, and h after the last position."""
    h = x.new_zeros(x.shape[0], *A.shape) if initial is None else initial
    y = []
    for t in range(x.shape[1]):
        h = torch.exp(dt[:, t, :, None] * A) * h + (dt[:, t] * x[:, t])[..., None] * B[:, t, None, :]
        y.append(torch.einsum("ben,bn->be", h, C[:, t]))
    out = torch.stack(y, dim=1) if y else torch.zeros_like(x)
    return out if D is None else out + D * x, h


def selective_scan_phi_reference(
    dt: Float[Tensor, "batch pos channel"],
    A: Float[Tensor, "channel state"],
    B: Float[Tensor, "batch pos state"],
    C: Float[Tensor, "batch pos state"],
    D: Float[Tensor, " channel"] | None = None,
) -> Float[Tensor, "batch channel dest src"]:
    """The third equation above, one state after the other.

    Σ_{k=j+1..i} Δ_k is summed from j on: a difference of two long sums would lose its digits.
    """
    length = dt.shape[1]
    delta = dt.mT
    lower = torch.ones(length, length, dtype=torch.bool, device=dt.device).tril()
    between = delta[..., None].expand(*delta.shape, length).masked_fill(~lower.tril(-1), 0).cumsum(-2)
    phi = torch.zeros_like(between)
    for n in range(A.shape[1]):
        decay = torch.exp(between * A[:, n, None, None]).masked_fill(~lower, 0)
        phi = phi + C[:, None, :, None, n] * decay * (delta * B[:, None, :, n])[:, :, None, :]
    return phi if D is None else phi + torch.diag_embed(D[:, None].expand(-1, length))


# -- the scan -----------------------------------------------------------------------------------------


@opaque
def selective_scan(
    x: Float[Tensor, "batch pos channel"],
    dt: Float[Tensor, "batch pos channel"],
    A: Float[Tensor, "channel state"],
    B: Float[Tensor, "batch pos state"],
    C: Float[Tensor, "batch pos state"],
    D: Float[Tensor, " channel"] | None = None,
    initial: Float[Tensor, "batch channel state"] | None = None,
) -> Float[Tensor, "batch pos channel"]:
    """y of h_t = exp(Δ_t A) ⊙ h_{t−1} + Δ_t B_t x_t, y_t = C_t·h_t + D x_t, differentiable in every argument.

    Half-precision tensors are computed in float32 and returned in their own dtype.
    """
    check_scan(dt, A, B, C, D, x, initial)
    of_scan = (NUMBA, MAMBA_SSM, TRITON_SCAN)
    backend = first_that_serves(of_scan, x, state=A.shape[1], initial=initial is not None)
    if backend is None:
        return selective_scan_reference(x, dt, A, B, C, D, initial)
    if backend is MAMBA_SSM:
        return _scan_by_mamba_ssm(x, dt, A, B, C, D)
    kernel: Callable[..., Any] = SelectiveScan.apply if backend is NUMBA else backend
    y: Tensor = kernel(*at_least_float32(x, dt, A, B, C, D, initial))
    return y.to(x.dtype)


def _scan_by_mamba_ssm(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None) -> Tensor:
    """mamba-ssm has positions last, one dtype for what varies in time, and float32 for A and D."""
    u, delta, b, c = (tensor.to(x.dtype).mT.contiguous() for tensor in (x, dt, B, C))
    y: Tensor = MAMBA_SSM(u, delta, A.float(), b, c, None if D is None else D.float(), delta_softplus=False)
    return y.mT


def check_scan(
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    x: Tensor | None = None,
    initial: Tensor | None = None,
) -> None:
    """The kernels do not check their indices, so every shape must fit before they start."""
    if dt.ndim != 3 or A.ndim != 2:
        raise ValueError(
            f"dt is [batch, pos, channel] and A is [channel, state], not {list(dt.shape)} and {list(A.shape)}"
        )
    batch, length, channels = dt.shape
    states = A.shape[1]
    expected = {
        "A": (A, (channels, states)),
        "B": (B, (batch, length, states)),
        "C": (C, (batch, length, states)),
        "D": (D, (channels,)),
        "x": (x, (batch, length, channels)),
        "initial": (initial, (batch, channels, states)),
    }
    for name, (tensor, shape) in expected.items():
        if tensor is not None and tuple(tensor.shape) != shape:
            raise ValueError(f"{name} is {list(tensor.shape)}, expected {list(shape)} from dt and A")


# -- states -------------------------------------------------------------------------------------------


def _states(
    x: Float[Tensor, "batch pos channel"],
    dt: Float[Tensor, "batch pos channel"],
    A: Float[Tensor, "channel state"],
    B: Float[Tensor, "batch pos state"],
    initial: Float[Tensor, "batch channel state"] | None = None,
    added: Float[Tensor, "batch pos channel state"] | None = None,
) -> Float[Tensor, "batch pos channel state"]:
    """Every h_t = exp(Δ_t A) ⊙ h_{t−1} + Δ_t B_t x_t + added_t, differentiable."""
    check_scan(dt, A, B, B, None, x, initial)
    written = (dt * x)[..., None] * B[:, :, None]
    return linear_scan(torch.exp(dt[..., None] * A), written if added is None else written + added, initial)


def selective_scan_with_state_edit(
    x: Float[Tensor, "batch pos channel"],
    dt: Float[Tensor, "batch pos channel"],
    A: Float[Tensor, "channel state"],
    B: Float[Tensor, "batch pos state"],
    C: Float[Tensor, "batch pos state"],
    D: Float[Tensor, " channel"] | None,
    edit: Callable[[Tensor], Tensor],
    initial: Float[Tensor, "batch channel state"] | None = None,
) -> Float[Tensor, "batch pos channel"]:
    """The scan with its states passed once through `edit`, whose changes travel on to later positions.

    With h the states of the plain scan [batch, pos, channel, state] and δ = edit(h) − h, the scan runs
    again with δ added where it was made:

        h″_t = exp(Δ_t A) ⊙ h″_{t−1} + Δ_t B_t x_t + δ_t,    y_t = C_t·h″_t + D x_t.

    So an edit at one position holds there exactly and decays from there on. Where several positions are
    edited, a later one sees the plain states, and its change comes on top of what the earlier ones send:
    replacing h_t by v gives h″_t = v plus the propagated effect of the edits before t. `edit` gets a copy
    and may write into it.
    """
    h = _states(x, dt, A, B, initial)
    change = edit(h.clone()) - h
    h = _states(x, dt, A, B, initial, change)
    y = torch.einsum("blen,bln->ble", h, C)
    return y if D is None else y + D * x


# -- Φ ------------------------------------------------------------------------------------------------


@opaque
def selective_scan_phi(
    dt: Float[Tensor, "batch pos channel"],
    A: Float[Tensor, "channel state"],
    B: Float[Tensor, "batch pos state"],
    C: Float[Tensor, "batch pos state"],
    D: Float[Tensor, " channel"] | None = None,
) -> Float[Tensor, "batch channel dest src"]:
    """Φ of each channel that is given, lower-triangular: Σ_j Φ_ij x_j = y_i. Differentiable in every argument.

    Row by row, h_j ← exp(Δ_i A) ⊙ h_j, Φ_ij = C_i·h_j: channel · state · L exponentials, all of them at
    most 1, and no state axis in memory. Channels are independent, so pass slices of dt, A and D to bound
    the result.
    """
    check_scan(dt, A, B, C, D)
    backend = first_that_serves((NUMBA, TRITON_PHI), dt, state=A.shape[1])
    if backend is None:
        return selective_scan_phi_reference(dt, A, B, C, D)
    kernel: Callable[..., Any] = SelectiveScanPhi.apply if backend is NUMBA else backend
    phi: Tensor = kernel(*at_least_float32(dt, A, B, C, D))
    return phi.to(dt.dtype)


@opaque
@torch.no_grad()
def selective_scan_phi_profile(
    dt: Float[Tensor, "batch pos channel"],
    A: Float[Tensor, "channel state"],
    B: Float[Tensor, "batch pos state"],
    C: Float[Tensor, "batch pos state"],
    D: Float[Tensor, " channel"] | None = None,
) -> Float[Tensor, "batch channel lag"]:
    """The mean of |Φ_{i,i−lag}| over i, for every channel and lag, without Φ in memory and without gradients."""
    check_scan(dt, A, B, C, D)
    batch, length, channels = dt.shape
    backend = first_that_serves((NUMBA, TRITON_PHI_PROFILE), dt, state=A.shape[1])
    if backend is TRITON_PHI_PROFILE:
        means: Tensor = backend(*at_least_float32(dt, A, B, C, D))
        return means.to(dt.dtype)
    if backend is None:
        profile = dt.new_empty(batch, channels, length)
        for e in slices_of_channels(dt, SLICE):
            phi = selective_scan_phi_reference(dt[..., e], A[e], B, C, None if D is None else D[e]).abs()
            for lag in range(length):
                profile[:, e, lag] = phi.diagonal(-lag, -2, -1).mean(-1)
        return profile
    return phi_profile(dt, A, B, C, D).to(dt.dtype)


def slices_of_channels(dt: Float[Tensor, "batch pos channel"], entries: int) -> Iterator[slice]:
    """Slices of channels so small that the Φ of each has at most so many entries; of one channel at least."""
    batch, length, channels = dt.shape
    step = max(1, entries // max(1, batch * length**2))
    for start in range(0, channels, step):
        yield slice(start, start + step)
