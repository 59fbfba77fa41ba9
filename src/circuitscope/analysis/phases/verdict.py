"""What the loss bump did to accuracy, as one of four verdicts and a sentence."""

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike

from circuitscope.analysis.phases.detection import Transition, Transitions, transitions
from circuitscope.errors import UserError, shown


@dataclass(frozen=True)
class Verdict:
    """What the loss bump did to accuracy."""

    kind: Literal["bump with accuracy", "bump without accuracy", "smooth", "not judged"]
    sentence: str
    drop: Transition | None  # the largest fall of the loss
    before: float  # accuracy before the drop's onset, nan without a drop
    after: float  # highest accuracy held after the drop's end


def largest_fall(found: Transitions) -> Transition | None:
    """The largest transition downwards."""
    return min((t for t in found if t.size < 0), key=lambda t: t.size, default=None)


def verdict(
    steps: ArrayLike,
    loss: ArrayLike,
    accuracy: ArrayLike,
    chance: float,
    *,
    found: Transitions | None = None,
) -> Verdict:
    """Is there a bump in the loss, and does accuracy then rise above that of answering with any value of the context?

    "Without accuracy" means that after the largest fall of the loss accuracy stays at or below chance + 0.02. The
    accuracy that counts is the largest median of three evaluations in a row, so that one lucky evaluation does not.

    Args:
        chance: the accuracy of answering with any value of the context; 0 if the context offers none.
        found: the transitions of the loss, if they are known already.
    """
    if not 0 <= chance <= 1:
        raise UserError(f"chance is an accuracy between 0 and 1, got {shown(chance)}")
    if found is None:
        found = transitions(steps, loss)
    t, acc = np.asarray(steps, dtype=float), np.asarray(accuracy, dtype=float)
    if acc.shape != t.shape:
        raise UserError(f"accuracy must have one value per step: expected {t.shape}, got {acc.shape}")
    if not found.judged:
        return Verdict("not judged", f"not judged: of the loss, {found.note}", None, np.nan, np.nan)
    drop = largest_fall(found)
    if drop is None:
        return Verdict("smooth", f"no fall of the loss stands out ({found.note})", None, np.nan, np.nan)
    finite = np.isfinite(acc)
    if not finite.any():
        falls = (
            f"the loss falls by {-drop.size:.3g} around step {drop.midpoint:.0f} ({drop.low:.0f} to {drop.high:.0f})"
        )
        return Verdict("not judged", f"{falls}; the task has no accuracy to compare it with", drop, np.nan, np.nan)
    earlier, later = acc[finite & (t <= drop.onset)], acc[finite & (t >= drop.end)]
    if not len(later):
        return Verdict("not judged", f"no accuracy after step {drop.end:.0f}", drop, np.nan, np.nan)
    before = float(np.median(earlier[-3:])) if len(earlier) else np.nan
    held = [float(np.median(later[i : i + 3])) for i in range(max(len(later) - 2, 1))]
    after = max(held)
    kind: Literal["bump with accuracy", "bump without accuracy"] = (
        "bump without accuracy" if after <= chance + 0.02 else "bump with accuracy"
    )
    sentence = (
        f"{kind}: loss falls by {-drop.size:.3g} around step {drop.midpoint:.0f} ({drop.low:.0f} to {drop.high:.0f}); "
        f"accuracy {before:.1%} before, {after:.1%} after"
        + (f"; any value of the context gives {chance:.1%}" if chance else "")
    )
    return Verdict(kind, sentence, drop, before, after)
