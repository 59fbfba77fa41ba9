"""What the loss bump did to accuracy, as one of five verdicts and a sentence."""

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike

from circuitscope.analysis.phases.detection import Level, Transition, Transitions, transitions
from circuitscope.errors import UserError, shown

CONTEXT_FREE = "context-free"  # the level of the loss that needs no circuit
ANY_VALUE = "any value"  # that of the accuracy
_ABOVE_CHANCE = 0.02  # an accuracy up to so much above chance is still that of answering with any value


def loss_level(context_free: float | None) -> Level | None:
    """The level of a loss that is reached by learning which tokens are answers.

    A tenth of a fall may lie below it: the loss goes on falling, and the fall's end is where nine tenths are done.
    """
    return None if context_free is None else Level(CONTEXT_FREE, context_free, slack_share=0.1)


def accuracy_level(chance: float | None) -> Level | None:
    """The level of an accuracy that is reached by answering with any value of the context."""
    return Level(ANY_VALUE, chance, slack=_ABOVE_CHANCE) if chance else None


@dataclass(frozen=True)
class Verdict:
    """What the loss bump did to accuracy."""

    kind: Literal["bump with accuracy", "bump without accuracy", "context-free", "smooth", "not judged"]
    sentence: str
    drop: Transition | None  # the steepest fall of the loss
    before: float  # accuracy before the drop's onset, nan without a drop
    after: float  # highest accuracy held after the drop's end


def steepest_fall(found: Transitions) -> Transition | None:
    """The steepest transition downwards of those that go beyond the level of the curve."""
    return max((t for t in found.beyond if t.size < 0), key=lambda t: t.steepness, default=None)


def verdict(
    steps: ArrayLike,
    loss: ArrayLike,
    accuracy: ArrayLike,
    chance: float,
    *,
    context_free: float | None = None,
    found: Transitions | None = None,
) -> Verdict:
    """Is there a bump in the loss, and does accuracy then rise above that of answering with any value of the context?

    "Without accuracy" means that after the steepest fall of the loss accuracy stays at or below chance + 0.02. The
    accuracy that counts is the largest median of three evaluations in a row, so that one lucky evaluation does not.
    A fall that goes no further than the context-free level is no bump; if there is no other, the verdict says so.

    Args:
        chance: the accuracy of answering with any value of the context; 0 if the context offers none.
        context_free: the loss of the best answer that ignores the sequence, if it is known.
        found: the transitions of the loss, if they are known already; `context_free` is then not used.
    """
    if not 0 <= chance <= 1:
        raise UserError(f"chance is an accuracy between 0 and 1, got {shown(chance)}")
    if found is None:
        found = transitions(steps, loss, level=loss_level(context_free))
    t, acc = np.asarray(steps, dtype=float), np.asarray(accuracy, dtype=float)
    if acc.shape != t.shape:
        raise UserError(f"accuracy must have one value per step: expected {t.shape}, got {acc.shape}")
    if not found.judged:
        return Verdict("not judged", f"not judged: of the loss, {found.note}", None, np.nan, np.nan)
    drop = steepest_fall(found)
    if drop is None and (only := [t for t in found if t.ends_at]):
        return Verdict("context-free", _context_free(only), None, np.nan, np.nan)
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
        "bump without accuracy" if after <= chance + _ABOVE_CHANCE else "bump with accuracy"
    )
    sentence = (
        f"{kind}: loss falls by {-drop.size:.3g} around step {drop.midpoint:.0f} ({drop.low:.0f} to {drop.high:.0f}); "
        f"accuracy {before:.1%} before, {after:.1%} after"
        + (f"; any value of the context gives {chance:.1%}" if chance else "")
    )
    return Verdict(kind, sentence, drop, before, after)


def _context_free(falls: list[Transition]) -> str:
    told = " and ".join(f"by {-t.size:.3g} around step {t.midpoint:.0f} ({t.low:.0f} to {t.high:.0f})" for t in falls)
    return (
        f"context-free: the loss falls {told}, and ends no lower than an answer that ignores the sequence: it learns"
        " which tokens are answers, which needs no circuit"
    )
