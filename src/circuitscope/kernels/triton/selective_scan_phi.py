"""The matrix Φ of the selective scan in Triton: whole with its gradients, or summed up without Φ in memory.

    Φ_ij = Σ_n C_in h_ijn + D δ_ij,    h_ijn = exp(A_n S_ij) Δ_j B_jn,    S_ij = Σ_{k=j+1..i} Δ_k.

A program has one channel of one sequence and a block of sources j, and walks through the destinations i: row by row,
h_j ← exp(Δ_i A) ⊙ h_j, so all exponentials are at most 1. The reference is in kernels.selective_scan. Summands of
different programs are added up by torch, so the same input gives the same bits.
"""

from typing import Any, no_type_check

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int
from torch import Tensor

from circuitscope.kernels.triton.launch import block_of, blocks_of, launch, plain, power_of_two, wide

GROUP = 64  # channels that one program of phi_mean adds up


def phi(
    dt: Float[Tensor, "batch pos channel"],
    A: Float[Tensor, "channel state"],
    B: Float[Tensor, "batch pos state"],
    C: Float[Tensor, "batch pos state"],
    D: Float[Tensor, " channel"] | None = None,
) -> Float[Tensor, "batch channel dest src"]:
    """Φ of every channel; all float32 or all float64, none empty. Differentiable once, in every argument."""
    matrix: Tensor = _Phi.apply(dt, A, B, C, D)  # type: ignore[no-untyped-call]
    return matrix


@torch.no_grad()
def phi_mean(
    dt: Float[Tensor, "batch pos channel"],
    A: Float[Tensor, "channel state"],
    B: Float[Tensor, "batch pos state"],
    C: Float[Tensor, "batch pos state"],
    D: Float[Tensor, " channel"] | None = None,
    absolute: bool = True,
) -> Float[Tensor, "batch dest src"]:
    """The mean of |Φ|, or of Φ, over channels. Memory for one matrix per GROUP channels; no gradients."""
    batch, length, channels = dt.shape
    groups, block = blocks_of(channels, GROUP), block_of(length, A.shape[1])
    total = dt.new_zeros(groups, batch, length, length)
    launch(
        _phi_mean,
        groups * batch * blocks_of(length, block),
        *(*_read(dt, A, B, C, D), total, length, channels, A.shape[1], batch),
        ABSOLUTE=absolute,
        GROUP_=GROUP,
        SOURCES=block,
        STATES=power_of_two(A.shape[1]),
    )
    mean: Tensor = total.sum(0) / channels
    return mean


@torch.no_grad()
def phi_on_edges(
    dt: Float[Tensor, "batch pos channel"],
    A: Float[Tensor, "channel state"],
    B: Float[Tensor, "batch pos state"],
    C: Float[Tensor, "batch pos state"],
    D: Float[Tensor, " channel"] | None,
    sequence: Int[Tensor, " edge"],
    dest: Int[Tensor, " edge"],
    src: Int[Tensor, " edge"],
) -> tuple[Float[Tensor, "edge channel"], Float[Tensor, "batch channel dest"]]:
    """Φ at the edges dest ← src of each sequence, and Σ_j |Φ_ij| of every row; no gradients.

    An edge with src > dest gives 0. The caller makes sure that every index is inside.
    """
    batch, length, channels = dt.shape
    states, inputs = A.shape[1], _read(dt, A, B, C, D)
    entries = dt.new_empty(len(src), channels)
    if len(src):
        block = block_of(channels, states)
        edges = [index.to(device=dt.device, dtype=torch.int32).contiguous() for index in (sequence, dest, src)]
        launch(
            _phi_on_edges,
            len(src) * blocks_of(channels, block),
            *(*inputs, *edges, entries, length, channels, states),
            CHANNELS=block,
            STATES=power_of_two(states),
        )
    block = block_of(length, states)
    mass = dt.new_zeros(blocks_of(length, block), batch, channels, length)  # one summand per block of sources
    _walk(inputs, mass, block, whole=False)
    return entries, mass.sum(0)


@torch.no_grad()
def phi_profile(
    dt: Float[Tensor, "batch pos channel"],
    A: Float[Tensor, "channel state"],
    B: Float[Tensor, "batch pos state"],
    C: Float[Tensor, "batch pos state"],
    D: Float[Tensor, " channel"] | None = None,
) -> Float[Tensor, "batch channel lag"]:
    """The mean of |Φ_{i,i−lag}| over i, for every channel and lag; no gradients."""
    batch, length, channels = dt.shape
    block = block_of(length, A.shape[1])
    total = dt.new_zeros(blocks_of(length, block), batch, channels, length)
    launch(
        _phi_profile,
        total.numel() // length,
        *(*_read(dt, A, B, C, D), total, length, channels, A.shape[1], batch),
        SOURCES=block,
        STATES=power_of_two(A.shape[1]),
    )
    profile: Tensor = total.sum(0) / torch.arange(length, 0, -1, device=dt.device, dtype=dt.dtype)
    return profile


def _read(dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None) -> list[Tensor]:
    return [plain(tensor) for tensor in (dt, A, B, C, dt.new_zeros(dt.shape[2]) if D is None else D)]


def _walk(inputs: list[Tensor], out: Tensor, block: int, whole: bool) -> None:
    """Every row of Φ, into out [batch, channel, dest, src], or its sum of sizes, into [block, batch, channel, dest]."""
    (batch, length, channels), states = inputs[0].shape, inputs[1].shape[1]
    launch(
        _phi_rows,
        blocks_of(length, block) * batch * channels,
        *(*inputs, out, length, channels, states, batch),
        WHOLE=whole,
        SOURCES=block,
        STATES=power_of_two(states),
    )


class _Phi(torch.autograd.Function):
    """Backward takes h_ij from its exponent S_ij, which it sums up row by row.

    With u_j = Δ_j B_j and E_ij = Σ_n ∂Φ_ij C_in h_ijn A_n for j < i, the gradient of S_ij:

    ∂u_jn = Σ_i ∂Φ_ij C_in exp(A_n S_ij),   ∂C_in = Σ_j ∂Φ_ij h_ijn,   ∂A_n = Σ_ij ∂Φ_ij C_in h_ijn S_ij,
    ∂Δ_k = Σ_{i≥k>j} E_ij + ∂u_k · B_k.
    """

    @staticmethod
    def forward(ctx: Any, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None) -> Tensor:
        batch, length, channels = dt.shape
        inputs = _read(dt, A, B, C, D)
        matrix = dt.new_zeros(batch, channels, length, length)
        _walk(inputs, matrix, block_of(length, A.shape[1]), whole=True)
        ctx.save_for_backward(*inputs[:4])
        ctx.has_D = D is not None
        return matrix

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        dt, A, B, C = ctx.saved_tensors
        batch, length, channels = dt.shape
        states = A.shape[1]
        block = block_of(length, states)
        blocks = blocks_of(length, block)
        exponents = torch.empty_like(grad, memory_format=torch.contiguous_format)
        gdt = dt.new_zeros(blocks, batch, channels, length)  # one summand per block of sources
        gA = dt.new_empty(blocks, batch, channels, states)
        gu = dt.new_empty(batch, channels, length, states)  # gradient of Δ_j B_j
        gC = dt.new_zeros(blocks, batch, channels, length, states)
        launch(
            _phi_backward,
            blocks * batch * channels,
            *(dt, A, B, C, plain(grad), exponents, gdt, gA, gu, gC, length, channels, states, batch),
            SOURCES=block,
            STATES=power_of_two(states),
        )
        with torch.autocast(grad.device.type, enabled=False):  # which would round both products
            gdt_j, gB = torch.einsum("bejn,bjn->bje", gu, B), torch.einsum("bejn,bje->bjn", gu, dt)
        return (
            gdt.sum(0).mT + gdt_j,
            gA.sum((0, 1)),
            gB,
            gC.sum((0, 2)),
            grad.diagonal(dim1=-2, dim2=-1).sum((0, 2)) if ctx.has_D else None,
        )


# -- kernels ------------------------------------------------------------------------------------------


@triton.jit
@no_type_check
def _next_row(h, row, j, delta, rate, write, read):
    """h_j [src, state] as row `row` sees it, and what C reads from it; sources after the row have h = 0."""
    h = tl.where((j == row)[:, None], (delta * write)[None, :], tl.exp(delta * rate)[None, :] * h)
    return h, tl.sum(h * read[None, :], 1)


@triton.jit
@no_type_check
def _phi_rows(
    dt,
    A,
    B,
    C,
    D,
    out,
    length,
    channels,
    states,
    batch,
    WHOLE: tl.constexpr,
    SOURCES: tl.constexpr,
    STATES: tl.constexpr,
):
    length, channels, states, batch = wide(length), wide(channels), wide(states), wide(batch)
    item = tl.program_id(0)
    e, b, first = item % channels, item // channels % batch, item // channels // batch * SOURCES
    n, j = tl.arange(0, STATES), first + tl.arange(0, SOURCES)
    at = b * length
    rate = tl.load(A + e * states + n, n < states, 0.0)
    skip = tl.load(D + e)
    matrix = (at * channels + e * length) * length
    h = tl.zeros([SOURCES, STATES], rate.dtype)
    for i in range(first, length):
        delta = tl.load(dt + (at + i) * channels + e)
        write = tl.load(B + (at + i) * states + n, n < states, 0.0)
        read = tl.load(C + (at + i) * states + n, n < states, 0.0)
        h, row = _next_row(h, i, j, delta, rate, write, read)
        row = tl.where(j == i, row + skip, row)
        if WHOLE:
            tl.store(out + matrix + i * length + j, row, j <= i)
        else:
            tl.store(out + item * length + i, tl.sum(tl.where(j <= i, tl.abs(row), 0.0), 0))


@triton.jit
@no_type_check
def _phi_mean(
    dt,
    A,
    B,
    C,
    D,
    out,
    length,
    channels,
    states,
    batch,
    ABSOLUTE: tl.constexpr,
    GROUP_: tl.constexpr,
    SOURCES: tl.constexpr,
    STATES: tl.constexpr,
):
    length, channels, states, batch = wide(length), wide(channels), wide(states), wide(batch)
    blocks = tl.cdiv(length, SOURCES)
    item = tl.program_id(0) // blocks  # group of channels and sequence
    first = tl.program_id(0) % blocks * SOURCES
    n, j = tl.arange(0, STATES), first + tl.arange(0, SOURCES)
    at = (item % batch) * length
    start = item // batch * GROUP_
    out += item * length * length
    for e in range(start, tl.minimum(start + GROUP_, channels)):
        rate = tl.load(A + e * states + n, n < states, 0.0)
        skip = tl.load(D + e)
        h = tl.zeros([SOURCES, STATES], rate.dtype)
        for i in range(first, length):
            delta = tl.load(dt + (at + i) * channels + e)
            write = tl.load(B + (at + i) * states + n, n < states, 0.0)
            read = tl.load(C + (at + i) * states + n, n < states, 0.0)
            h, row = _next_row(h, i, j, delta, rate, write, read)
            row = tl.where(j == i, row + skip, row)
            if ABSOLUTE:
                row = tl.abs(row)
            place = out + i * length + j
            tl.store(place, tl.load(place, j <= i, 0.0) + row, j <= i)
        tl.debug_barrier()  # the next channel adds to what other threads of this program wrote


@triton.jit
@no_type_check
def _phi_on_edges(
    dt,
    A,
    B,
    C,
    D,
    sequence,
    dest,
    src,
    out,
    length,
    channels,
    states,
    CHANNELS: tl.constexpr,
    STATES: tl.constexpr,
):
    length, channels, states = wide(length), wide(channels), wide(states)
    blocks = tl.cdiv(channels, CHANNELS)
    edge = tl.program_id(0) // blocks
    c = tl.program_id(0) % blocks * CHANNELS + tl.arange(0, CHANNELS)
    n = tl.arange(0, STATES)
    at = tl.load(sequence + edge) * length
    i, j = tl.load(dest + edge), tl.load(src + edge)
    rate = tl.load(A + c[:, None] * states + n[None, :], (c < channels)[:, None] & (n < states)[None, :], 0.0)
    between = tl.zeros([CHANNELS], rate.dtype)
    for k in range(j + 1, i + 1):
        between += tl.load(dt + (at + k) * channels + c, c < channels, 0.0)
    read = tl.load(C + (at + i) * states + n, n < states, 0.0)
    write = tl.load(B + (at + j) * states + n, n < states, 0.0)
    delta = tl.load(dt + (at + j) * channels + c, c < channels, 0.0)
    decay = tl.where(i == j, 1.0, tl.exp(between[:, None] * rate))
    entry = delta * tl.sum(decay * (read * write)[None, :], 1)
    entry += tl.where(i == j, tl.load(D + c, c < channels, 0.0), 0.0)
    entry = tl.where(j <= i, entry, 0.0)
    tl.store(out + edge * channels + c, entry, c < channels)


@triton.jit
@no_type_check
def _phi_profile(
    dt,
    A,
    B,
    C,
    D,
    out,
    length,
    channels,
    states,
    batch,
    SOURCES: tl.constexpr,
    STATES: tl.constexpr,
):
    """Walks along the diagonals: h_j at lag δ is that of row j + δ, so each source has a row of its own."""
    length, channels, states, batch = wide(length), wide(channels), wide(states), wide(batch)
    item = tl.program_id(0)
    e, b, first = item % channels, item // channels % batch, item // channels // batch * SOURCES
    n, j = tl.arange(0, STATES), first + tl.arange(0, SOURCES)
    at = b * length
    rate = tl.load(A + e * states + n, n < states, 0.0)
    inside = (j < length)[:, None] & (n < states)[None, :]
    delta = tl.load(dt + (at + j) * channels + e, j < length, 0.0)
    h = delta[:, None] * tl.load(B + (at + j)[:, None] * states + n[None, :], inside, 0.0)
    read = tl.load(C + (at + j)[:, None] * states + n[None, :], inside, 0.0)
    size = tl.where(j < length, tl.abs(tl.sum(h * read, 1) + tl.load(D + e)), 0.0)
    tl.store(out + item * length, tl.sum(size, 0))
    for lag in range(1, length - first):
        row = j + lag
        inside = (row < length)[:, None] & (n < states)[None, :]
        delta = tl.load(dt + (at + row) * channels + e, row < length, 0.0)
        h = tl.exp(delta[:, None] * rate[None, :]) * h
        read = tl.load(C + (at + row)[:, None] * states + n[None, :], inside, 0.0)
        size = tl.where(row < length, tl.abs(tl.sum(h * read, 1)), 0.0)
        tl.store(out + item * length + lag, tl.sum(size, 0))


@triton.jit
@no_type_check
def _phi_backward(
    dt,
    A,
    B,
    C,
    gphi,
    exponents,
    gdt,
    gA,
    gu,
    gC,
    length,
    channels,
    states,
    batch,
    SOURCES: tl.constexpr,
    STATES: tl.constexpr,
):
    length, channels, states, batch = wide(length), wide(channels), wide(states), wide(batch)
    item = tl.program_id(0)
    e, b, first = item % channels, item // channels % batch, item // channels // batch * SOURCES
    n, j = tl.arange(0, STATES), first + tl.arange(0, SOURCES)
    at = b * length
    matrix = (at * channels + e * length) * length
    summand = item * length
    rate = tl.load(A + e * states + n, n < states, 0.0)
    inside = (j < length)[:, None] & (n < states)[None, :]
    entered = tl.load(dt + (at + j) * channels + e, j < length, 0.0)[:, None] * tl.load(
        B + (at + j)[:, None] * states + n[None, :], inside, 0.0
    )
    between = tl.zeros([SOURCES], rate.dtype)  # S_ij
    sum_u = tl.zeros([SOURCES, STATES], rate.dtype)
    sum_A = tl.zeros([STATES], rate.dtype)
    for i in range(first, length):
        delta = tl.load(dt + (at + i) * channels + e)
        read = tl.load(C + (at + i) * states + n, n < states, 0.0)
        grad = tl.load(gphi + matrix + i * length + j, j <= i, 0.0)
        between = tl.where(j < i, between + delta, 0.0)
        decay = tl.where((j < i)[:, None], tl.exp(between[:, None] * rate[None, :]), 1.0)
        h = decay * entered
        tl.store(gC + (summand + i) * states + n, tl.sum(grad[:, None] * h, 0), n < states)
        weight = grad[:, None] * read[None, :]
        sum_u += weight * decay
        sum_A += tl.sum(weight * h * between[:, None], 0)
        exponent = tl.where(j < i, tl.sum(weight * h * rate[None, :], 1), 0.0)
        tl.store(exponents + matrix + i * length + j, exponent, j <= i)
    tl.store(gA + item * states + n, sum_A, n < states)
    place = (at * channels + e * length + j)[:, None] * states + n[None, :]
    tl.store(gu + place, sum_u, inside)
    tl.debug_barrier()  # the second walk reads what other threads of this program wrote
    later = tl.zeros([SOURCES], rate.dtype)  # Σ of E_kj over k ≥ i
    for back in range(length - first):
        i = length - 1 - back
        later += tl.load(exponents + matrix + i * length + j, j <= i, 0.0)
        tl.store(gdt + summand + i, tl.sum(tl.where(j < i, later, 0.0), 0))
