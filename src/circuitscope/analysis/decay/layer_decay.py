"""Decay of the off-diagonal terms of a layer: profiles of its mixing matrix with and without D, and their rates.

It works on slices of channels, so that Φ of all channels is never built at once. `lag_profile` reads numbers from
profiles; `rows` makes the table of everything, with transition products and gradients.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from circuitscope.analysis.decay.lag_profile import (
    DecayFit,
    fit_decay,
    half_mass,
    jackknife_stderr,
    mean_distance,
    off_diagonal_ratio,
    profile_by_sequence,
)
from circuitscope.analysis.reading.opened import Inputs, opened
from circuitscope.arguments import explained
from circuitscope.devices import Transfer
from circuitscope.errors import UserError
from circuitscope.lens import HookedModel, layer_index
from circuitscope.mixers.reading import Product, Reading, slices_of

Factors = str | Sequence[str]
Profiles = Float[Tensor, "batch head lag"]

_PROFILE_BYTES = 16e6  # of profiles that a kernel makes at once without building Φ
QUARTILES = {"q25": 0.25, "median": 0.5, "q75": 0.75}


@dataclass(frozen=True)
class Decay:
    """Profiles m(δ) of a layer's heads (or channels), and what is read from each.

    `numbers` holds, for each head, kappa, kappa_r2, power, power_r2 (`fit_decay`), half_mass, mean_distance and
    off_diagonal; `summary` holds their quartiles over the heads for which they exist ("kappa_median", "kappa_q25" …).
    Whether a fit holds is for the reader to judge by its R²; the table of the analysis leaves out rates that do not.
    Both come with standard errors over sequences by the jackknife. For half_mass these are nan: it is a step function
    of the profile, for which the jackknife does not work.
    """

    profile: Float[Tensor, "head lag"]
    mean_profile: tuple[Float[Tensor, " lag"], Float[Tensor, " lag"]]
    numbers: dict[str, tuple[Float[Tensor, " head"], Float[Tensor, " head"]]]
    summary: dict[str, tuple[float, float]]

    def __repr__(self) -> str:
        shown = {name: self.summary[f"{name}_median"][0] for name in ("kappa", "half_mass", "off_diagonal")}
        medians = ", ".join(f"{name} {value:.3g}" for name, value in shown.items())
        heads, lags = self.profile.shape
        return f"Decay({heads} heads or channels, {lags} lags; medians: {medians})"


@dataclass(frozen=True)
class LayerDecay:
    """Decay of a layer's matrix at length `length` over `n` sequences; `without_D` is None if it has no D term."""

    layer: int
    factor: str
    length: int
    n: int
    whole: Decay
    without_D: Decay | None


@torch.no_grad()
@explained
def layer_decay(
    model: HookedModel,
    tokens: Inputs,
    layer: int,
    factors: Factors = "phi",
    chunk: int | None = None,
) -> LayerDecay:
    """Profiles of a layer's mixing matrix, and what is read from them.

    The D term is the direct skip D δ_ij of mamba, s6, s4, s4_mamba, mamba2 and h3 and the skip bias of hyena;
    without it means the same weights with D = 0, in composed factors too. Attention, based, gated_conv,
    rwkv (whose bonus for the own token is normalized with the rest) and the delta rules have none.

    A matrix that reads later positions, a centred conv, is refused.

    Args:
        factors: as `circuitscope.phi` takes them; a model from elsewhere has only "phi", its hook_pattern.
        chunk: how many heads (channels) to take at a time; by default about 8 MB of them.
    """
    layer = layer_index(model, layer)
    name = factors if isinstance(factors, str) else "·".join(map(str, factors))
    return reading_decay(opened(model).reading(tokens, layer), layer, factors, name, chunk)


def reading_decay(
    reading: Reading, layer: int, factors: Factors = "phi", name: str = "phi", chunk: int | None = None
) -> LayerDecay:
    """`layer_decay` of a layer that has been read."""
    found: list[LayerDecay] = []
    with Transfer() as transfer:
        decay_by(transfer, found.append, reading, layer, factors, name, chunk)
    return found[0]


def decay_by(
    transfer: Transfer,
    use: Callable[[LayerDecay], None],
    reading: Reading,
    layer: int,
    factors: Factors = "phi",
    name: str = "phi",
    chunk: int | None = None,
) -> None:
    """`reading_decay`, used when the profiles have come to the CPU."""
    if not reading.product(factors).causal:
        raise UserError(
            f"{name} of layer {layer} reads later positions, and m(δ) counts only positions back from the diagonal;"
            f" ask for a causal matrix: {', '.join(n for n, p in reading.products().items() if p.causal)}"
        )
    folds: list[_Fold] = []

    def add(parts: list[Tensor]) -> None:
        first, *others = (part.double() for part in parts)
        folds.extend(_Fold() for _ in parts[len(folds) :])
        folds[0].add(first)
        for fold, part in zip(folds[1:], others, strict=True):
            fold.add(part, folds[0] if torch.equal(part[..., 1:], first[..., 1:]) else None)

    for parts in _profiles(reading, reading.product(factors), chunk):
        transfer.then(parts, add)
    length, batch = reading.length, reading.batch

    def finish(_: list[Tensor]) -> None:
        whole, *rest = [fold.result() for fold in folds]
        use(LayerDecay(layer, name, length, batch, whole, rest[0] if rest else None))

    transfer.then([], finish)


def _profiles(reading: Reading, product: Product, chunk: int | None) -> Iterator[Sequence[Profiles]]:
    """Profiles per sequence, in slices of units; a second one without D where the matrix has a D term."""
    kernel = product.factors[0].profile if len(product.factors) == 1 else None
    if kernel is not None:
        step = chunk or max(1, int(_PROFILE_BYTES // (4 * reading.batch * reading.length)))
        for units in slices_of(product.size, step):
            yield kernel(units)
        return
    variants = [True, False] if product.has_skip else [True]
    for parts in zip(*(reading.slices(product, units=chunk, skip=skip) for skip in variants), strict=True):
        yield [profile_by_sequence(matrix) for _, matrix in parts]


class _Fold:
    """Collects profiles in slices of heads; for each sequence and lag it keeps only their mean over heads."""

    def __init__(self) -> None:
        self.profile: list[Tensor] = []
        self.total: Tensor | float = 0.0
        self.numbers: list[dict[str, Tensor]] = []
        self.left_out: list[dict[str, Tensor]] = []

    def add(self, part: Profiles, like: "_Fold | None" = None) -> None:
        """Adds a slice. `like` has just taken one that differs from it only at lag 0, and so has the same rates."""
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
    """All numbers that are read from a profile; the rates are taken from `known` if it is given."""
    rates = fit_decay(profile)._asdict() if known is None else {name: known[name] for name in DecayFit._fields}
    return rates | {
        "half_mass": half_mass(profile),
        "mean_distance": mean_distance(profile),
        "off_diagonal": off_diagonal_ratio(profile),
    }
