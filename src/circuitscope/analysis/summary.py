"""Results in words: what a table of scores, a circuit, a timeline and a decay amount to, for people to read."""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import pandas as pd

from circuitscope.analysis.causal.circuit import Circuit
from circuitscope.analysis.phases.timeline import Timeline, curve_at, place_name, strongest
from circuitscope.runs.run import Run

_SHOWN = {
    "binding": "at a context value, on its key",
    "recall": "at a query, on the bound value",
    "value": "at a query, on all values",
    "previous_token": "on the position before",
    "copying_values": "OV: raises the value it reads",
    "copying": "OV: raises the token it reads",
    "k_composition": "reads the earlier head by keys",
    "induction": "prefix matching on repeated random blocks, off-distribution",
    "duplicate": "on earlier occurrences, repeated random blocks, off-distribution",
}
_FACTORS = ("pattern", "composed", "phi", "ssm", "conv")

Line = tuple[str, ...]


def heading(run: Run, steps: Sequence[int], sequences: int) -> str:
    """Which run, how many checkpoints, on what."""
    config = run.config
    mixers = " + ".join(m.name for m in config.model.mixers)
    sizes = ", ".join(f"{name} {size}" for name, size in config.task.sizes().items())
    count = f"{len(steps)} checkpoint{'s' if len(steps) > 1 else ''} ({steps[0]} to {steps[-1]})"
    return f"{run.path}: {mixers} on {config.task.name} ({sizes}); {count}, {sequences} held-out sequences each"


def score_lines(frame: pd.DataFrame, own: str) -> Iterator[Line]:
    """(score, where, value at the last step, at the first, strongest channels, meaning): the strongest place of each.

    Layers of channels get a line a factor on the task's own sequences, and one line on repeated blocks.
    """
    for score, meaning in _SHOWN.items():
        rows = frame[frame.score == score]
        off = meaning.endswith("off-distribution")
        factors = [f for f in dict.fromkeys([*_FACTORS, *rows.factor]) if (rows.factor == f).any()]
        for factor in factors[:1] if off else factors:
            place = _place(frame, rows[rows.factor == factor], score, factor)
            if place is None:
                continue
            through = f" of {factor}" if score.endswith("composition") else ""
            yield (
                score.replace("_", " "),
                place_name(place) + through,
                f"{place.value:.2f} ± {place.stderr:.2f}",
                f"{curve_at(frame, place).iloc[0].value:.2f}",
                _channels(rows[rows.factor == factor], place),
                meaning.replace(", off-distribution", "") if own == "induction" else meaning,
            )


def _place(frame: pd.DataFrame, rows: pd.DataFrame, score: str, factor: str) -> "pd.Series[Any] | None":
    if factor not in ("ov", "pattern") and not score.endswith("composition"):
        return strongest(frame, score, factor)
    last = rows[rows.step == rows.step.max()]
    best: pd.Series[Any] = last.loc[last.value.idxmax()]
    return best


def _channels(rows: pd.DataFrame, place: "pd.Series[Any]", most: int = 3) -> str:
    if not pd.isna(place["head"]):
        return ""
    last = rows[(rows.step == place.step) & (rows.layer == place.layer) & rows["head"].notna()]
    top = last[last.weighting == "abs"].nlargest(most, "value")
    listed = ", ".join(f"{h} {v:.2f}" for h, v in zip(top["head"], top.value, strict=True))
    return f"of {last['head'].nunique()}: {listed}" if listed else ""


def timeline_lines(timeline: Timeline) -> Iterator[str]:
    """The verdict, each transition, the order and the lags."""
    yield timeline.verdict.sentence
    for name, several in timeline.found.items():
        if not several:
            yield f"  {name}: no transition" + (f" ({several.note})" if not several.judged else "")
        for t in several:
            yield (
                f"  {name}: {'rises' if t.size > 0 else 'falls'} by {abs(t.size):.2f}, steps {t.onset:.0f} to"
                f" {t.end:.0f}, midpoint {t.midpoint:.0f} ({t.low:.0f} to {t.high:.0f})"
            )
    if timeline.order.events:
        yield "order by midpoint: " + ", ".join(f"{e.name} {e.step:.0f}" for e in timeline.order.events)
    for first, second in pairwise(timeline.order.events):
        lag = next(x for x in timeline.order.lags if (x.first, x.second) == (first.name, second.name))
        yield f"  {lag}"


def since(timeline: Timeline, circuit: Circuit | None) -> dict[str, float]:
    """The step from which each part of a circuit is there: the midpoint of its score's largest rise."""
    out: dict[str, float] = {}
    for part in (circuit.binding, circuit.recall) if circuit is not None else ():
        if part is None:
            continue
        curves = (f"{part.edges} {part.place}", f"{part.step} L{part.layer} composed")
        rises = [t for name in curves for t in timeline.found.get(name, ()) if t.size > 0]
        if rises:
            out[part.step] = max(rises, key=lambda t: t.size).midpoint
    return out


def circuit_lines(circuit: Circuit) -> Iterator[Line]:
    """(part, edges, where, weight, strongest head, accuracy lost): every place that was tried."""
    for p in circuit.tried:
        mark = "*" if p in (circuit.binding, circuit.recall) else " "
        yield (
            f"{mark} {p.step}",
            p.edges,
            p.place,
            f"{p.weight:.2f} ± {p.stderr:.2f}",
            f"{p.top[0]}: {p.top[1]:.2f}",
            f"{p.effect.lost:+.3f} ± {p.effect.stderr:.3f}",
        )


def cause_lines(frame: pd.DataFrame, most: int = 24) -> Iterator[Line]:
    """(intervention, where, effect), the strongest first."""
    ranked = frame.loc[frame.value.abs().sort_values(ascending=False).index].head(most)
    for row in ranked.to_dict("records"):
        layer = "" if row["where"][0] in "Lb" else f"L{row['layer']} "
        yield row["intervention"], f"{layer}{row['where']}", f"{row['value']:+.2f} ± {row['stderr']:.2f} {row['unit']}"
    if len(frame) > most:
        yield "", f"and {len(frame) - most} weaker ones in causal.parquet", ""


_DECAY = {
    ("phi", "kappa_median"): "rate κ of |Φ|, median over heads",
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


def decay_lines(frames: dict[str, pd.DataFrame]) -> Iterator[Line]:
    """A line a layer and quantity: its name, then for each run the value at the first and at the last step."""
    keys: dict[tuple[int, str, str, int | None], str] = {}
    for frame in frames.values():
        longest = int(frame.lag.max()) if frame.lag.notna().any() else 0
        for layer in sorted(frame.layer.unique()):
            for (factor, quantity), name in _DECAY.items():
                keys[layer, factor, quantity, None] = name
            for (factor, quantity), name in _BY_LAG.items():
                for far in (1, 8, 32):
                    if far <= longest:
                        keys[layer, factor, quantity, far] = name.format(lag=far)
    for (layer, factor, quantity, lag), name in keys.items():
        cells = [_first_and_last(frame, layer, factor, quantity, lag) for frame in frames.values()]
        if any(cells):
            yield (f"L{layer}", name, *(cell or "–" for cell in cells))


def _first_and_last(frame: pd.DataFrame, layer: int, factor: str, quantity: str, lag: int | None) -> str:
    rows = frame[(frame.layer == layer) & (frame.factor == factor) & (frame.quantity == quantity)]
    rows = rows[rows["head"].isna() & (rows.lag.isna() if lag is None else rows.lag == lag)].sort_values("step")
    if not len(rows):
        return ""
    first, last = rows.value.iloc[0], rows.value.iloc[-1]
    return f"{first:.3g}" if len(rows) == 1 else f"{first:.3g} → {last:.3g}"
