"""What a recurrent mixer keeps of its state over a lag: the product of its transition matrices.

A state S_t = A_t S_{t−1} + write_t carries what was written at j to i through A_i ⋯ A_{j+1}. Φ also holds
what is written and what is read, so Φ may fall with the lag where the transition does not.

Two norms of the product, each a mean over start positions j at lag i − j, for each head (or channel):

  norm  the operator norm: what is kept in the direction that is kept best. For a diagonal A it is the
        slowest state's decay exp(Σ log decay). For the delta rule's I − β k kᵀ with β ‖k‖² ≤ 2 it is exactly
        1 at lags below d_key, because some direction is orthogonal to every key written since.
  rms   the Frobenius norm over √(number of states): what is kept on average over directions.

A mixer's reading says what its transition is: gated (diagonal over the states of a unit), that of a delta rule, or
why there is none. RWKV has the same one for numerator and denominator. H3 has that of its S4D, not that of the shift
register on its keys.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from circuitscope.analysis.reading.opened import Inputs, opened
from circuitscope.arguments import explained
from circuitscope.devices import on_cpu
from circuitscope.errors import UserError
from circuitscope.lens import HookedModel, layer_index
from circuitscope.mixers.reading import DeltaTransition, GatedTransition, Reading

PerHead = Float[Tensor, "batch pos head"]
_CHUNK_BYTES = 4e6
_FAR_LAGS = 16  # how many lags to take beyond d_key, where each norm of a delta rule costs an SVD


class ByLag(NamedTuple):
    """A quantity at some lags: its mean over sequences for each head, and the mean over heads, with standard errors."""

    lags: list[int]
    value: Float[Tensor, "head lag"]
    stderr: Float[Tensor, "head lag"]
    layer: Float[Tensor, " lag"]
    layer_stderr: Float[Tensor, " lag"]
    n: int

    def __repr__(self) -> str:
        ends = ", ".join(f"{self.layer[i]:.3g} at lag {self.lags[i]}" for i in sorted({0, len(self.lags) - 1}))
        return f"ByLag({self.value.shape[0]} heads or channels, {len(self.lags)} lags; {ends})"


@dataclass(frozen=True)
class TransitionNorms:
    """Norms of a layer's transition product by lag.

    `log_decay` is that of the slowest state, averaged over positions; None where the transition has no gate.
    """

    norm: ByLag
    rms: ByLag
    log_decay: Float[Tensor, "batch head"] | None

    def __repr__(self) -> str:
        return f"TransitionNorms(norm: {self.norm!r}, rms: {self.rms!r})"

    @property
    def time_constant(self) -> Float[Tensor, " head"] | None:
        """τ = −1 / mean log decay, in positions."""
        return None if self.log_decay is None else -1 / self.log_decay.mean(0)


def no_transition(model: HookedModel, layer: int, tokens: Inputs) -> str:
    """Why a layer has no transition product, or ""."""
    found = opened(model).reading(tokens, layer).transition
    return found if isinstance(found, str) else ""


@torch.no_grad()
@explained
def transition_product(
    model: HookedModel, tokens: Inputs, layer: int, *, sequences: int = 8, starts: int = 8
) -> TransitionNorms:
    """Norms of A_i ⋯ A_{j+1} by lag i − j on these tokens, as `transition_norms` computes them."""
    layer = layer_index(model, layer)
    reading = opened(model).reading(tokens, layer)
    if not reading.batch:
        raise UserError("tokens: expected at least one sequence, got none")
    if isinstance(reading.transition, str):
        raise UserError(f"layer {layer} has no transition product: {reading.transition}")
    return transition_norms(reading, sequences=sequences, starts=starts)


def transition_norms(reading: Reading, *, sequences: int = 8, starts: int = 8) -> TransitionNorms:
    """Norms of A_i ⋯ A_{j+1} by lag i − j of a layer that has been read and has a transition.

    The operator norm of gated transitions is a mean over all sequences and start positions. Everything else costs one
    matrix for each start and lag, so it is a mean over the first `sequences` sequences and at most `starts` evenly
    spaced start positions j. Beyond lag d_key, the operator norm of a delta rule is computed only at 16 lags, evenly
    spaced in log δ; the last is L − 1.
    """
    if sequences < 1 or starts < 1:
        raise UserError(f"sequences and starts must be at least 1, got {sequences} and {starts}")
    assert not isinstance(reading.transition, str)
    kind = type(reading.transition)
    found = kind(*on_cpu([part for part in reading.transition if part is not None]))
    return norms_of(found, reading.batch, sequences=sequences, starts=starts)


def norms_of(
    found: GatedTransition | DeltaTransition, batch: int, *, sequences: int = 8, starts: int = 8
) -> TransitionNorms:
    """`transition_norms` of a transition on the CPU: its products are many small steps, one after the other."""
    some, at = min(sequences, batch), spaced(found[0].shape[1], starts)
    if isinstance(found, DeltaTransition):
        g = found.log_decay
        norm, rms = delta_products(found.k[:some], found.beta[:some], None if g is None else g[:some], at)
        return TransitionNorms(norm, rms, None if g is None else g.double().mean(1))
    norm = gated_norm(found, batch)
    rms = norm if found.rate.shape[1] == 1 else gated_rms(GatedTransition(found.time[:some], found.rate), some, at)
    log_decay = found.time.double().mean(1) * found.rate.double().amax(-1)
    return TransitionNorms(norm, rms, log_decay.expand(batch, -1))


def gated_norm(gate: GatedTransition, batch: int) -> ByLag:
    """max_n exp(rate_n Σ_{k=j+1..i} time_k), a mean over all j; `batch` sequences share a gate of batch size 1."""
    return _by_lag(list(range(gate.time.shape[1])), _running_products(gate), batch)


def _running_products(gate: GatedTransition) -> Iterator[Float[Tensor, "one_or_batch head lag"]]:
    """Mean products by lag, in slices of heads and in float64; they are not differences of sums, so nothing cancels."""
    length, heads = gate.time.shape[1:]
    slowest = gate.rate.double().amax(-1)
    chunk = max(1, int(_CHUNK_BYTES // (8 * len(gate.time) * length)))
    for first in range(0, heads, chunk):
        part = slice(first, first + chunk)
        decay = (gate.time[..., part].double() * slowest[part]).exp()
        kept = decay
        by_lag = [torch.ones_like(decay[:, 0])]
        for lag in range(1, length):
            kept = decay[:, 1:] if lag == 1 else kept[:, 1:] * decay[:, 1 : length - lag + 1]
            by_lag.append(kept.mean(1))
        yield torch.stack(by_lag, -1)


def gated_rms(gate: GatedTransition, batch: int, starts: Int[Tensor, " start"]) -> ByLag:
    """√(mean over n of exp(2 rate_n Σ time_k)), a mean over the given start positions.

    The slowest state is taken out in float64; what is left lies between 1/√N and 1 and is safe in float32.
    """
    length, rate = gate.time.shape[1], gate.rate.double()
    slowest = rate.amax(-1)
    total, others = gate.time.double().cumsum(1), (2 * (rate - slowest[:, None])).float()
    by_lag = []
    for lag in range(length):
        j = starts[starts + lag < length]
        between = total[:, j + lag] - total[:, j]
        share = (between.float()[..., None] * others).exp_().mean(-1).sqrt_()
        by_lag.append(((slowest * between).exp_() * share).mean(1))
    return _by_lag(list(range(length)), [torch.stack(by_lag, -1)], batch)


def delta_products(
    k: Float[Tensor, "batch pos head d_key"], beta: PerHead, g: PerHead | None, starts: Int[Tensor, " start"]
) -> tuple[ByLag, ByLag]:
    """Operator norm and rms of Π e^{g_t} (I − β_t k_t k_tᵀ), a mean over the given start positions.

    Where every β ‖k‖² is in [0, 2], no step stretches anything, and the norm below lag d_key is Π e^{g_t}
    without an SVD.
    """
    batch, length, heads, size = k.shape
    k, beta = k.double(), beta.double()
    written = beta * k.square().sum(-1)
    shrinks = bool((written >= 0).all() and (written <= 2 + 1e-5).all())
    near = min(size if shrinks else 1, length)
    far = set(_far_lags(near, length - 1))
    total = torch.zeros_like(beta) if g is None else g.double().cumsum(1)
    P = torch.eye(size, dtype=k.dtype, device=k.device).repeat(batch, len(starts), heads, 1, 1)
    norm = {0: torch.ones(batch, heads, dtype=k.dtype, device=k.device)}
    rms = dict(norm)
    for lag in range(1, length):
        j = starts[starts + lag < length]
        k_i, beta_i = k[:, j + lag], beta[:, j + lag]
        P = P[:, : len(j)]
        P = P - (beta_i[..., None] * k_i)[..., None] * (k_i[..., None, :] @ P)
        gate = (total[:, j + lag] - total[:, j]).exp()
        rms[lag] = (gate * P.square().sum((-1, -2)).div(size).sqrt()).mean(1)
        if lag < near:
            norm[lag] = gate.mean(1)
        elif lag in far:
            norm[lag] = (gate * torch.linalg.matrix_norm(P, 2)).mean(1)
    found = [_by_lag(list(part), [torch.stack(list(part.values()), -1)], batch) for part in (norm, rms)]
    return found[0], found[1]


def spaced(length: int, most: int) -> Int[Tensor, " start"]:
    """At most `most` evenly spaced positions from 0 on."""
    return torch.arange(0, length, math.ceil(length / most))


def _far_lags(first: int, last: int) -> Sequence[int]:
    if last - first < _FAR_LAGS:
        return range(first, last + 1)
    return [int(lag) for lag in np.unique(np.geomspace(first, last, _FAR_LAGS).round())]


def _by_lag(lags: list[int], parts: Iterable[Float[Tensor, "one_or_batch head lag"]], batch: int) -> ByLag:
    """Combines values per sequence, in slices of heads; a batch axis of 1 stands for `batch` equal sequences."""
    values, errors, whole = [], [], torch.zeros(())
    for part in parts:
        per_sequence = part.expand(batch, -1, -1)
        values.append(per_sequence.mean(0))
        errors.append(_stderr(per_sequence))
        whole = whole.to(part) + per_sequence.sum(1)
    value = torch.cat(values)
    layer = whole / len(value)
    return ByLag(lags, value, torch.cat(errors), layer.mean(0), _stderr(layer), batch)


def _stderr(per_sequence: Float[Tensor, "batch *rest"]) -> Float[Tensor, "*rest"]:
    n = len(per_sequence)
    return per_sequence.std(0) / n**0.5 if n > 1 else per_sequence.new_full(per_sequence.shape[1:], torch.nan)
