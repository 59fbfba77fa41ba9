"""Mamba's selective scan (S6) and its mixing matrix Φ: references, kernels in Numba; on a GPU mamba-ssm or Triton.

    h_t = exp(Δ_t A) ⊙ h_{t−1} + Δ_t B_t x_t        h: [channel, state], A: [channel, state], B_t: [state]
    y_t = C_t · h_t + D ⊙ x_t
    y_i = Σ_j Φ_ij x_j,  Φ_ij = Σ_n C_in exp(A_n Σ_{k=j+1..i} Δ_k) Δ_j B_jn + D δ_ij,  one Φ per channel

Gu and Dao 2023, equation 2 with Mamba's discretization (exact for A, Euler for B). Δ comes in after
its softplus. Each public function picks its path per call from device and dtype; the kernels are
differentiable once, the torch paths any number of times. No modules, no projections, no gate.
"""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from numba import prange
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
from circuitscope.kernels.numba_simd import (
    LANES,
    broadcast,
    exp2,
    kernel,
    lane_sum,
    load,
    pad_last,
    splat,
    store,
    task,
)
from circuitscope.kernels.once import differentiable_once
from circuitscope.kernels.opaque import opaque

LOG2_E = 1.4426950408889634
LN_2 = 0.6931471805599453
SLICE = 2_000_000  # entries of Φ that are built at once where only sums of them are needed: 8 MB, a CPU's cache
CHUNK = 16  # positions between two saved states; backward recomputes what lies between


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
    h = x.new_zeros(x.shape[0], *A.shape) if initial is None else initial
    y = []
    for t in range(x.shape[1]):
        h = torch.exp(dt[:, t, :, None] * A) * h + (dt[:, t] * x[:, t])[..., None] * B[:, t, None, :]
        y.append(torch.einsum("ben,bn->be", h, C[:, t]))
    out = torch.stack(y, dim=1) if y else torch.zeros_like(x)
    return out if D is None else out + D * x


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
    kernel: Callable[..., Any] = _SelectiveScan.apply if backend is NUMBA else backend
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
    kernel: Callable[..., Any] = _SelectiveScanPhi.apply if backend is NUMBA else backend
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
    out = torch.zeros(batch, channels, length)
    _phi_profile(*_phi_arrays(dt, A, B, C, D), out.numpy())
    return out.to(dt.dtype)


def slices_of_channels(dt: Float[Tensor, "batch pos channel"], entries: int) -> Iterator[slice]:
    """Slices of channels so small that the Φ of each has at most so many entries; of one channel at least."""
    batch, length, channels = dt.shape
    step = max(1, entries // max(1, batch * length**2))
    for start in range(0, channels, step):
        yield slice(start, start + step)


# -- the scan in Numba --------------------------------------------------------------------------------


class _SelectiveScan(torch.autograd.Function):
    """Forward saves the state at every CHUNK-th position; backward recomputes the others, chunk by chunk."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None, initial: Tensor | None
    ) -> Tensor:
        batch, length, channels = x.shape
        states = A.shape[1]
        padded = -(-channels // LANES) * LANES
        arrays = [
            pad_last(x),
            pad_last(dt),
            pad_last(A.T),
            B.detach().contiguous(),
            C.detach().contiguous(),
            pad_last(x.new_zeros(channels) if D is None else D),
        ]
        save = any(ctx.needs_input_grad)
        saved = x.new_empty(batch, max(1, -(-length // CHUNK)) if save else 1, states, padded)
        saved[:, 0] = 0 if initial is None else pad_last(initial.mT)
        y = x.new_empty(batch, length, padded)
        _scan_forward(*(a.numpy() for a in arrays), saved.numpy(), y.numpy(), _block(batch, padded), save)
        if save:
            ctx.save_for_backward(*arrays, saved)
        ctx.channels, ctx.has_D, ctx.has_initial = channels, D is not None, initial is not None
        return y[..., :channels]

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        *arrays, saved = ctx.saved_tensors
        x, A = arrays[0], arrays[2]
        batch, length, padded = x.shape
        states, block, channels = len(A), _block(batch, padded), ctx.channels
        blocks = -(-padded // block)
        gx, gdt = torch.empty_like(x), torch.empty_like(x)
        gB, gC = (x.new_empty(batch, blocks, length, states) for _ in range(2))  # one summand per block
        gA = x.new_empty(batch, states, padded)
        gD = x.new_empty(batch, padded)
        g0 = x.new_empty(batch, states, padded)
        out = (gx, gdt, gA, gB, gC, gD, g0)
        _scan_backward(
            *(a.numpy() for a in arrays), saved.numpy(), pad_last(grad).numpy(), *(a.numpy() for a in out), block
        )
        return (
            gx[..., :channels],
            gdt[..., :channels],
            gA.sum(0)[:, :channels].T,
            gB.sum(1),
            gC.sum(1),
            gD.sum(0)[:channels] if ctx.has_D else None,
            g0[..., :channels].mT if ctx.has_initial else None,
        )


def _block(batch: int, channels: int) -> int:
    """Channels per task, whatever the threads: large blocks share B and C well, small ones keep all threads busy."""
    return 64 if batch * channels >= 512 else LANES


@task
def _forward_channels(b, first, last, x, dt, A, B, C, D, saved, y, save):  # type: ignore[no-untyped-def]
    states, length = A.shape[0], x.shape[1]
    h = np.empty((states, LANES), np.float32)
    A2 = np.empty((states, LANES), np.float32)  # exp(Δ A) = 2^(Δ A log₂e)
    for c in range(first, last, LANES):
        for n in range(states):
            store(h, (n, 0), load(saved, (b, 0, n, c)))
            store(A2, (n, 0), load(A, (n, c)) * np.float32(LOG2_E))
        skip = load(D, (c,))
        for t in range(length):
            if save and t % CHUNK == 0:
                for n in range(states):
                    store(saved, (b, t // CHUNK, n, c), load(h, (n, 0)))
            delta = load(dt, (b, t, c))
            value = load(x, (b, t, c))
            total = skip * value
            value = delta * value
            for n in range(states):
                state = exp2(delta * load(A2, (n, 0))) * load(h, (n, 0)) + value * broadcast(B, (b, t, n))
                store(h, (n, 0), state)
                total = total + state * broadcast(C, (b, t, n))
            store(y, (b, t, c), total)


@kernel
def _scan_forward(x, dt, A, B, C, D, saved, y, block, save):  # type: ignore[no-untyped-def]
    batch, _, channels = x.shape
    blocks = (channels + block - 1) // block
    for item in prange(batch * blocks):
        first = item % blocks * block
        _forward_channels(item // blocks, first, min(first + block, channels), x, dt, A, B, C, D, saved, y, save)


@task
def _backward_channels(  # type: ignore[no-untyped-def]
    b, k, first, last, x, dt, A, B, C, D, saved, gy, gx, gdt, gA, gB, gC, gD, g0
):
    """Adjoint of the scan. With g_t = ∂loss/∂h_t = C_t ∂y_t + exp(Δ_{t+1} A) g_{t+1}:

    ∂B_t = Σ_channel g_t Δ_t x_t,  ∂C_t = Σ_channel h_t ∂y_t,  ∂(Δ_t A) = g_t exp(Δ_t A) h_{t−1}.
    """
    states, length = A.shape[0], x.shape[1]
    width = last - first
    h = np.empty((CHUNK + 1, states, LANES), np.float32)
    decay = np.empty((CHUNK, states, LANES), np.float32)
    A2 = np.empty((states, width), np.float32)
    g = np.zeros((states, width), np.float32)
    sumA = np.zeros((states, width), np.float32)
    sumD = np.zeros(width, np.float32)
    sumB = np.empty((CHUNK, states, LANES), np.float32)
    sumC = np.empty((CHUNK, states, LANES), np.float32)
    zero = splat(0.0)
    for n in range(states):
        for c in range(0, width, LANES):
            store(A2, (n, c), load(A, (n, first + c)) * np.float32(LOG2_E))
    for chunk in range((length + CHUNK - 1) // CHUNK - 1, -1, -1):
        start = chunk * CHUNK
        steps = min(CHUNK, length - start)
        for s in range(steps):
            for n in range(states):
                store(sumB, (s, n, 0), zero)
                store(sumC, (s, n, 0), zero)
        for c in range(0, width, LANES):
            for n in range(states):
                store(h, (0, n, 0), load(saved, (b, chunk, n, first + c)))
            for s in range(steps):
                delta = load(dt, (b, start + s, first + c))
                value = delta * load(x, (b, start + s, first + c))
                for n in range(states):
                    factor = exp2(delta * load(A2, (n, c)))
                    store(decay, (s, n, 0), factor)
                    store(h, (s + 1, n, 0), factor * load(h, (s, n, 0)) + value * broadcast(B, (b, start + s, n)))
            skip = load(D, (first + c,))
            skip_grad = load(sumD, (c,))
            for s in range(steps - 1, -1, -1):
                t = start + s
                delta = load(dt, (b, t, first + c))
                raw = load(x, (b, t, first + c))
                value = delta * raw
                out = load(gy, (b, t, first + c))
                delta_grad, value_grad = zero, zero
                for n in range(states):
                    grad = load(g, (n, c)) + out * broadcast(C, (b, t, n))
                    store(sumC, (s, n, 0), load(sumC, (s, n, 0)) + load(h, (s + 1, n, 0)) * out)
                    store(sumB, (s, n, 0), load(sumB, (s, n, 0)) + grad * value)
                    value_grad = value_grad + grad * broadcast(B, (b, t, n))
                    grad = grad * load(decay, (s, n, 0))
                    store(g, (n, c), grad)
                    exponent = grad * load(h, (s, n, 0))
                    delta_grad = delta_grad + exponent * load(A2, (n, c))
                    store(sumA, (n, c), load(sumA, (n, c)) + exponent * delta)
                store(gdt, (b, t, first + c), delta_grad * np.float32(LN_2) + value_grad * raw)
                store(gx, (b, t, first + c), value_grad * delta + out * skip)
                skip_grad = skip_grad + out * raw
            store(sumD, (c,), skip_grad)
        for s in range(steps):
            for n in range(states):
                gB[b, k, start + s, n] = lane_sum(load(sumB, (s, n, 0)))
                gC[b, k, start + s, n] = lane_sum(load(sumC, (s, n, 0)))
    for c in range(0, width, LANES):
        for n in range(states):
            store(gA, (b, n, first + c), load(sumA, (n, c)))
            store(g0, (b, n, first + c), load(g, (n, c)))
        store(gD, (b, first + c), load(sumD, (c,)))


@kernel
def _scan_backward(  # type: ignore[no-untyped-def]
    x, dt, A, B, C, D, saved, gy, gx, gdt, gA, gB, gC, gD, g0, block
):
    batch, _, channels = x.shape
    blocks = (channels + block - 1) // block
    for item in prange(batch * blocks):
        b, k = item // blocks, item % blocks
        last = min(k * block + block, channels)
        _backward_channels(b, k, k * block, last, x, dt, A, B, C, D, saved, gy, gx, gdt, gA, gB, gC, gD, g0)


# -- Φ in Numba ---------------------------------------------------------------------------------------


class _SelectiveScanPhi(torch.autograd.Function):
    """Backward recomputes each channel's states, one state index at a time: two L × L scratch arrays per thread."""

    @staticmethod
    def forward(ctx: Any, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None) -> Tensor:
        batch, length, channels = dt.shape
        phi = dt.new_empty(batch, channels, length, length)
        _phi_forward(*_phi_arrays(dt, A, B, C, D), phi.numpy())
        ctx.save_for_backward(dt, A, B, C)
        ctx.has_D = D is not None
        return phi

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        dt, A, B, C = ctx.saved_tensors
        batch, length, channels = dt.shape
        block = 16 if batch * channels >= 256 else 1
        gdt = dt.new_zeros(batch, channels, length)
        gA = dt.new_empty(batch, *A.shape)
        gB, gC = (dt.new_zeros(batch, -(-channels // block), length, A.shape[1]) for _ in range(2))
        delta, A2, b, c, _ = _phi_arrays(pad_last(dt.mT).mT, A, B, C, None)
        out = (gdt, gA, gB, gC)
        _phi_backward(delta, A2, b, c, grad.contiguous().numpy(), *(tensor.numpy() for tensor in out), block)
        gD = grad.diagonal(dim1=-2, dim2=-1).sum((0, 2)) if ctx.has_D else None
        return gdt.mT, gA.sum(0), gB.sum(1), gC.sum(1), gD


def _phi_arrays(dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None) -> tuple[Any, ...]:
    """What the Φ kernels read: positions last in Δ, A · log₂e with its state axis padded for vectors."""
    D = A.new_zeros(len(A)) if D is None else D
    tensors = (dt.mT, pad_last(A.float() * LOG2_E), B, C, D)
    return tuple(tensor.detach().float().contiguous().numpy() for tensor in tensors)


@task
def _next_row(b, e, i, dt, A2, B, C, D, decay, h, row):  # type: ignore[no-untyped-def]
    """Row i of Φ up to its diagonal, into `row`. h[n, j] holds h_j of the row before."""
    states = B.shape[2]
    delta = dt[b, e, i]
    for n in range(0, states, LANES):
        store(decay, (n,), exp2(splat(delta) * load(A2, (e, n))))
    for j in range(0, i, LANES):
        total = splat(0.0)
        for n in range(states):
            state = load(h, (n, j)) * broadcast(decay, (n,))
            store(h, (n, j), state)
            total = total + state * broadcast(C, (b, i, n))
        store(row, (j,), total)
    diagonal = D[e]
    for n in range(states):
        h[n, i] = delta * B[b, i, n]
        diagonal += delta * B[b, i, n] * C[b, i, n]
    row[i] = diagonal


@kernel
def _phi_forward(dt, A2, B, C, D, phi):  # type: ignore[no-untyped-def]
    batch, channels, length = dt.shape
    padded = (length + LANES - 1) // LANES * LANES
    for item in prange(batch * channels):
        b, e = item // channels, item % channels
        decay = np.empty(A2.shape[1], np.float32)
        h = np.zeros((B.shape[2], padded), np.float32)
        row = np.empty(padded, np.float32)
        for i in range(length):
            _next_row(b, e, i, dt, A2, B, C, D, decay, h, row)
            out = phi[b, e, i]
            for j in range(i + 1):
                out[j] = row[j]
            for j in range(i + 1, length):
                out[j] = 0.0


@kernel
def _phi_profile(dt, A2, B, C, D, out):  # type: ignore[no-untyped-def]
    batch, channels, length = dt.shape
    padded = (length + LANES - 1) // LANES * LANES
    for item in prange(batch * channels):
        b, e = item // channels, item % channels
        decay = np.empty(A2.shape[1], np.float32)
        h = np.zeros((B.shape[2], padded), np.float32)
        row = np.empty(padded, np.float32)
        sums = out[b, e]
        for i in range(length):
            _next_row(b, e, i, dt, A2, B, C, D, decay, h, row)
            for j in range(i + 1):
                sums[i - j] += abs(row[j])
        for lag in range(length):
            sums[lag] /= length - lag


@task
def _backward_phi_channels(b, k, first, last, dt, A2, B, C, gphi, gdt, gA, gB, gC):  # type: ignore[no-untyped-def]
    """Adjoint of the row recurrence. With g_j = Σ_{i ≥ row} C_i ∂Φ_ij exp(…) carried upwards from the last row:

    ∂C_i = Σ_j ∂Φ_ij h_j,  ∂(Δ_i A) = Σ_{j<i} g_j h_j,  ∂(Δ_i B_i) = g_i,  h_j as it stands in row i.
    """
    states, length, padded = B.shape[2], B.shape[1], dt.shape[2]
    G = np.zeros((length, padded), np.float32)  # ∂Φ, zero above the diagonal
    H = np.empty((length, padded), np.float32)  # h_j in row i for one n, zero from the diagonal on
    decay = np.empty(padded, np.float32)
    h = np.empty(padded, np.float32)
    g = np.empty(padded, np.float32)
    for e in range(first, last):
        for i in range(length):
            for j in range(i + 1):
                G[i, j] = gphi[b, e, i, j]
        for n in range(states):
            rate = A2[e, n]
            for i in range(0, padded, LANES):
                store(decay, (i,), exp2(load(dt, (b, e, i)) * rate))
                store(h, (i,), splat(0.0))
                store(g, (i,), splat(0.0))
            for i in range(length):
                factor = decay[i]
                for j in range(0, i + 1, LANES):
                    state = load(h, (j,)) * factor
                    store(h, (j,), state)
                    store(H, (i, j), state)
                h[i] = dt[b, e, i] * B[b, i, n]
            rate_grad = np.float32(0.0)
            for i in range(length - 1, -1, -1):
                factor = decay[i]
                weight = C[b, i, n]
                delta = dt[b, e, i]
                entered = g[i] + weight * G[i, i]
                outputs, exponents = splat(0.0), splat(0.0)
                for j in range(0, i + 1, LANES):
                    state = load(H, (i, j))
                    row = load(G, (i, j))
                    grad = load(g, (j,)) + row * weight
                    outputs = outputs + row * state
                    exponents = exponents + grad * state
                    store(g, (j,), grad * factor)
                exponent = lane_sum(exponents)
                rate_grad += exponent * delta
                gdt[b, e, i] += exponent * rate * np.float32(LN_2) + entered * B[b, i, n]
                gB[b, k, i, n] += entered * delta
                gC[b, k, i, n] += lane_sum(outputs) + G[i, i] * delta * B[b, i, n]
            gA[b, e, n] = rate_grad


@kernel
def _phi_backward(dt, A2, B, C, gphi, gdt, gA, gB, gC, block):  # type: ignore[no-untyped-def]
    batch, channels = dt.shape[:2]
    blocks = (channels + block - 1) // block
    for item in prange(batch * blocks):
        b, k = item // blocks, item % blocks
        last = min(k * block + block, channels)
        _backward_phi_channels(b, k, k * block, last, dt, A2, B, C, gphi, gdt, gA, gB, gC)
