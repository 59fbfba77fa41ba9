"""What a recurrent mixer keeps of its state over a lag: the product of its transition matrices.

A state S_t = A_t S_{t−1} + write_t carries what was written at j to i through A_i ⋯ A_{j+1}. Φ also holds
what is written and what is read, so Φ may fall with the lag where the transition does not.

Two norms of the product, each a mean over start positions j at lag i − j, by head (or channel):

  norm  the operator norm: what is kept in the direction that is kept best. For a diagonal A it is the
        slowest state's decay exp(Σ log decay). For the delta rule's I − β k kᵀ with β ‖k‖² ≤ 2 it is exactly
        1 at lags below d_key, because some direction is orthogonal to every key written since.
  rms   the Frobenius norm over √(number of states): what is kept on average over directions.

Mixers:
  mamba, s6         A_t = exp(Δ_t A_en), diagonal over the N states of a channel
  mamba2            A_t = exp(Δ_t A_h), one number a head
  s4, s4_mamba, h3  Ā diagonal and complex, the same at every position: |Ā_n|; h3's is that of its S4D, not of
                    the shift register on its keys
  rwkv              e^{−w} a channel, of numerator and denominator alike; the ratio of the two is what is read
  deltanet          A_t = I − β_t k_t k_tᵀ;  gated_deltanet: e^{g_t} times that
All others have none (`no_transition` says why).
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from circuitscope.analysis.gradient_reach import layer_index
from circuitscope.errors import UserError
from circuitscope.models import HookedLM

PerHead = Float[Tensor, "batch pos head"]
_CHUNK_BYTES = 4e6
_FAR_LAGS = 16  # beyond d_key, where each norm of a delta rule costs an SVD

_WITHOUT = {
    "attention": "attention has no recurrent state: it reads every earlier position anew",
    "based": "Based only adds to its state, so its transition is the identity at every lag",
    "gated_conv": "a short conv has no recurrent state: it reads its taps and nothing before them",
    "hyena": "an implicit filter has no recurrence, so Hyena has no state to carry",
    "lstm": "an LSTM is nonlinear in its state, so its transition is not a matrix",
}


class Gate(NamedTuple):
    """Decays of a diagonal transition: log A_t of state n of a head is time_t · rate_n, rate ≤ 0."""

    time: PerHead
    rate: Float[Tensor, "head state"]


class ByLag(NamedTuple):
    """A quantity at some lags: its mean over sequences by head, and the mean over heads, with standard errors."""

    lags: list[int]
    value: Float[Tensor, "head lag"]
    stderr: Float[Tensor, "head lag"]
    layer: Float[Tensor, " lag"]
    layer_stderr: Float[Tensor, " lag"]
    n: int


@dataclass(frozen=True)
class Transition:
    """Norms of a layer's transition product by lag; `log_decay`, where it is gated, of its slowest state.

    `log_decay` is the mean over positions.
    """

    norm: ByLag
    rms: ByLag
    log_decay: Float[Tensor, "batch head"] | None

    @property
    def time_constant(self) -> Float[Tensor, " head"] | None:
        """τ = −1 / mean log decay, in positions."""
        return None if self.log_decay is None else -1 / self.log_decay.mean(0)


def no_transition(model: HookedLM, layer: int) -> str:
    """Why a layer has no transition product, or ""."""
    return _WITHOUT.get(_name(model, layer), "")


@torch.no_grad()
def transition_product(
    model: HookedLM, tokens: Int[Tensor, "batch pos"], layer: int, *, sequences: int = 8, starts: int = 8
) -> Transition:
    """Norms of A_i ⋯ A_{j+1} by lag i − j on these tokens.

    The operator norm of diagonal transitions is over all sequences and start positions. All else costs a
    matrix a start and lag and is over the first `sequences` sequences and at most `starts` evenly spaced start
    positions j; the operator norm of a delta rule beyond lag d_key moreover at 16 lags, evenly spaced in
    log δ, with L − 1 the last.
    """
    layer = layer_index(model, layer)
    if reason := no_transition(model, layer):
        raise UserError(f"layer {layer} has no transition product: {reason}")
    if sequences < 1 or starts < 1:
        raise UserError(f"sequences and starts must be at least 1, got {sequences} and {starts}")
    batch, length = tokens.shape
    mixer = model.layers[layer].mixer
    some, at = min(sequences, batch), spaced(length, starts)
    if _name(model, layer) in ("deltanet", "gated_deltanet"):
        names = ["hook_k", "hook_beta", *(["hook_decay"] if mixer.config.gated else [])]
        seen = mixer_activations(model, tokens, layer, names)
        g = seen.get("hook_decay")
        norm, rms = delta_products(seen["hook_k"][:some], seen["hook_beta"][:some], None if g is None else g[:some], at)
        return Transition(norm, rms, None if g is None else g.double().mean(1))
    gate = read_gate(model, tokens, layer)
    norm = gated_norm(gate, batch)
    rms = norm if gate.rate.shape[1] == 1 else gated_rms(Gate(gate.time[:some], gate.rate), some, at)
    log_decay = gate.time.double().mean(1) * gate.rate.double().amax(-1)
    return Transition(norm, rms, log_decay.expand(batch, -1))


def gated_norm(gate: Gate, batch: int) -> ByLag:
    """max_n exp(rate_n Σ_{k=j+1..i} time_k), a mean over all j; `batch` is how many sequences share a gate of one."""
    return _by_lag(list(range(gate.time.shape[1])), _running_products(gate), batch)


def _running_products(gate: Gate) -> Iterator[Float[Tensor, "one_or_batch head lag"]]:
    """In slices of heads and in float64; products, not differences of sums, so that nothing cancels."""
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


def gated_rms(gate: Gate, batch: int, starts: Int[Tensor, " start"]) -> ByLag:
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


def read_gate(model: HookedLM, tokens: Int[Tensor, "batch pos"], layer: int) -> Gate:
    """The decays of a layer with a diagonal transition; a batch axis of 1 where they do not depend on the input."""
    mixer, name = model.layers[layer].mixer, _name(model, layer)
    if name in ("mamba", "s6"):
        return Gate(mixer_activations(model, tokens, layer, ["hook_dt"])["hook_dt"], mixer.ssm.A)
    if name == "mamba2":
        return Gate(mixer_activations(model, tokens, layer, ["hook_dt"])["hook_dt"], mixer.A[:, None])
    if name == "rwkv":
        rate = -mixer.time_decay.double().exp()[:, None]
    elif name in ("s4", "s4_mamba", "h3"):
        rate = _log_modulus(mixer if name == "h3" else mixer.ssm, bilinear=name == "h3")
    else:
        raise UserError(f"layer {layer} is {name}, and its transition is not diagonal")
    return Gate(torch.ones(1, tokens.shape[1], len(rate), device=rate.device), rate)


def mixer_activations(
    model: HookedLM, tokens: Int[Tensor, "batch pos"], layer: int, names: Iterable[str]
) -> dict[str, Tensor]:
    """What passes the named hooks of a layer's mixer before it mixes; nothing after that is computed."""
    x, seen = model.mixer_input(tokens, layer), {}

    def keep(name: str) -> Any:
        def hook(value: Tensor, hook: Any) -> None:
            seen[name] = value

        return hook

    with model.hooks(fwd_hooks=[(f"blocks.{layer}.mixer.{name}", keep(name)) for name in names]):
        model.layers[layer].mixer.factors(x)
    return seen


def spaced(length: int, most: int) -> Int[Tensor, " start"]:
    """At most `most` evenly spaced positions from 0 on."""
    return torch.arange(0, length, math.ceil(length / most))


def _far_lags(first: int, last: int) -> Sequence[int]:
    if last - first < _FAR_LAGS:
        return range(first, last + 1)
    return [int(lag) for lag in np.unique(np.geomspace(first, last, _FAR_LAGS).round())]


def _log_modulus(ssm: Any, *, bilinear: bool) -> Float[Tensor, "channel state"]:
    """log |Ā_n| of an S4D: Δ Re A by zero-order hold, log |(1 + ΔA/2)/(1 − ΔA/2)| by the bilinear rule."""
    dt = ssm.log_dt.double().exp()[:, None]
    real: Tensor = -dt * ssm.log_A_real.double().exp()
    if not bilinear:
        return real
    half = torch.complex(real, dt * ssm.A_imag.double()) / 2
    log_modulus: Tensor = ((1 + half) / (1 - half)).abs().log()
    return log_modulus


def _by_lag(lags: list[int], parts: Iterable[Float[Tensor, "one_or_batch head lag"]], batch: int) -> ByLag:
    """From values by sequence, in slices of heads; a batch axis of 1 stands for `batch` equal sequences."""
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
    return per_sequence.std(0) / n**0.5 if n > 1 else torch.full_like(per_sequence[0], torch.nan)


def _name(model: HookedLM, layer: int) -> str:
    return model.config.mixers[layer_index(model, layer)].name
