"""The selective scan on a CPU, in Numba, forward and backward. The equations and the reference are in selective_scan.

A task has a block of channels of one sequence, LANES of them in a vector, and walks through the positions. Gradients
that sum over channels get one summand per block, so the same input gives the same bits with any number of threads.
"""

from typing import Any

import numpy as np
import torch
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

CHUNK = 16  # positions between two saved states; backward recomputes what lies between


class SelectiveScan(torch.autograd.Function):
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
