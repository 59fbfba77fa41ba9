"""How far gradients reach through one layer: ‖∂ resid_post_i / ∂ resid_pre_j‖ by lag i − j.

The gradient is that of the whole layer: norm, mixer (including how Φ depends on its input), MLP and the
residual branch, which alone gives √d_model at lag 0. It works on any model with the two residual hooks. Lags are 0 and
more: of a layer that reads later positions it measures the reach back, and not the reach ahead.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from circuitscope.analysis.draws import seeded
from circuitscope.analysis.reading.gradients import with_gradients
from circuitscope.analysis.reading.opened import opened
from circuitscope.arguments import explained
from circuitscope.devices import on_cpu, widened, widest
from circuitscope.errors import UserError, shown
from circuitscope.lens import HookedModel, layer_index
from circuitscope.models.inputs import InputsLike

Stream = Float[Tensor, "batch pos d_model"]

_MOST = 10_000  # random vectors per destination


class Reach(NamedTuple):
    """Mean of ‖∂ resid_post_i / ∂ resid_pre_{i−lag}‖² (Frobenius) over i and sequences, its standard error, and
    how many sequences were used, by lag."""

    squared: Float[Tensor, " lag"]
    squared_stderr: Float[Tensor, " lag"]
    n: Int[Tensor, " lag"]

    def __repr__(self) -> str:
        return f"Reach(norm {self.norm[0]:.3g} at lag 0, {self.norm[-1]:.3g} at lag {len(self.norm) - 1})"

    @property
    def norm(self) -> Float[Tensor, " lag"]:
        """The root of the mean square."""
        return self.squared.sqrt()

    @property
    def stderr(self) -> Float[Tensor, " lag"]:
        """The standard error of `norm`, to first order."""
        return self.squared_stderr / (2 * self.norm)


@explained
def gradient_reach(
    model: HookedModel, tokens: InputsLike, layer: int, *, probes: int | None = 4, seed: int = 0
) -> Reach:
    """Gradient reach of a layer, estimated by random vector-Jacobian products, or exact.

    With random signs u, E ‖uᵀ J_ij‖² = ‖J_ij‖²_F: this is unbiased for the square, so the result is the root
    of the mean square. Each destination i gets `probes` vectors, each on a sequence drawn at random. One backward
    pass serves one destination in every sequence, so there are ⌈probes · L / batch⌉ passes, and probes · (L − δ)
    samples at lag δ. The standard error is taken over the sequences with samples; it is nan if there is only one.

    Args:
        probes: random vectors per destination; or None for the exact Jacobian of every sequence, which takes
            L · d_model passes and is meant for small sizes.
    """
    return pooled(*on_cpu(squared_by_lag(model, tokens, layer, probes, seed)))


def squared_by_lag(
    model: HookedModel, tokens: InputsLike, layer: int, probes: int | None, seed: int
) -> tuple[Float[Tensor, "batch lag"], Float[Tensor, "batch lag"]]:
    """What `gradient_reach` averages, where the model is: sums of squares by sequence and lag, and their counts."""
    if probes is not None and not 1 <= probes <= _MOST:
        raise UserError(f"probes must be from 1 to {_MOST}, or None for the exact Jacobian, got {shown(probes)}")
    layer = layer_index(model, layer)
    tokens = opened(model).inputs(tokens)
    batch, length = tokens.shape[:2]
    if not batch:
        raise UserError("tokens: expected at least one sequence, got none")
    generator = seeded(seed)
    every = torch.arange(length)[:, None].expand(-1, batch)
    dests = every if probes is None else _spread(batch, length, probes, generator)
    with with_gradients(model):
        before, after = _residuals(model, tokens.clone(), layer, dests.clone())
        total = torch.zeros(batch, length, dtype=widest(before.device), device=before.device)
        count = torch.zeros_like(total)
        for dest, out in zip(dests, after, strict=True):
            src = (dest[:, None] - torch.arange(length)).to(total.device)
            seen = (src >= 0) & (dest[:, None] >= 0).to(total.device)
            vectors = _unit_vectors(out) if probes is None else [_random_signs(out, generator)]
            for vector in vectors:
                (gradient,) = torch.autograd.grad(out, before, vector, retain_graph=True)
                total += widened(gradient).square().sum(-1).gather(1, src.clamp(min=0)) * seen
            count += seen
    return total, count


def pooled(total: Float[Tensor, "batch lag"], count: Float[Tensor, "batch lag"]) -> Reach:
    """Σ total / Σ count, with the standard error of a ratio over sequences."""
    n = (count > 0).sum(0)
    mean = total.sum(0) / count.sum(0)
    spread = (total - count * mean).square().sum(0)
    error = (spread * n / (n - 1)).sqrt() / count.sum(0)
    return Reach(mean, torch.where(n > 1, error, torch.nan), n)


def _spread(batch: int, length: int, probes: int, generator: torch.Generator) -> Int[Tensor, "passes batch"]:
    """A destination for every pass and sequence: each position occurs `probes` times, in random places; −1 is none."""
    passes = -(-probes * length // batch)
    slots = torch.randperm(passes * batch, generator=generator)[: probes * length]
    dests = torch.full((passes * batch,), -1)
    dests[slots] = torch.arange(length).repeat(int(probes))
    return dests.view(passes, batch)


def _random_signs(like: Tensor, generator: torch.Generator) -> Tensor:
    return (torch.randint(0, 2, like.shape, generator=generator) * 2 - 1).to(like)


def _unit_vectors(like: Float[Tensor, "batch d_model"]) -> Iterator[Float[Tensor, "batch d_model"]]:
    """The unit vector of each coordinate, for all sequences at once."""
    for coordinate in range(like.shape[-1]):
        vector = torch.zeros_like(like)
        vector[:, coordinate] = 1
        yield vector


def _residuals(
    model: HookedModel, tokens: Tensor, layer: int, dests: Int[Tensor, "passes batch"]
) -> tuple[Stream, list[Float[Tensor, "batch d_model"]]]:
    """The stream before a layer, detached; and the stream after it, at one destination per sequence and pass.

    The second is a function of the first. A destination of −1 is read at 0; that sequence does not count.
    """
    batch, length = tokens.shape[:2]
    at = (torch.arange(batch) * length + dests.clamp(min=0)).flatten().to(tokens.device)
    before, after = opened(model).residuals(tokens, layer, at)
    return before, list(after.view(*dests.shape, -1))
