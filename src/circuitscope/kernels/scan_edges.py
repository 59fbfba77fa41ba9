"""Circuit scores of the selective scan without its mixing matrix: rows of Φ go from registers into sums over edges.

Φ and its letters are those of `kernels.selective_scan`; the sums are those of `kernels.edge_sums`. What surrounds the
scan in a gated block makes a second matrix of the same rows:

    M = diag(left) · Φ · diag(right) · T,   T_jk = taps_{j−k},   so  M_ik = left_i Σ_w Φ_{i,k+w} right_{k+w} taps_w

Eight rows are made at a time. With P_i = exp(A Σ Δ) over the rows of the block up to i, and h_j as it stands before
the block, Φ_ij = Σ_n (C_in P_in) h_jn: the state of a column is loaded once for eight rows.
"""

import numpy as np
import torch
from jaxtyping import Float
from numba import prange
from torch import Tensor

from circuitscope.kernels.backends import NUMBA, TRITON_COMPOSED_ON_EDGES, TRITON_PHI_ON_EDGES, at_least_float32
from circuitscope.kernels.edge_sums import (
    EdgeList,
    EdgeSums,
    Surroundings,
    add_row,
    edge_sums_reference,
    sums_of_entries,
)
from circuitscope.kernels.numba_simd import LANES, LOG2_E, broadcast, exp2, kernel, load, pad_last, splat, store, task
from circuitscope.kernels.selective_scan import check_scan, selective_scan_phi, slices_of_channels

_ROWS = 8  # `_next_rows` names its accumulators one by one; a block has as many columns of its own as a vector lanes
_ENTRIES = 16_000_000  # of Φ that are built at once where neither Numba nor Triton serves: 64 MB
_ONE = np.eye(_ROWS, dtype=np.float32)


@torch.no_grad()
def selective_scan_edge_sums(
    dt: Float[Tensor, "batch pos channel"],
    A: Float[Tensor, "channel state"],
    B: Float[Tensor, "batch pos state"],
    C: Float[Tensor, "batch pos state"],
    D: Float[Tensor, " channel"],
    edges: EdgeList,
    around: Surroundings | None = None,
) -> tuple[EdgeSums, EdgeSums | None]:
    """The sums of Φ and, if its surroundings are given, of M, for every channel and without gradients.

    Memory is that of the arguments and of the sums where Numba or Triton computes. Elsewhere Φ is built for a few
    channels at a time.
    """
    check_scan(dt, A, B, C, D)
    batch, length, channels = dt.shape
    if (batch, length) != (edges.batch, edges.length):
        raise ValueError(f"the edges are of {edges.batch} sequences of length {edges.length}, dt is {list(dt.shape)}")
    if TRITON_COMPOSED_ON_EDGES.serves(dt, state=A.shape[1]):
        return _by_triton(dt, A, B, C, D, edges, around)
    if not NUMBA.serves(dt):
        return _by_slices(dt, A, B, C, D, edges, around)
    bare, whole = EdgeSums.empty(edges, channels), EdgeSums.empty(edges, channels if around else 0)
    given = around or Surroundings(*(dt.new_zeros(shape) for shape in ((1, 1, LANES), (1, 1, LANES), (1, 1))))
    arrays = [
        pad_last(dt.float().mT),
        pad_last(A.float() * LOG2_E),
        *(pad_last(pad_last(tensor.float()).mT).mT.contiguous() for tensor in (B, C)),
        D.detach().float().contiguous(),
        *(pad_last(tensor.float()) for tensor in given[:2]),
        given.taps.detach().float().contiguous(),
    ]
    _sum_rows(*(a.numpy() for a in arrays), around is not None, _ONE, *edges[:3], *bare.arrays(), *whole.arrays())
    return bare, whole if around else None


def _by_triton(
    dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor, edges: EdgeList, around: Surroundings | None
) -> tuple[EdgeSums, EdgeSums | None]:
    scan, at = at_least_float32(dt, A, B, C, D), edges.indices(dt.device)
    entries, mass = TRITON_PHI_ON_EDGES(*scan, *at)
    bare = sums_of_entries(entries, mass, edges)
    if around is None:
        return bare, None
    given = (part.to(scan[0]) for part in around)
    entries, mass = TRITON_COMPOSED_ON_EDGES(*scan, *given, *at)
    return bare, sums_of_entries(entries, mass, edges)


def _by_slices(
    dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor, edges: EdgeList, around: Surroundings | None
) -> tuple[EdgeSums, EdgeSums | None]:
    bare, whole = [], []
    for part in slices_of_channels(dt, _ENTRIES):
        phi = selective_scan_phi(dt[..., part], A[part], B, C, D[part])
        bare.append(edge_sums_reference(phi, edges))
        if around is not None:
            here = Surroundings(around.left[:, part], around.right[:, part], around.taps[part])
            whole.append(edge_sums_reference(here(phi), edges))
    return EdgeSums.joined(bare), EdgeSums.joined(whole) if around else None


@task
def _next_rows(b, e, first, dt, A2, B, C, D, one, decay, enters, reach, weight, h, rows):  # type: ignore[no-untyped-def]
    """Rows first … first + 7 of Φ into `rows`; h[n, j] goes from the row before them to the last of them."""
    states = A2.shape[1]
    for n in range(0, states, LANES):
        product = splat(1.0)
        for r in range(_ROWS):
            factor = exp2(splat(dt[b, e, first + r]) * load(A2, (e, n)))
            product = product * factor
            store(decay, (r, n), factor)
            store(enters, (r, n), load(B, (b, first + r, n)) * dt[b, e, first + r])
            store(weight, (r, n), product * load(C, (b, first + r, n)))
        store(reach, (n,), product)
    for j in range(0, first, LANES):
        t0, t1, t2, t3 = splat(0.0), splat(0.0), splat(0.0), splat(0.0)
        t4, t5, t6, t7 = splat(0.0), splat(0.0), splat(0.0), splat(0.0)
        for n in range(states):
            state = load(h, (n, j))
            t0 = t0 + state * broadcast(weight, (0, n))
            t1 = t1 + state * broadcast(weight, (1, n))
            t2 = t2 + state * broadcast(weight, (2, n))
            t3 = t3 + state * broadcast(weight, (3, n))
            t4 = t4 + state * broadcast(weight, (4, n))
            t5 = t5 + state * broadcast(weight, (5, n))
            t6 = t6 + state * broadcast(weight, (6, n))
            t7 = t7 + state * broadcast(weight, (7, n))
            store(h, (n, j), state * broadcast(reach, (n,)))
        store(rows, (0, j), t0)
        store(rows, (1, j), t1)
        store(rows, (2, j), t2)
        store(rows, (3, j), t3)
        store(rows, (4, j), t4)
        store(rows, (5, j), t5)
        store(rows, (6, j), t6)
        store(rows, (7, j), t7)
    t0, t1, t2, t3 = splat(0.0), splat(0.0), splat(0.0), splat(0.0)
    t4, t5, t6, t7 = splat(0.0), splat(0.0), splat(0.0), splat(0.0)
    for n in range(states):  # the columns of the block itself: each enters with its own row
        state = load(one, (0, 0)) * broadcast(enters, (0, n))
        t0 = t0 + state * broadcast(C, (b, first, n))
        state = state * broadcast(decay, (1, n)) + load(one, (1, 0)) * broadcast(enters, (1, n))
        t1 = t1 + state * broadcast(C, (b, first + 1, n))
        state = state * broadcast(decay, (2, n)) + load(one, (2, 0)) * broadcast(enters, (2, n))
        t2 = t2 + state * broadcast(C, (b, first + 2, n))
        state = state * broadcast(decay, (3, n)) + load(one, (3, 0)) * broadcast(enters, (3, n))
        t3 = t3 + state * broadcast(C, (b, first + 3, n))
        state = state * broadcast(decay, (4, n)) + load(one, (4, 0)) * broadcast(enters, (4, n))
        t4 = t4 + state * broadcast(C, (b, first + 4, n))
        state = state * broadcast(decay, (5, n)) + load(one, (5, 0)) * broadcast(enters, (5, n))
        t5 = t5 + state * broadcast(C, (b, first + 5, n))
        state = state * broadcast(decay, (6, n)) + load(one, (6, 0)) * broadcast(enters, (6, n))
        t6 = t6 + state * broadcast(C, (b, first + 6, n))
        state = state * broadcast(decay, (7, n)) + load(one, (7, 0)) * broadcast(enters, (7, n))
        t7 = t7 + state * broadcast(C, (b, first + 7, n))
        store(h, (n, first), state)
    store(rows, (0, first), t0)
    store(rows, (1, first), t1)
    store(rows, (2, first), t2)
    store(rows, (3, first), t3)
    store(rows, (4, first), t4)
    store(rows, (5, first), t5)
    store(rows, (6, first), t6)
    store(rows, (7, first), t7)
    for r in range(_ROWS):
        rows[r, first + r] += D[e]


@task
def _surround(b, e, i, rows, r, left, right, taps, scaled, out):  # type: ignore[no-untyped-def]
    """Row i of M into out[0], from rows[r], which is row i of Φ; `scaled` is zero behind position i."""
    width = taps.shape[1]
    outer = left[b, e, i]
    for j in range(0, i + 1, LANES):
        store(scaled, (j,), load(rows, (r, j)) * load(right, (b, e, j)))
    for k in range(0, i + 1, LANES):
        total = splat(0.0)
        for w in range(width):
            total = total + load(scaled, (k + w,)) * broadcast(taps, (e, w))
        store(out, (0, k), total * outer)


@kernel
def _sum_rows(  # type: ignore[no-untyped-def]
    dt, A2, B, C, D, left, right, taps, surrounded, one, start, src, of,
    signed, size, entries, mass, whole_signed, whole_size, whole_entries, whole_mass,
):  # fmt: skip
    channels, padded = dt.shape[1:]
    states, length = A2.shape[1], mass.shape[1]
    for b in prange(dt.shape[0]):
        decay = np.empty((_ROWS, states), np.float32)
        enters = np.empty((_ROWS, states), np.float32)
        weight = np.empty((_ROWS, states), np.float32)
        reach = np.empty(states, np.float32)
        h = np.empty((states, padded), np.float32)
        rows = np.empty((_ROWS, padded), np.float32)
        scaled = np.zeros(padded + taps.shape[1] + LANES, np.float32)
        out = np.zeros((1, padded), np.float32)
        for e in range(channels):
            scaled[:] = 0.0
            for first in range(0, length, _ROWS):
                _next_rows(b, e, first, dt, A2, B, C, D, one, decay, enters, reach, weight, h, rows)
                for i in range(first, min(first + _ROWS, length)):
                    add_row(b, e, i, rows, i - first, i + 1, start, src, of, signed, size, entries, mass)
                    if surrounded:
                        _surround(b, e, i, rows, i - first, left, right, taps, scaled, out)
                        whole = (whole_signed, whole_size, whole_entries, whole_mass)
                        add_row(b, e, i, out, 0, i + 1, start, src, of, *whole)
