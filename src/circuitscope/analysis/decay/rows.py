"""Decay of a model as tidy rows: profiles and rates, transition products, reach of gradients, layer by layer."""

from collections.abc import Iterator, Sequence
from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor

from circuitscope.analysis.decay.gradient_reach import pooled, squared_by_lag
from circuitscope.analysis.decay.lag_profile import FIT_HOLDS, holds, jackknife_stderr
from circuitscope.analysis.decay.layer_decay import QUARTILES, Decay, LayerDecay, decay_by
from circuitscope.analysis.decay.transition import ByLag, TransitionNorms, norms_of
from circuitscope.analysis.reading.opened import Inputs, opened
from circuitscope.analysis.registry import Row, analysis
from circuitscope.analysis.scores.held_out import HeldOut
from circuitscope.arguments import explained
from circuitscope.devices import Transfer
from circuitscope.errors import unknown
from circuitscope.lens import HookedModel, layer_count, layer_index
from circuitscope.mixers.reading import DeltaTransition, GatedTransition

Summary = dict[str, tuple[float, float]]
Numbers = dict[str, tuple[Float[Tensor, " head"], Float[Tensor, " head"]]]
COLUMNS = {
    "layer": "int64",
    "head": "Int64",
    "factor": "string",
    "quantity": "string",
    "lag": "Int64",
    "value": "float64",
    "stderr": "float64",
    "n": "int64",
}


@analysis(
    "decay",
    "Decay of off-diagonal terms by lag, transition products, and the reach of gradients.",
    COLUMNS,
    means={
        "head": "number of the head or channel; empty for the whole layer",
        "lag": "i − j; empty if not by lag",
        "value": f"kappa and power are empty where R² of their fit is below {FIT_HOLDS}",
    },
)
def decay_of(model: HookedModel, data: HeldOut) -> list[Row]:
    """`decay_rows` on held-out sequences."""
    return decay_rows(model, data.own.inputs)


@explained
def decay_rows(
    model: HookedModel,
    tokens: Inputs,
    *,
    layers: Sequence[int] | None = None,
    factors: Sequence[str] = ("phi",),
    probes: int = 2,
    seed: int = 0,
) -> list[Row]:
    """Tidy rows: layer, head (None for the whole layer), factor, quantity, lag (or None), value, stderr, n.

    factor                    quantity
    "phi", "composed" …       length; by lag profile (mean over heads), profile_median, _q25, _q75; by head and as
    and "phi_without_D" …     _median, _q25, _q75 of the layer: kappa, kappa_r2, power, power_r2, half_mass,
                              mean_distance, off_diagonal; kappa and power are nan where their fit does not hold
    "transition"              by lag transition_norm, transition_rms (means over heads) and their quartiles;
                              time_constant by head and as quartiles, where the transition is gated
    "gradient"                by lag gradient_reach
    A layer has no rows for what it does not have. n counts sequences. Everything is computed where the model is, and
    comes to the CPU by one transfer; only the products of transitions, many small steps, are made there.

    Args:
        factors: names of factors; each layer has rows for those that it has.
        probes: random vectors per destination for the reach of gradients; 0 leaves that out.
    """
    chosen = range(layer_count(model)) if layers is None else [layer_index(model, layer) for layer in layers]
    rows: list[Row] = []
    missing, offered = set(factors), set()
    with Transfer() as transfer:
        for layer, reading in opened(model).walk(tokens):
            if layer not in chosen:
                continue
            names = set(reading.names)
            offered |= names
            missing -= names or missing
            with torch.no_grad():
                for factor in factors:
                    if factor in names:
                        decay_by(transfer, lambda found: rows.extend(_phi_rows(found)), reading, layer, factor, factor)
                if not isinstance(reading.transition, str):
                    parts = [part for part in reading.transition if part is not None]
                    transfer.then(parts, partial(_add_transition, rows, layer, type(reading.transition), reading.batch))
            if probes:
                reach = squared_by_lag(model, tokens, layer, probes, seed)
                transfer.then(reach, partial(_add_reach, rows, layer))
    if missing:
        raise unknown("factor", missing.pop(), offered)
    return rows


def _phi_rows(found: LayerDecay) -> Iterator[Row]:
    for decay, factor in ((found.whole, found.factor), (found.without_D, f"{found.factor}_without_D")):
        if decay is None:
            continue
        yield _row(found.layer, None, factor, "length", None, float(found.length), torch.nan, found.n)
        value, error = (part.tolist() for part in decay.mean_profile)
        for lag in range(found.length):
            yield _row(found.layer, None, factor, "profile", lag, value[lag], error[lag], found.n)
        yield from _quartile_rows(found.layer, factor, "profile", decay.profile, range(found.length), found.n)
        summary, numbers = _where_fits_hold(decay)
        for name, (one, spread) in summary.items():
            yield _row(found.layer, None, factor, name, None, one, spread, found.n)
        for name, (by_head, spreads) in numbers.items():
            for head, (one, spread) in enumerate(zip(by_head.tolist(), spreads.tolist(), strict=True)):
                yield _row(found.layer, head, factor, name, None, one, spread, found.n)


def _where_fits_hold(decay: Decay) -> tuple[Summary, Numbers]:
    """The numbers of a layer, without the rates of heads whose fit does not hold.

    Quartiles of a rate are over the heads where it holds, without a standard error unless these are all heads; they are
    nan where these are less than half of the heads.
    """
    summary, numbers = dict(decay.summary), dict(decay.numbers)
    for rate in ("kappa", "power"):
        value, spread = decay.numbers[rate]
        fits = holds(decay.numbers[f"{rate}_r2"][0])
        if bool(fits.all()):
            continue
        kept = torch.where(fits, value, torch.nan)
        numbers[rate] = (kept, torch.where(fits, spread, torch.nan))
        enough = 2 * int(fits.sum()) >= len(fits)
        for word, q in QUARTILES.items():
            summary[f"{rate}_{word}"] = (float(kept.nanquantile(q)) if enough else torch.nan, torch.nan)
    return summary, numbers


def _add_reach(rows: list[Row], layer: int, sums: list[Tensor]) -> None:
    reach = pooled(*sums)
    parts = zip(reach.norm.tolist(), reach.stderr.tolist(), reach.n.tolist(), strict=True)
    rows += [_row(layer, None, "gradient", "gradient_reach", lag, *part) for lag, part in enumerate(parts)]


def _add_transition(
    rows: list[Row], layer: int, kind: type[GatedTransition | DeltaTransition], batch: int, parts: list[Tensor]
) -> None:
    with torch.no_grad():
        rows += _transition_rows(norms_of(kind(*parts), batch), layer)


def _transition_rows(found: TransitionNorms, layer: int) -> Iterator[Row]:
    parts: dict[str, ByLag] = {"transition_norm": found.norm, "transition_rms": found.rms}
    for name, part in parts.items():
        for lag, value, error in zip(part.lags, part.layer.tolist(), part.layer_stderr.tolist(), strict=True):
            yield _row(layer, None, "transition", name, lag, value, error, part.n)
        yield from _quartile_rows(layer, "transition", name, part.value, part.lags, part.n)
    if found.log_decay is not None and found.time_constant is not None:
        n, tau = len(found.log_decay), found.time_constant
        rest = (n * found.log_decay.mean(0) - found.log_decay) / max(n - 1, 1)
        spread = jackknife_stderr(-1 / rest).tolist()
        yield from _quartile_rows(layer, "transition", "time_constant", tau[:, None], [None], n)
        for head, value in enumerate(tau.tolist()):
            yield _row(layer, head, "transition", "time_constant", None, value, spread[head], n)


def _quartile_rows(
    layer: int, factor: str, name: str, values: Float[Tensor, "head lag"], lags: Sequence[int | None], n: int
) -> Iterator[Row]:
    """Quartiles over heads, at each lag."""
    for word, q in QUARTILES.items():
        for lag, value in zip(lags, values.nanquantile(q, 0).tolist(), strict=True):
            yield _row(layer, None, factor, f"{name}_{word}", lag, value, torch.nan, n)


def _row(
    layer: int, head: int | None, factor: str, quantity: str, lag: int | None, value: float, stderr: float, n: int
) -> Row:
    return {
        "layer": layer,
        "head": head,
        "factor": factor,
        "quantity": quantity,
        "lag": lag,
        "value": value,
        "stderr": stderr,
        "n": n,
    }
