"""What the colours of a heatmap stand for: the scale of the entries, its range, and its words for the colour bar."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from jaxtyping import Float
from matplotlib.colors import LogNorm, Normalize, PowerNorm
from numpy.typing import NDArray

from circuitscope.analysis.pictures.choice import Entries
from circuitscope.viz.style import DIVERGING, SEQUENTIAL

Scale = Literal["signed", "share", "log"]
SCALES: dict[Scale, str] = {
    "signed": "Φ",
    "share": "|Φ| / row sum",
    "log": "|Φ|, log scale",
}
DECADES = 5  # a log scale spans at most
POWER = 0.5  # colours of shares are even in this power of the share
_POWER_WORDS = "square-root scale"

Array = NDArray[Any]


@dataclass(frozen=True)
class Panel:
    """One matrix to draw.

    Args:
        values: [dest, src], or [pos] for a factor that is diagonal.
        head: which head or channel it is of, or what mean of them, in words.
        entries: whether they have either sign, are means of |Φ|, or are shares of their rows.
        causal: whether only entries with src ≤ dest are looked at.
    """

    values: Float[Array, "..."]
    factor: str
    head: str = ""
    step: int | None = None
    entries: Entries = "signed"
    causal: bool = True

    @property
    def diagonal(self) -> bool:
        return self.values.ndim == 1


def default_scale(panels: Sequence[Panel]) -> Scale:
    """share for rows of shares and for means of |Φ|, which have no sign; signed for all else."""
    return "signed" if any(p.entries == "signed" for p in panels) else "share"


def as_drawn(panel: Panel, scale: Scale) -> Float[Array, "..."]:
    """What the colours stand for; nan above the diagonal of a causal matrix.

    A diagonal factor has no rows to take shares of: it stays signed there.
    """
    values = np.asarray(panel.values, dtype=float)
    if panel.diagonal:
        return np.abs(values) if scale == "log" else values
    if scale != "signed":
        values = np.abs(values)
    if panel.causal:
        values = np.where(np.tri(len(values), dtype=bool), values, np.nan)
    if scale == "share":
        mass = np.nansum(values, axis=1, keepdims=True)
        with np.errstate(invalid="ignore"):  # ∞ / ∞
            values = values / np.where(mass > 0, mass, 1.0)
    return values


def colours(drawn: Sequence[Array], scale: Scale) -> tuple[str, Normalize]:
    """The colour map of panels that share it, and its range.

    signed: from −m to m, m the largest |value|; where the diagonal is more than twice all else, as with the D term of
    a state-space model, m is the largest off it (at least 1% of the diagonal), and what is beyond has the last colour.
    share: 0 to 1, evenly in the square root, so that 1/L is not black. log: from the largest value down to the
    smallest that is not 0, at most 5 decades.
    """
    found = np.concatenate([np.ravel(d) for d in drawn])
    found = found[np.isfinite(found)]
    most = float(np.abs(found).max(initial=0))
    most = most if most > 1e-200 else 1.0  # where a colour bar has no room left
    if scale == "log":
        least = float(found[found > 0].min(initial=most))
        return SEQUENTIAL, LogNorm(max(least, most * 10**-DECADES) if least < most else most / 10, most, clip=True)
    matrices = [d for d in drawn if d.ndim == 2]
    if scale == "share" and matrices:
        return SEQUENTIAL, PowerNorm(POWER, 0, 1)
    off = max((float(np.nanmax(np.abs(np.where(np.eye(len(d)), 0, d)))) for d in matrices), default=0.0)
    if 0 < off < most / 2:
        most = max(off, most / 100)
    return DIVERGING, Normalize(-most, most)


def scale_words(panel: Panel, scale: Scale) -> str:
    """What the label of a colour bar says."""
    if panel.diagonal and scale == "share":
        scale = "signed"
    shares = scale == "share" and panel.entries == "shares"
    text = "share of the row" if shares else SCALES[scale]
    text = text if panel.factor in ("", "phi") else text.replace("Φ", f"Φ {panel.factor}", 1)
    return f"{text}, {_POWER_WORDS}" if scale == "share" else text
