"""Sums over the matrix Φ of the selective scan, without all of Φ in memory and without gradients.

On a GPU Triton computes them; elsewhere Φ is built for a few channels at a time. The profile over lags, which has a
kernel in Numba too, is in kernels.selective_scan.
"""

from collections.abc import Iterator

import torch
from jaxtyping import Float, Int
from torch import Tensor

from circuitscope.kernels.backends import TRITON_PHI_MEAN, TRITON_PHI_ON_EDGES, at_least_float32
from circuitscope.kernels.selective_scan import SLICE, selective_scan_phi, slices_of_channels


@torch.no_grad()
def selective_scan_phi_mean(
    dt: Float[Tensor, "batch pos channel"],
    A: Float[Tensor, "channel state"],
    B: Float[Tensor, "batch pos state"],
    C: Float[Tensor, "batch pos state"],
    D: Float[Tensor, " channel"] | None = None,
    absolute: bool = True,
) -> Float[Tensor, "batch dest src"]:
    """The mean of |Φ| over channels, or of Φ with its signs."""
    if TRITON_PHI_MEAN.serves(dt, state=A.shape[1]):
        mean: Tensor = TRITON_PHI_MEAN(*at_least_float32(dt, A, B, C, D), absolute)
        return mean.to(dt.dtype)
    batch, length, channels = dt.shape
    total = dt.new_zeros(batch, length, length, dtype=torch.promote_types(dt.dtype, torch.float32))
    for _, phi in _slices(dt, A, B, C, D):
        total += (phi.abs() if absolute else phi).sum(1)
    return (total / channels).to(dt.dtype)


@torch.no_grad()
def selective_scan_phi_on_edges(
    dt: Float[Tensor, "batch pos channel"],
    A: Float[Tensor, "channel state"],
    B: Float[Tensor, "batch pos state"],
    C: Float[Tensor, "batch pos state"],
    D: Float[Tensor, " channel"] | None,
    sequence: Int[Tensor, " edge"],
    dest: Int[Tensor, " edge"],
    src: Int[Tensor, " edge"],
) -> tuple[Float[Tensor, "edge channel"], Float[Tensor, "batch channel dest"]]:
    """Φ at the edges dest ← src of each sequence, and Σ_j |Φ_ij| of every row, for every channel.

    An entry divided by the sum of its row is the share that an edge has of what the destination reads.
    """
    batch, length, channels = dt.shape
    for name, index, size in (("sequence", sequence, batch), ("dest", dest, length), ("src", src, length)):
        if len(index) and not 0 <= int(index.min()) <= int(index.max()) < size:
            raise ValueError(f"{name} must be in 0 to {size - 1}, got {int(index.min())} to {int(index.max())}")
    if TRITON_PHI_ON_EDGES.serves(dt, state=A.shape[1]):
        entries, mass = TRITON_PHI_ON_EDGES(*at_least_float32(dt, A, B, C, D), sequence, dest, src)
        return entries.to(dt.dtype), mass.to(dt.dtype)
    entries, mass = dt.new_empty(len(src), channels), dt.new_empty(batch, channels, length)
    for part, phi in _slices(dt, A, B, C, D):
        entries[:, part] = phi[sequence, :, dest, src]
        mass[:, part] = phi.abs().sum(-1)
    return entries, mass


def _slices(
    dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None
) -> Iterator[tuple[slice, Float[Tensor, "batch channel dest src"]]]:
    """Φ, a few channels at a time."""
    for part in slices_of_channels(dt, SLICE):
        yield part, selective_scan_phi(dt[..., part], A[part], B, C, None if D is None else D[part])
