"""Phases in words: what the loss bump did to accuracy, each transition, their order and lags."""

from collections.abc import Iterator
from itertools import pairwise

from circuitscope.analysis.checkpoints.results import Results
from circuitscope.analysis.phases.timeline import Timeline
from circuitscope.viz.registry import words


@words("phases")
def phase_words(found: Results) -> Iterator[str]:
    """The timeline of the run."""
    return timeline_lines(found.timeline)


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
