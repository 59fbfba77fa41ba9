"""Decay in words: rates, distances and reach of every layer, at the first and the last step, runs side by side."""

from collections.abc import Iterator, Mapping

import pandas as pd

from circuitscope.analysis.checkpoints.results import Results
from circuitscope.viz.registry import TextTable, by_label, words

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


@words("decay", side_by_side=True)
def decay_words(*found: Results) -> Iterator[TextTable]:
    """One table with a column for each run."""
    frames = by_label([one.run for one in found], [one["decay"] for one in found])
    several = any(frame.step.nunique() > 1 for frame in frames.values())
    yield TextTable(("", "decay, first → last step" if several else "decay", *frames), list(decay_lines(frames)))


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
    if rows.value.isna().all():
        return ""
    first, last = rows.value.iloc[0], rows.value.iloc[-1]
    return f"{first:.3g}" if len(rows) == 1 else f"{first:.3g} → {last:.3g}"
