"""Decay of the off-diagonal terms of a layer: profiles of its mixing matrix with and without D, and their rates.

Folds over slices of channels; a Φ of all channels is never built. What is read from a profile is in
`lag_profile`; the table of everything, transition products and gradients too, in `decay_rows`.
"""

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from circuitscope.analysis.gradient_reach import layer_index
from circuitscope.analysis.lag_profile import (
    DecayFit,
    fit_decay,
    half_mass,
    jackknife_stderr,
    mean_distance,
    off_diagonal_ratio,
    profile_by_sequence,
)
from circuitscope.analysis.matrices import matrices
from circuitscope.analysis.transition import mixer_activations
from circuitscope.errors import UserError, unknown
from circuitscope.hooks import HookedRootModule
from circuitscope.kernels.selective_scan import selective_scan_phi_profile
from circuitscope.models import HookedLM
from circuitscope.models.phi import phi_chunks

Module = TypeVar("Module", bound=nn.Module)
Factors = str | Sequence[str]
Profiles = Float[Tensor, "batch head lag"]

_CHUNK_BYTES = 16e6
QUARTILES = {"q25": 0.25, "median": 0.5, "q75": 0.75}


class _Skip(NamedTuple):
    """The parameter that holds D, and the factor (of either name) that adds it."""

    parameter: str
    factors: tuple[str, ...]


_SKIPS = {
    **dict.fromkeys(("mamba", "s6", "s4", "s4_mamba"), _Skip("ssm.D", ("ssm",))),
    "mamba2": _Skip("D", ("ssd",)),
    "h3": _Skip("D", ("ssm", "qk_ssm")),
    "hyena": _Skip("skip", ("filter",)),
}


@dataclass(frozen=True)
class Decay:
    """Profiles m(δ) of a layer's heads (or channels), and what is read from each.

    `numbers` holds, by head, kappa, kappa_r2, power, power_r2 (`fit_decay`), half_mass, mean_distance and
    off_diagonal; `summary` their quartiles over the heads for which they exist ("kappa_median", "kappa_q25" …).
    Both with standard errors over sequences by the jackknife (nan for half_mass, a step function of the
    profile, which the jackknife does not serve).
    """

    profile: Float[Tensor, "head lag"]
    mean_profile: tuple[Float[Tensor, " lag"], Float[Tensor, " lag"]]
    numbers: dict[str, tuple[Float[Tensor, " head"], Float[Tensor, " head"]]]
    summary: dict[str, tuple[float, float]]


@dataclass(frozen=True)
class LayerDecay:
    """Decay of a layer's matrix at length `length` over `n` sequences; `without_D` where it has that term."""

    layer: int
    factor: str
    length: int
    n: int
    whole: Decay
    without_D: Decay | None


@torch.no_grad()
def layer_decay(
    model: HookedRootModule,
    tokens: Int[Tensor, "batch pos"],
    layer: int,
    factors: Factors = "phi",
    chunk: int | None = None,
) -> LayerDecay:
    """Profiles of a layer's mixing matrix, and what is read from them.

    The D term is the direct skip D δ_ij of mamba, s6, s4, s4_mamba, mamba2 and h3 and the skip bias of hyena;
    without it means the same weights with D = 0, in composed factors too. Attention, based, gated_conv,
    rwkv (whose bonus for the own token is normalized with the rest) and the delta rules have none.

    Args:
        factors: as `circuitscope.phi` takes them; another's model has "phi" alone, its hook_pattern.
        chunk: heads (channels) at a time; about 16 MB if left out.
    """
    layer = layer_index(model, layer)
    folds: list[_Fold] = []
    for parts in _profiles(model, tokens, layer, factors, chunk):
        folds = folds or [_Fold() for _ in parts]
        folds[0].add(parts[0])
        for fold, part in zip(folds[1:], parts[1:], strict=True):
            fold.add(part, folds[0] if torch.equal(part[..., 1:], parts[0][..., 1:]) else None)
    whole, *rest = [fold.result() for fold in folds]
    name = factors if isinstance(factors, str) else "·".join(factors)
    return LayerDecay(layer, name, tokens.shape[1], len(tokens), whole, rest[0] if rest else None)


def without_D(model: HookedLM, layer: int) -> HookedLM | None:
    """The model with D = 0 in a layer and all other weights shared; None where the layer has no such term."""
    layer = layer_index(model, layer)
    skip = _SKIPS.get(model.config.mixers[layer].name)
    return None if skip is None else _zeroed(model, f"blocks.{layer}.mixer.{skip.parameter}")


def _zeroed(module: Module, path: str) -> Module:
    """The module with one parameter zero and everything else shared with the original."""
    twin, (name, _, rest) = copy.copy(module), path.partition(".")
    if rest:
        child = module._modules[name]
        assert child is not None
        twin._modules = {**module._modules, name: _zeroed(child, rest)}
    else:
        zeros = nn.Parameter(torch.zeros_like(getattr(module, name)), requires_grad=False)
        twin._parameters = {**module._parameters, name: zeros}
    return twin


def _profiles(
    model: HookedRootModule, tokens: Tensor, layer: int, factors: Factors, chunk: int | None
) -> Iterator[tuple[Profiles, ...]]:
    """Profiles by sequence in slices of heads; a second one without D where the factors hold it."""
    if not isinstance(model, HookedLM):
        if factors not in ("phi", "pattern"):
            raise unknown("factor", factors, ["phi", "pattern"])
        found = [part.matrix for part in matrices(model, tokens) if part.layer == layer]
        if not found:
            raise UserError(f"layer {layer} of {type(model).__name__} shows no mixing matrix: it has no hook_pattern")
        yield from ((profile_by_sequence(part),) for matrix in found for part in matrix.split(chunk or 64, dim=1))
        return
    mixer = model.layers[layer].mixer
    if isinstance(factors, str):
        names = {"phi": mixer.core, "composed": mixer.factor_names}.get(factors, (factors,))
    else:
        names = tuple(factors)
    if model.config.mixers[layer].name in ("mamba", "s6") and names == ("ssm",):
        yield from _scan_profiles(model, tokens, layer, chunk)
        return
    variants, bare = [model], without_D(model, layer)
    if bare is not None and set(names) & set(_SKIPS[model.config.mixers[layer].name].factors):
        variants.append(bare)
    for parts in zip(*(phi_chunks(m, tokens, layer, factors, chunk) for m in variants), strict=True):
        yield tuple(profile_by_sequence(matrix) for _, matrix in parts)


def _scan_profiles(model: HookedLM, tokens: Tensor, layer: int, chunk: int | None) -> Iterator[tuple[Profiles, ...]]:
    """Of the selective scan, by the kernel that builds no Φ; D changes lag 0 alone."""
    batch, length = tokens.shape
    ssm = model.layers[layer].mixer.ssm
    dt, B, C = mixer_activations(model, tokens, layer, ["hook_dt", "hook_B", "hook_C"]).values()
    read = (B * C).sum(-1, keepdim=True)
    chunk = chunk or max(1, int(_CHUNK_BYTES // (4 * batch * length)))
    for first in range(0, dt.shape[-1], chunk):
        part = slice(first, first + chunk)
        bare = selective_scan_phi_profile(dt[..., part], ssm.A[part], B, C)
        whole = bare.clone()
        whole[..., 0] = (dt[..., part] * read + ssm.D[part]).abs().mean(1)
        yield whole.double(), bare.double()


class _Fold:
    """Takes profiles by sequence, slice after slice of heads; by sequence and lag it keeps their mean over heads."""

    def __init__(self) -> None:
        self.profile: list[Tensor] = []
        self.total: Tensor | float = 0.0
        self.numbers: list[dict[str, Tensor]] = []
        self.left_out: list[dict[str, Tensor]] = []

    def add(self, part: Profiles, like: "_Fold | None" = None) -> None:
        """One slice. `like` has taken a slice that differs from it at lag 0 alone: the same rates."""
        mean, n = part.mean(0), len(part)
        self.profile.append(mean)
        self.total = self.total + part.sum(1)
        self.numbers.append(_numbers(mean, like.numbers[-1] if like else None))
        if n > 1 and part.stride(0) == 0:  # one matrix for all sequences
            self.left_out.append({name: value.expand(n, -1) for name, value in self.numbers[-1].items()})
        elif n > 1:
            rest = ((n * mean - part) / (n - 1)).clamp(min=0)
            self.left_out.append(_numbers(rest, like.left_out[-1] if like else None))

    def result(self) -> Decay:
        profile = torch.cat(self.profile)
        assert isinstance(self.total, Tensor)
        whole = self.total / len(profile)
        n = len(whole)
        rest = (n * whole.mean(0) - whole) / max(n - 1, 1)
        q = torch.tensor(list(QUARTILES.values()), dtype=profile.dtype, device=profile.device)
        numbers: dict[str, tuple[Tensor, Tensor]] = {}
        summary: dict[str, tuple[float, float]] = {}
        for name in self.numbers[0]:
            value = torch.cat([part[name] for part in self.numbers])
            error, spread = torch.full_like(value, torch.nan), torch.full_like(q, torch.nan)
            if name != "half_mass" and self.left_out:
                left_out = torch.cat([part[name] for part in self.left_out], dim=1)
                error, spread = jackknife_stderr(left_out), jackknife_stderr(left_out.nanquantile(q, 1).T)
            numbers[name] = (value, error)
            found = zip(value.nanquantile(q).tolist(), spread.tolist(), strict=True)
            summary |= {f"{name}_{word}": pair for word, pair in zip(QUARTILES, found, strict=True)}
        return Decay(profile, (whole.mean(0), jackknife_stderr(rest)), numbers, summary)


def _numbers(profile: Float[Tensor, "*lead lag"], known: dict[str, Tensor] | None = None) -> dict[str, Tensor]:
    """All that is read from a profile; rates from `known` if that is given."""
    rates = fit_decay(profile)._asdict() if known is None else {name: known[name] for name in DecayFit._fields}
    return rates | {
        "half_mass": half_mass(profile),
        "mean_distance": mean_distance(profile),
        "off_diagonal": off_diagonal_ratio(profile),
    }
