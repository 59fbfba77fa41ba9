"""How a mixing matrix falls off with distance: its profile over lags, and numbers read from a profile.

m(δ) = mean over i − j = δ of |M_ij|, δ = 0 … L − 1. All functions work on bare tensors. Numbers are
read from a profile for any leading axes, in float64. They depend on L, so compare only profiles of one length.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from circuitscope.devices import widest
from circuitscope.errors import UserError

FEWEST_LAGS = 4  # lags that a fit needs
FIT_HOLDS = 0.8  # R² from which a fit holds; below it the profile is not of that form, and its rate describes nothing


class DecayFit(NamedTuple):
    """log m(δ) = c − κ δ and log m(δ) = c − p log δ over δ ≥ 1, least squares, each with its own R².

    Even and odd lags have a constant c each: see `fit_decay`.
    """

    kappa: Float[Tensor, "*lead"]
    kappa_r2: Float[Tensor, "*lead"]
    power: Float[Tensor, "*lead"]
    power_r2: Float[Tensor, "*lead"]


def profile(matrix: Float[Tensor, "batch head dest src"]) -> Float[Tensor, "head lag"]:
    """m(δ) of each head of a causal matrix, signed or not: the mean of |M_{i,i−δ}| over i and sequences."""
    if matrix.ndim != 4 or matrix.shape[2] != matrix.shape[3] or 0 in matrix.shape:
        raise UserError(f"a mixing matrix is [batch, head, dest, src] and not empty, got {tuple(matrix.shape)}")
    if matrix.triu(1).any():
        raise UserError("a profile needs a causal matrix: zeros where src > dest; this one has nonzero entries there")
    return profile_by_sequence(matrix).mean(dim=0)


def profile_by_sequence(matrix: Float[Tensor, "batch head dest src"]) -> Float[Tensor, "batch head lag"]:
    """m(δ) of each sequence and head; entries above the diagonal are ignored.

    Sequences that share one matrix in memory (an expanded batch axis) share the work.
    """
    if len(matrix) > 1 and matrix.stride(0) == 0:
        return profile_by_sequence(matrix[:1]).expand(len(matrix), -1, -1)
    size = matrix.abs()
    wide = widest(matrix.device)
    lags = [size.diagonal(-lag, -2, -1).mean(dim=-1, dtype=wide) for lag in range(matrix.shape[-1])]
    return torch.stack(lags, dim=-1)


def fit_decay(profile: Float[Tensor, "*lead lag"]) -> DecayFit:
    """Rate κ of an exponential and exponent p of a power law, fitted to the logarithm of a profile.

    Ordinary least squares with one slope, every lag δ ≥ 1 with the same weight. Even and odd lags have an intercept
    each, because a task may alternate keys and values: then every second lag reads from tokens of another kind, and
    m(δ) jumps up and down as it falls. R² is the share of the variance within the even and within the odd lags that
    the slope explains.

    Lags where m(δ) is zero, not finite, or below the smallest normal number of float32 (1.2e-38, where digits are lost)
    are left out; with fewer than 4 lags left all four numbers are nan. R² of a constant profile is nan.
    """
    m = profile.double()[..., 1:]
    kept = (m >= torch.finfo(torch.float32).tiny) & (m < torch.inf)
    log_m = torch.where(kept, m, 1.0).log()
    lag = torch.arange(1, profile.shape[-1], dtype=torch.float64, device=m.device)
    weights = [(kept & (lag % 2 == parity)).double() for parity in (0, 1)]
    count = kept.sum(-1)
    centred = _centred(log_m, weights)
    total = torch.linalg.vecdot(centred, centred)
    size = torch.where(kept, log_m, 0.0).abs().sum(-1) / count
    varies = total > count * (1e-14 * (1 + size)).square()  # beyond rounding
    found: list[Tensor] = []
    for x in (lag, lag.log()):
        place = _centred(x.expand_as(m), weights)
        spread = torch.linalg.vecdot(place, place)
        slope = torch.linalg.vecdot(centred, place) / spread
        r2 = torch.where(varies, slope.square() * spread / total, torch.nan)
        found += [torch.where(count >= FEWEST_LAGS, part, torch.nan) for part in (-slope, r2)]
    return DecayFit(*found)


def holds(r2: Float[Tensor, "*lead"]) -> Bool[Tensor, "*lead"]:
    """Whether a fit with this R² holds; that of a constant profile, whose R² is nan, does."""
    return ~(r2 < FIT_HOLDS)


def _centred(
    values: Float[Tensor, "*lead lag"], weights: Sequence[Float[Tensor, "*lead lag"]]
) -> Float[Tensor, "*lead lag"]:
    """Values minus their mean within each group; zero outside of all groups."""
    out = torch.zeros_like(weights[0])
    for weight in weights:
        mean = torch.linalg.vecdot(weight, values) / weight.sum(-1).clamp(min=1)
        out += weight * (values - mean[..., None])
    return out


def half_mass(profile: Float[Tensor, "*lead lag"]) -> Float[Tensor, "*lead"]:
    """The smallest δ with Σ_{δ' ≤ δ} m(δ') at least half of Σ m; nan for a profile of zeros."""
    cumulated = profile.double().cumsum(-1)
    total = cumulated[..., -1:]
    reached = (cumulated >= total / 2).double().argmax(-1).double()
    return torch.where(total[..., 0] > 0, reached, torch.nan)


def mean_distance(profile: Float[Tensor, "*lead lag"]) -> Float[Tensor, "*lead"]:
    """Σ δ m(δ) / Σ m(δ); nan for a profile of zeros."""
    m = profile.double()
    return m @ torch.arange(m.shape[-1], dtype=m.dtype, device=m.device) / m.sum(-1)


def off_diagonal_ratio(profile: Float[Tensor, "*lead lag"]) -> Float[Tensor, "*lead"]:
    """Σ_{i≠j} |M_ij| / Σ |M_ij|, from the profile over all L lags: L − δ entries lie at lag δ."""
    m = profile.double()
    mass = m * torch.arange(m.shape[-1], 0, -1, dtype=m.dtype, device=m.device)
    return mass[..., 1:].sum(-1) / mass.sum(-1)


def jackknife_stderr(left_out: Float[Tensor, "batch *rest"]) -> Float[Tensor, "*rest"]:
    """Standard error over sequences of a number, from its values with one sequence left out at a time.

    √((n − 1)/n Σ_b (θ_b − mean θ)²); nan for one sequence. For a mean it is the usual standard error.
    """
    n = len(left_out)
    if n < 2:
        return torch.full(left_out.shape[1:], torch.nan, dtype=left_out.dtype, device=left_out.device)
    return (left_out - left_out.mean(0)).square().sum(0).mul((n - 1) / n).sqrt()
