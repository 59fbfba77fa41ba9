"""Decay in words: rates, distances and reach of every layer, at the first and the last step, runs side by side."""

from collections.abc import Iterator, Mapping

import pandas as pd

from circuitscope.analysis.checkpoints.results import Results
from circuitscope.analysis.decay.lag_profile import FIT_HOLDS
from circuitscope.viz.registry import Said, TextTable, by_label, words

_QUANTITIES = {
    ("phi", "kappa_median"): "rate κ of |Φ|, median over heads or channels",
    ("phi", "kappa_r2_median"): "R² of the exponential",
    ("phi", "power_median"): "exponent of the power law",
    ("phi", "power_r2_median"): "R² of the power law",
    ("phi_without_D", "kappa_median"): "rate κ without D",
    ("phi", "half_mass_median"): "half-mass distance",
    ("phi", "mean_distance_median"): "mean distance",
    ("phi", "off_diagonal_median"): "off-diagonal ratio",
    ("transition", "time_constant_median"): "time constant τ of the gates",
}
_BY_LAG = {
    ("transition", "transition_norm"): "‖∏A‖, spectral, over lag {lag}",
    ("transition", "transition_rms"): "‖∏A‖, root mean square, lag {lag}",
    ("gradient", "gradient_reach"): "gradient reach, lag {lag}",
}
_LAGS = (1, 8, 32)
_NO_FIT = "no fit"


@words("decay", side_by_side=True)
def decay_words(*found: Results) -> Iterator[Said]:
    """One table with a column for each run, and what it means where nothing fits."""
    frames = by_label([one.run for one in found], [one["decay"] for one in found])
    several = any(frame.step.nunique() > 1 for frame in frames.values())
    lines = list(decay_lines(frames))
    yield TextTable(("", "decay, first → last step" if several else "decay", *frames), lines)
    if any(_NO_FIT in cell for line in lines for cell in line):
        yield (
            f"{_NO_FIT}: R² is below {FIT_HOLDS} in more than half of the heads or channels, so |Φ| does not fall"
            " like that, and a rate would describe nothing"
        )


def decay_lines(frames: Mapping[str, pd.DataFrame]) -> Iterator[tuple[str, ...]]:
    """A line for each layer and quantity: its name, then for each run the value at the first and at the last step."""
    keys: dict[tuple[int, str, str, int | None], str] = {}
    for frame in frames.values():
        longest = int(frame.lag.max()) if frame.lag.notna().any() else 0
        for layer in sorted(map(int, frame.layer.unique())):
            for (factor, quantity), name in _QUANTITIES.items():
                keys[layer, factor, quantity, None] = name
            for (factor, quantity), name in _BY_LAG.items():
                for lag in _LAGS:
                    if lag <= longest:
                        keys[layer, factor, quantity, lag] = name.format(lag=lag)
    for (layer, factor, quantity, at), name in keys.items():
        cells = [_first_and_last(frame, layer, factor, quantity, at) for frame in frames.values()]
        if any(cells):
            yield (f"L{layer}", name, *(cell or "–" for cell in cells))


def _first_and_last(frame: pd.DataFrame, layer: int, factor: str, quantity: str, lag: int | None) -> str:
    rows = frame[(frame.layer == layer) & (frame.factor == factor) & (frame.quantity == quantity)]
    rows = rows[rows["head"].isna() & (rows.lag.isna() if lag is None else rows.lag == lag)].sort_values("step")
    fits = _fits(frame, layer, factor, quantity)
    if rows.value.isna().all() and not any(r2 < FIT_HOLDS for r2 in fits.values()):
        return ""
    first, last = (
        _NO_FIT if fits.get(step, 1.0) < FIT_HOLDS else f"{value:.3g}"
        for step, value in (rows[["step", "value"]].iloc[i] for i in (0, -1))
    )
    return first if len(rows) == 1 else f"{first} → {last}"


def _fits(frame: pd.DataFrame, layer: int, factor: str, quantity: str) -> dict[int, float]:
    """R² of the fit behind a rate, by step; empty for any other quantity."""
    if quantity not in ("kappa_median", "power_median"):
        return {}
    r2 = frame[(frame.layer == layer) & (frame.factor == factor) & frame["head"].isna()]
    r2 = r2[r2.quantity == quantity.replace("_median", "_r2_median")]
    return {int(step): float(value) for step, value in zip(r2.step, r2.value, strict=True)}
