"""A selective scan and what surrounds it in a gated block, on chosen edges, in Triton: no matrix in memory.

    M = diag(left) · Φ · diag(right) · T,  T_jk = taps_{j−k}:    M_ik = left_i Σ_w Φ_{i,k+w} right_{k+w} taps_w

Φ and its letters are those of kernels.selective_scan. Source k of M enters the state at rows k to k + width − 1, and
not at row k alone, and then decays like a source of Φ:

    g_ik = exp(Δ_i A) ⊙ g_{i−1,k} + taps_{i−k} right_i Δ_i B_i,    M_ik = left_i (C_i·g_ik + D taps_{i−k} right_i).

So a row of M costs what a row of Φ does. The reference is `kernels.edge_sums.Surroundings`. Summands of different
programs are added up by torch, so the same input gives the same bits.
"""

from typing import no_type_check

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int
from torch import Tensor

from circuitscope.kernels.triton.launch import block_of, blocks_of, launch, plain, power_of_two, wide


@torch.no_grad()
def composed_on_edges(
    dt: Float[Tensor, "batch pos channel"],
    A: Float[Tensor, "channel state"],
    B: Float[Tensor, "batch pos state"],
    C: Float[Tensor, "batch pos state"],
    D: Float[Tensor, " channel"],
    left: Float[Tensor, "batch channel pos"],
    right: Float[Tensor, "batch channel pos"],
    taps: Float[Tensor, "channel lag"],
    sequence: Int[Tensor, " edge"],
    dest: Int[Tensor, " edge"],
    src: Int[Tensor, " edge"],
) -> tuple[Float[Tensor, "edge channel"], Float[Tensor, "batch channel dest"]]:
    """M at the edges dest ← src of each sequence, and Σ_k |M_ik| of every row; no gradients.

    All float32 or all float64, none empty. An edge with src > dest gives 0. The caller makes sure that every index is
    inside.
    """
    batch, length, channels = dt.shape
    states, width = A.shape[1], taps.shape[1]
    inputs = [plain(tensor) for tensor in (dt, A, B, C, D, left, right, taps)]
    entries = dt.new_empty(len(src), channels)
    if len(src):
        block = block_of(channels, states)
        edges = [index.to(device=dt.device, dtype=torch.int32).contiguous() for index in (sequence, dest, src)]
        launch(
            _composed_on_edges,
            len(src) * blocks_of(channels, block),
            *(*inputs, *edges, entries, length, channels, states, width),
            CHANNELS=block,
            STATES=power_of_two(states),
        )
    block = block_of(length, states)
    mass = dt.new_zeros(blocks_of(length, block), batch, channels, length)  # one summand per block of sources
    launch(
        _composed_mass,
        blocks_of(length, block) * batch * channels,
        *(*inputs, mass, length, channels, states, width, batch),
        SOURCES=block,
        STATES=power_of_two(states),
    )
    return entries, mass.sum(0)


# -- kernels ------------------------------------------------------------------------------------------


@triton.jit
@no_type_check
def _composed_on_edges(
    dt,
    A,
    B,
    C,
    D,
    left,
    right,
    taps,
    sequence,
    dest,
    src,
    out,
    length,
    channels,
    states,
    width,
    CHANNELS: tl.constexpr,
    STATES: tl.constexpr,
):
    """An edge is a sum over the entries of Φ that the conv brings to its source, from the last to the source itself."""
    length, channels, states, width = wide(length), wide(channels), wide(states), wide(width)
    blocks = tl.cdiv(channels, CHANNELS)
    edge = tl.program_id(0) // blocks
    c = tl.program_id(0) % blocks * CHANNELS + tl.arange(0, CHANNELS)
    n = tl.arange(0, STATES)
    b = tl.load(sequence + edge)
    at = b * length
    i, k = tl.load(dest + edge), tl.load(src + edge)
    by_channel = (b * channels + c) * length
    rate = tl.load(A + c[:, None] * states + n[None, :], (c < channels)[:, None] & (n < states)[None, :], 0.0)
    skip = tl.load(D + c, c < channels, 0.0)
    read = tl.load(C + (at + i) * states + n, n < states, 0.0)
    last = tl.minimum(k + width - 1, i)
    between = tl.zeros([CHANNELS], rate.dtype)  # of Δ behind the source j of Φ, up to i
    for step in range(last + 1, i + 1):
        between += tl.load(dt + (at + step) * channels + c, c < channels, 0.0)
    total = tl.zeros([CHANNELS], rate.dtype)
    for back in range(last - k + 1):
        j = last - back
        delta = tl.load(dt + (at + j) * channels + c, c < channels, 0.0)
        write = tl.load(B + (at + j) * states + n, n < states, 0.0)
        decay = tl.where(i == j, 1.0, tl.exp(between[:, None] * rate))
        entry = delta * tl.sum(decay * (read * write)[None, :], 1) + tl.where(i == j, skip, 0.0)
        scale = tl.load(right + by_channel + j, c < channels, 0.0)
        total += entry * scale * tl.load(taps + c * width + (j - k), c < channels, 0.0)
        between += delta
    total *= tl.load(left + by_channel + i, c < channels, 0.0)
    tl.store(out + edge * channels + c, total, c < channels)


@triton.jit
@no_type_check
def _composed_mass(
    dt,
    A,
    B,
    C,
    D,
    left,
    right,
    taps,
    out,
    length,
    channels,
    states,
    width,
    batch,
    SOURCES: tl.constexpr,
    STATES: tl.constexpr,
):
    length, channels, states, width, batch = wide(length), wide(channels), wide(states), wide(width), wide(batch)
    item = tl.program_id(0)
    e, b, first = item % channels, item // channels % batch, item // channels // batch * SOURCES
    n, k = tl.arange(0, STATES), first + tl.arange(0, SOURCES)
    at = b * length
    by_channel = at * channels + e * length
    rate = tl.load(A + e * states + n, n < states, 0.0)
    skip = tl.load(D + e)
    g = tl.zeros([SOURCES, STATES], rate.dtype)
    for i in range(first, length):
        delta = tl.load(dt + (at + i) * channels + e)
        write = tl.load(B + (at + i) * states + n, n < states, 0.0)
        read = tl.load(C + (at + i) * states + n, n < states, 0.0)
        lag = i - k
        tap = tl.load(taps + e * width + lag, (lag >= 0) & (lag < width), 0.0)
        enters = tap * tl.load(right + by_channel + i)
        g = tl.exp(delta * rate)[None, :] * g + enters[:, None] * (delta * write)[None, :]
        row = tl.sum(g * read[None, :], 1) + enters * skip
        size = tl.sum(tl.where(k <= i, tl.abs(row), 0.0), 0) * tl.abs(tl.load(left + by_channel + i))
        tl.store(out + item * length + i, size)
