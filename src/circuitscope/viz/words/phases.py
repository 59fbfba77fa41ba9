"""Phases in words: what the loss bump did to accuracy, each transition, their order and lags."""

from collections.abc import Iterator
from itertools import pairwise

from circuitscope.analysis.checkpoints.results import Results
from circuitscope.analysis.phases.detection import Transition
from circuitscope.analysis.phases.order import Order
from circuitscope.analysis.phases.timeline import Timeline
from circuitscope.analysis.phases.verdict import ANY_VALUE, CONTEXT_FREE
from circuitscope.viz.registry import words


@words("phases")
def phase_words(found: Results) -> Iterator[str]:
    """The timeline of the run, and the order of what a knockout backs."""
    yield from timeline_lines(found.timeline)
    yield from order_lines(found.order)
    if found.known_circuit is None and len(found.timeline.found) > len(("loss", found.timeline.metric, "train loss")):
        yield "  scores are left out of the order: no knockout backs them here (--circuit tries)"


def timeline_lines(timeline: Timeline) -> Iterator[str]:
    """The verdict and each transition."""
    yield timeline.verdict.sentence + ("" if timeline.verdict.drop is None else _epoch(timeline, timeline.verdict.drop))
    not_judged: dict[str, list[str]] = {}
    for name, several in timeline.found.items():
        if not several.judged:
            not_judged.setdefault(several.note, []).append(name)
        elif not several:
            yield f"  {name}: no transition"
        for t in several:
            yield (
                f"  {name}: {'rises' if t.size > 0 else 'falls'} by {abs(t.size):.2f}, steps {t.onset:.0f} to"
                f" {t.end:.0f}, midpoint {t.midpoint:.0f} ({t.low:.0f} to {t.high:.0f})"
                f"{_MEANINGS.get(t.ends_at, '')}{_epoch(timeline, t)}"
            )
    for note, names in not_judged.items():
        yield f"  not judged: {', '.join(names)} ({note})"


_MEANINGS = {
    CONTEXT_FREE: "; context-free: it learns which tokens are answers",
    ANY_VALUE: "; it ends at the accuracy of any value of the context",
}


def _epoch(timeline: Timeline, one: Transition) -> str:
    step = timeline.epoch_in(one)
    return "" if step is None else f"; an epoch of the training data begins within it, at step {step:.0f}"


def order_lines(order: Order) -> Iterator[str]:
    """The events by midpoint, and the lags from one to the next."""
    if order.events:
        yield "order by midpoint: " + ", ".join(f"{e.name} {e.step:.0f}" for e in order.events)
    for first, second in pairwise(order.events):
        lag = next(x for x in order.lags if (x.first, x.second) == (first.name, second.name))
        yield f"  {lag}"
