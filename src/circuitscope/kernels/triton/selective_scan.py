"""The selective scan in Triton, forward and backward. The equations and the reference are in kernels.selective_scan.

A program has a block of channels of one sequence and keeps their states [channel, state] in registers while it walks
through the positions. Forward saves the states before every CHUNK-th position; backward computes those between again,
chunk by chunk from the end, through a scratch array of one chunk.

    g_t = C_t ∂y_t + exp(Δ_{t+1} A) g_{t+1},   ∂C_t = Σ_channel h_t ∂y_t,   ∂B_t = Σ_channel g_t Δ_t x_t,
    ∂(Δ_t A) = g_t exp(Δ_t A) h_{t−1},         g_t = ∂loss/∂h_t.

Sums over channels and sequences are left to torch, summand by summand, so the same input gives the same bits.
"""

from typing import Any, no_type_check

import torch
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor

from circuitscope.kernels.triton.launch import block_of, blocks_of, launch, plain, power_of_two, wide

CHUNK = 16  # positions between two saved states


def scan(
    x: Float[Tensor, "batch pos channel"],
    dt: Float[Tensor, "batch pos channel"],
    A: Float[Tensor, "channel state"],
    B: Float[Tensor, "batch pos state"],
    C: Float[Tensor, "batch pos state"],
    D: Float[Tensor, " channel"] | None = None,
    initial: Float[Tensor, "batch channel state"] | None = None,
) -> Float[Tensor, "batch pos channel"]:
    """y of h_t = exp(Δ_t A) ⊙ h_{t−1} + Δ_t B_t x_t, y_t = C_t·h_t + D x_t; all float32 or all float64, none empty.

    Differentiable once, in every argument.
    """
    y: Tensor = _Scan.apply(x, dt, A, B, C, D, initial)  # type: ignore[no-untyped-call]
    return y


class _Scan(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None, initial: Tensor | None
    ) -> Tensor:
        batch, length, channels = x.shape
        states = A.shape[1]
        inputs = [plain(tensor) for tensor in (x, dt, A, B, C, x.new_zeros(channels) if D is None else D)]
        save = any(ctx.needs_input_grad)
        saved = x.new_empty(batch, blocks_of(length, CHUNK) if save else 1, channels, states)
        saved[:, 0] = 0 if initial is None else initial.detach()
        y = torch.empty_like(inputs[0])
        block = block_of(channels, states)
        launch(
            _scan_forward,
            batch * blocks_of(channels, block),
            *(*inputs, saved, y, length, channels, states),
            SAVE=save,
            CHUNK_=CHUNK,
            CHANNELS=block,
            STATES=power_of_two(states),
        )
        if save:
            ctx.save_for_backward(*inputs, saved)
        ctx.has_D, ctx.has_initial = D is not None, initial is not None
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        *inputs, saved = ctx.saved_tensors
        x, A = inputs[0], inputs[2]
        batch, length, channels = x.shape
        states = A.shape[1]
        block = block_of(channels, states)
        blocks = blocks_of(channels, block)
        gx, gdt = torch.empty_like(x), torch.empty_like(x)
        gA, g0 = (x.new_empty(batch, channels, states) for _ in range(2))
        gB, gC = (x.new_empty(batch, blocks, length, states) for _ in range(2))  # one summand per block
        gD = x.new_empty(batch, channels)
        scratch = x.new_empty(batch, min(CHUNK, length), channels, states)
        launch(
            _scan_backward,
            batch * blocks,
            *(*inputs, saved, plain(grad), scratch, gx, gdt, gA, gB, gC, gD, g0, length, channels, states),
            CHUNK_=CHUNK,
            CHANNELS=block,
            STATES=power_of_two(states),
        )
        return (
            gx,
            gdt,
            gA.sum(0),
            gB.sum(1),
            gC.sum(1),
            gD.sum(0) if ctx.has_D else None,
            g0 if ctx.has_initial else None,
        )


@triton.jit
@no_type_check
def _scan_forward(
    x,
    dt,
    A,
    B,
    C,
    D,
    saved,
    y,
    length,
    channels,
    states,
    SAVE: tl.constexpr,
    CHUNK_: tl.constexpr,
    CHANNELS: tl.constexpr,
    STATES: tl.constexpr,
):
    length, channels, states = wide(length), wide(channels), wide(states)
    blocks = tl.cdiv(channels, CHANNELS)
    b = tl.program_id(0) // blocks
    c = tl.program_id(0) % blocks * CHANNELS + tl.arange(0, CHANNELS)
    n = tl.arange(0, STATES)
    real = (c < channels)[:, None] & (n < states)[None, :]
    entry = c[:, None] * states + n[None, :]
    size = channels * states
    saved += b * (tl.cdiv(length, CHUNK_) * size if SAVE else size)
    at, shared = b * length * channels, b * length * states
    rate = tl.load(A + entry, real, 0.0)
    skip = tl.load(D + c, c < channels, 0.0)
    h = tl.load(saved + entry, real, 0.0)
    for t in range(length):
        if SAVE:  # noqa: SIM102 (a constant: without it nothing is compiled)
            if t % CHUNK_ == 0:
                tl.store(saved + t // CHUNK_ * size + entry, h, real)
        value = tl.load(x + at + t * channels + c, c < channels, 0.0)
        delta = tl.load(dt + at + t * channels + c, c < channels, 0.0)
        write = tl.load(B + shared + t * states + n, n < states, 0.0)
        read = tl.load(C + shared + t * states + n, n < states, 0.0)
        h = tl.exp(delta[:, None] * rate) * h + (delta * value)[:, None] * write[None, :]
        tl.store(y + at + t * channels + c, tl.sum(h * read[None, :], 1) + skip * value, c < channels)


@triton.jit
@no_type_check
def _scan_backward(
    x,
    dt,
    A,
    B,
    C,
    D,
    saved,
    gy,
    scratch,
    gx,
    gdt,
    gA,
    gB,
    gC,
    gD,
    g0,
    length,
    channels,
    states,
    CHUNK_: tl.constexpr,
    CHANNELS: tl.constexpr,
    STATES: tl.constexpr,
):
    length, channels, states = wide(length), wide(channels), wide(states)
    blocks = tl.cdiv(channels, CHANNELS)
    b = tl.program_id(0) // blocks
    c = tl.program_id(0) % blocks * CHANNELS + tl.arange(0, CHANNELS)
    n = tl.arange(0, STATES)
    real = (c < channels)[:, None] & (n < states)[None, :]
    entry = c[:, None] * states + n[None, :]
    size = channels * states
    chunks = tl.cdiv(length, CHUNK_)
    saved += b * chunks * size
    scratch += b * tl.minimum(CHUNK_, length) * size
    at, shared = b * length * channels, b * length * states
    summand = tl.program_id(0) * length * states
    rate = tl.load(A + entry, real, 0.0)
    skip = tl.load(D + c, c < channels, 0.0)
    g = tl.zeros_like(rate)
    sum_A = tl.zeros_like(rate)
    sum_D = tl.zeros_like(skip)
    for k in range(chunks):
        start = (chunks - 1 - k) * CHUNK_
        steps = tl.minimum(CHUNK_, length - start)
        h = tl.load(saved + (chunks - 1 - k) * size + entry, real, 0.0)
        for s in range(steps):
            tl.store(scratch + s * size + entry, h, real)
            value = tl.load(x + at + (start + s) * channels + c, c < channels, 0.0)
            delta = tl.load(dt + at + (start + s) * channels + c, c < channels, 0.0)
            write = tl.load(B + shared + (start + s) * states + n, n < states, 0.0)
            h = tl.exp(delta[:, None] * rate) * h + (delta * value)[:, None] * write[None, :]
        tl.debug_barrier()  # the states of this chunk are read by other threads than wrote them
        for back in range(steps):
            s = steps - 1 - back
            t = start + s
            value = tl.load(x + at + t * channels + c, c < channels, 0.0)
            delta = tl.load(dt + at + t * channels + c, c < channels, 0.0)
            out = tl.load(gy + at + t * channels + c, c < channels, 0.0)
            write = tl.load(B + shared + t * states + n, n < states, 0.0)
            read = tl.load(C + shared + t * states + n, n < states, 0.0)
            before = tl.load(scratch + s * size + entry, real, 0.0)
            decay = tl.exp(delta[:, None] * rate)
            h = decay * before + (delta * value)[:, None] * write[None, :]
            grad = g + out[:, None] * read[None, :]
            tl.store(gC + summand + t * states + n, tl.sum(h * out[:, None], 0), n < states)
            tl.store(gB + summand + t * states + n, tl.sum(grad * (delta * value)[:, None], 0), n < states)
            entered = tl.sum(grad * write[None, :], 1)
            g = grad * decay
            exponent = g * before
            tl.store(gdt + at + t * channels + c, tl.sum(exponent * rate, 1) + entered * value, c < channels)
            tl.store(gx + at + t * channels + c, entered * delta + out * skip, c < channels)
            sum_A += exponent * delta[:, None]
            sum_D += out * value
        tl.debug_barrier()  # before the next chunk overwrites them
    tl.store(gA + b * size + entry, sum_A, real)
    tl.store(g0 + b * size + entry, g, real)
    tl.store(gD + b * channels + c, sum_D, c < channels)
