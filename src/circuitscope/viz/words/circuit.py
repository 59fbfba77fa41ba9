"""The recall circuit in words: every place that was tried, and sentences on the two that carry recall."""

from collections.abc import Iterator

from circuitscope.analysis.causal.parts import Circuit
from circuitscope.analysis.checkpoints.results import Results
from circuitscope.analysis.measured import measured
from circuitscope.analysis.phases.timeline import Timeline
from circuitscope.analysis.scores.curves import curve_of_part
from circuitscope.viz.registry import Said, TextTable, words


def circuit_sentences(found: Results) -> list[str]:
    """What the circuit is and, where the phases of the run are known, since when."""
    return found.circuit.sentences(since(found.timeline, found.circuit) if "phases" in found else None)


@words("circuit", in_brief=circuit_sentences)
def circuit_words(found: Results) -> Iterator[Said]:
    """The places, then the sentences."""
    columns = ("part", "edges", "where", "weight there", "strongest", "accuracy lost")
    yield TextTable(columns, list(circuit_lines(found.circuit)))
    yield from circuit_sentences(found)


def circuit_lines(circuit: Circuit) -> Iterator[tuple[str, ...]]:
    """(part, edges, where, weight, strongest head or channel, accuracy lost): every place; * marks the circuit."""
    for p in circuit.tried:
        mark = "*" if p in circuit.parts else " "
        yield (
            f"{mark} {p.step}",
            p.edges,
            p.place,
            measured(p.weight, p.stderr),
            f"{p.top[0]}: {p.top[1]:.2f}",
            measured(p.effect.lost, p.effect.stderr, sign=True),
        )


def since(timeline: Timeline, circuit: Circuit) -> dict[str, float]:
    """The step from which each part of a circuit is there: the midpoint of its score's steepest rise."""
    out: dict[str, float] = {}
    for part in circuit.parts:
        rises = [t for t in timeline.found.get(curve_of_part(part), ()) if t.size > 0]
        if rises:
            out[part.step] = max(rises, key=lambda t: t.steepness).midpoint
    return out
