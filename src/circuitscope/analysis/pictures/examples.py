"""The sequences whose matrices are shown, and the edges of every score on them."""

from dataclasses import dataclass

from circuitscope.analysis.scores.edges import Edges, named_edges
from circuitscope.analysis.scores.held_out import HeldOut
from circuitscope.analysis.scores.registry import SCORES
from circuitscope.tasks import Batch

EdgeList = list[tuple[int, int]]  # (dest, src)


@dataclass(frozen=True)
class ShownExamples:
    """The task's own sequences, then one sequence of repeated blocks if the task's own are not such blocks."""

    own: Batch
    repeats: Batch | None

    @staticmethod
    def of(data: HeldOut, count: int) -> "ShownExamples":
        """The first `count` of the held-out sequences."""
        repeats = None if data.repeats is data.own or data.repeats is None else data.repeats.part(slice(1))
        return ShownExamples(data.own.part(slice(count)), repeats)

    @property
    def batches(self) -> list[Batch]:
        """All sequences, in one batch per length."""
        return [self.own] if self.repeats is None else [self.own, self.repeats]

    @property
    def lengths(self) -> list[int]:
        """The number of positions of every example."""
        return [batch.length for batch in self.batches for _ in range(len(batch))]

    def edges(self, extra: tuple[str, ...] = ()) -> list[dict[str, EdgeList]]:
        """For every example the edges of each score that is measured on such sequences, by the score's name.

        Args:
            extra: more sets of edges on the task's own sequences, as `named_edges` takes them: "recall+1".
        """
        out: list[dict[str, EdgeList]] = []
        for batch in self.batches:
            on = ("own", "repeats") if batch is self.own else ("repeats",)
            names = [s.name for s in SCORES.values() if s.edges and s.on in on and s.possible_on(batch.layout)]
            sets = {name: named_edges(name, batch.layout) for name in [*names, *(extra if batch is self.own else ())]}
            out += [{name: _in_row(edges, row) for name, edges in sets.items()} for row in range(len(batch))]
        return out


def _in_row(edges: Edges, row: int) -> EdgeList:
    here = edges.sequence == row
    return list(zip(edges.dest[here].tolist(), edges.src[here].tolist(), strict=True))
