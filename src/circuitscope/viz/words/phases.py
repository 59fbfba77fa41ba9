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
            )
    for note, names in not_judged.items():
        yield f"  not judged: {', '.join(names)} ({note})"
    if timeline.order.events:
        yield "order by midpoint: " + ", ".join(f"{e.name} {e.step:.0f}" for e in timeline.order.events)
    for first, second in pairwise(timeline.order.events):
        lag = next(x for x in timeline.order.lags if (x.first, x.second) == (first.name, second.name))
        yield f"  {lag}"
