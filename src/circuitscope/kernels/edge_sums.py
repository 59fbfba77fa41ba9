"""Sums over chosen entries of mixing matrices, each weighed by its row: what a circuit score needs of a matrix.

For a set of edges dest ← src, a matrix M of one sequence and unit gives

    signed = Σ_edges M_ij / Σ_k |M_ik|        size = Σ_edges |M_ij| / Σ_k |M_ik|

and all units of a sequence together give Σ_unit |M_ij| at each edge and Σ_unit Σ_k |M_ik| for each row. A row that is
all zeros counts as having the sum 1. `edge_sums` reads a matrix that exists; kernels that make the rows of a matrix
one by one hand them to `add_row` and never hold the matrix.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int
from numba import prange
from torch import Tensor

from circuitscope.devices import widened
from circuitscope.kernels.backends import NUMBA
from circuitscope.kernels.long_conv import toeplitz
from circuitscope.kernels.numba_simd import LANES, kernel, lane_sum, load, magnitude, splat, task


class EdgeList(NamedTuple):
    """Edges of several sets in order of sequence and destination.

    The edges of row i of sequence b are those from `start[b · length + i]` to `start[b · length + i + 1]`: the entry
    `src` of that row, for the set with the number `of`.
    """

    start: Int[np.ndarray, " row_and_end"]
    src: Int[np.ndarray, " edge"]
    of: Int[np.ndarray, " edge"]
    sets: int
    length: int

    @property
    def batch(self) -> int:
        """The number of sequences."""
        return (len(self.start) - 1) // max(1, self.length)

    def indices(self, device: torch.device) -> tuple[Int[Tensor, " edge"], Int[Tensor, " edge"], Int[Tensor, " edge"]]:
        """Sequence, destination and source of every edge."""
        row = torch.from_numpy(np.repeat(np.arange(len(self.start) - 1), np.diff(self.start))).to(device)
        return row // self.length, row % self.length, torch.from_numpy(self.src).long().to(device)


class EdgeSums(NamedTuple):
    """The sums of one matrix per unit: of each set, and of all units together."""

    signed: Float[Tensor, "set batch unit"]
    size: Float[Tensor, "set batch unit"]
    entries: Float[Tensor, " edge"]  # Σ_unit |M_ij|
    mass: Float[Tensor, "batch dest"]  # Σ_unit Σ_k |M_ik|

    @staticmethod
    def empty(edges: EdgeList, units: int) -> "EdgeSums":
        """Sums to which nothing was added yet."""
        of_sets = (edges.sets, edges.batch, units)
        return EdgeSums(
            torch.zeros(of_sets),
            torch.zeros(of_sets),
            torch.zeros(len(edges.src), dtype=torch.float64),
            torch.zeros(edges.batch, edges.length, dtype=torch.float64),
        )

    @staticmethod
    def joined(parts: Sequence["EdgeSums"]) -> "EdgeSums":
        """The sums of all units from those of slices of them."""
        signed, size, entries, mass = zip(*parts, strict=True)
        return EdgeSums(
            torch.cat(signed, dim=2), torch.cat(size, dim=2), sum(entries[1:], entries[0]), sum(mass[1:], mass[0])
        )

    def arrays(self) -> tuple[Any, ...]:
        """The same memory as NumPy arrays."""
        return tuple(tensor.numpy() for tensor in self)


class Surroundings(NamedTuple):
    """What multiplies a matrix Φ from both sides: diag(left) · Φ · diag(right) · T, with T_jk = taps_{j−k}."""

    left: Float[Tensor, "batch unit pos"]
    right: Float[Tensor, "batch unit pos"]
    taps: Float[Tensor, "unit lag"]

    def __call__(self, phi: Float[Tensor, "batch unit dest src"]) -> Float[Tensor, "batch unit dest src"]:
        """The product, as a matrix."""
        conv = toeplitz(self.taps, phi.shape[-1])
        return self.left[..., None] * torch.einsum("buij,ujk->buik", phi * self.right[..., None, :], conv)


def edge_sums_reference(matrix: Float[Tensor, "batch unit dest src"], edges: EdgeList) -> EdgeSums:
    """The equations above."""
    sequence, dest, src = edges.indices(matrix.device)
    return sums_of_entries(matrix[sequence, :, dest, src], matrix.abs().sum(-1), edges)


def sums_of_entries(
    entries: Float[Tensor, "edge unit"], mass: Float[Tensor, "batch unit dest"], edges: EdgeList
) -> EdgeSums:
    """The sums, from the entries at the edges and the sum of sizes of every row."""
    sequence, dest, _ = edges.indices(mass.device)
    units = entries.shape[1]
    share = entries / torch.where(mass > 0, mass, 1)[sequence, :, dest]
    zeros = share.new_zeros(edges.sets * edges.batch, units)
    of = torch.from_numpy(edges.of).long().to(mass.device)
    at, shape = of * edges.batch + sequence, (edges.sets, edges.batch, units)
    return EdgeSums(
        zeros.index_add(0, at, share).view(shape),
        zeros.index_add(0, at, share.abs()).view(shape),
        widened(entries.abs().sum(1)),
        widened(mass.sum(1)),
    )


@torch.no_grad()
def edge_sums(matrix: Float[Tensor, "batch unit dest src"], edges: EdgeList) -> EdgeSums:
    """The sums of a matrix, without gradients. Sequences may share the memory of one matrix (a stride of 0)."""
    batch, units, length, _ = matrix.shape
    if (batch, length) != (edges.batch, edges.length) or matrix.shape[3] != length:
        raise ValueError(f"the edges are of {edges.batch} sequences of length {edges.length}, not {list(matrix.shape)}")
    if not NUMBA.serves(matrix):
        return edge_sums_reference(matrix, edges)
    shared = batch > 1 and matrix.stride(0) == 0
    found = EdgeSums.empty(edges, units)
    _of_matrix((matrix[:1] if shared else matrix).float().contiguous().numpy(), *edges[:3], *found.arrays())
    return found


@task
def add_row(b, u, i, rows, r, end, start, src, of, signed, size, entries, mass):  # type: ignore[no-untyped-def]
    """Adds rows[r], which is row i of sequence b and unit u; from `end` to the next multiple of LANES it is zero."""
    total = splat(0.0)
    for j in range(0, end, LANES):
        total = total + magnitude(load(rows, (r, j)))
    of_row = lane_sum(total)
    mass[b, i] += of_row
    scale = np.float32(1.0) / of_row if of_row > 0 else np.float32(1.0)
    at = b * mass.shape[1] + i
    for k in range(start[at], start[at + 1]):
        if src[k] >= end:
            continue
        entry = rows[r, src[k]]
        signed[of[k], b, u] += entry * scale
        size[of[k], b, u] += abs(entry) * scale
        entries[k] += abs(entry)


@kernel
def _of_matrix(matrix, start, src, of, signed, size, entries, mass):  # type: ignore[no-untyped-def]
    units, length = matrix.shape[1:3]
    padded = (length + LANES - 1) // LANES * LANES
    for b in prange(mass.shape[0]):
        row = np.zeros((1, padded), np.float32)
        at = np.int64(b) if matrix.shape[0] > 1 else 0
        for u in range(units):
            for i in range(length):
                given = matrix[at, u, i]
                for j in range(length):
                    row[0, j] = given[j]
                add_row(b, u, i, row, 0, length, start, src, of, signed, size, entries, mass)
