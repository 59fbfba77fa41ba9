"""The matrix Φ of the selective scan on a CPU, in Numba: whole with its gradients, and its profile over lags.

The equations and the reference are in selective_scan. Row by row, h_j ← exp(Δ_i A) ⊙ h_j and Φ_ij = C_i·h_j, so all
exponentials are at most 1.
"""

from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from numba import prange
from torch import Tensor

from circuitscope.kernels.numba_simd import (
    LANES,
    LN_2,
    LOG2_E,
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


class SelectiveScanPhi(torch.autograd.Function):
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


def phi_profile(
    dt: Float[Tensor, "batch pos channel"],
    A: Float[Tensor, "channel state"],
    B: Float[Tensor, "batch pos state"],
    C: Float[Tensor, "batch pos state"],
    D: Float[Tensor, " channel"] | None,
) -> Float[Tensor, "batch channel lag"]:
    """The mean of |Φ_{i,i−lag}| over i, in float32, without Φ in memory."""
    batch, length, channels = dt.shape
    out = torch.zeros(batch, channels, length)
    _phi_profile(*_phi_arrays(dt, A, B, C, D), out.numpy())
    return out


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
