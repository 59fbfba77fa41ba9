"""The sequences that scores are computed on: the task's own, held out, and repeated random blocks."""

from collections.abc import Sequence
from dataclasses import replace

from circuitscope.analysis.scores.of_layers import EdgeSets
from circuitscope.analysis.scores.registry import SCORES
from circuitscope.errors import UserError
from circuitscope.tasks import Batch, Induction, Task

_LONGEST = 101  # positions in a sequence of repeated blocks, at most


class HeldOut:
    """Sequences of the test split, which training never sees, and repeated blocks where the model can take them.

    Args:
        longest: how many positions the model can take.
        seed: seed of the examples.
    """

    def __init__(self, task: Task, *, longest: int, sequences: int = 256, seed: int = 0):
        self.task, self.sequences, self._longest, self._seed = task, sequences, longest, seed
        self.own = task.batch(0, split="test", size=sequences, seed=seed)
        self.repeats: Batch | None = None
        if "period" in task.features:
            self.repeats = self.own
        elif task.inputs == "tokens" and min(longest, _LONGEST) >= 9:
            repeats = Induction.fitting(min(longest, _LONGEST), task.needs()["vocab_size"])
            self.repeats = repeats.batch(0, split="test", size=sequences, seed=seed)
        self._edges: dict[tuple[str, ...], EdgeSets | None] = {}

    def fewer(self, sequences: int) -> "HeldOut":
        """Such sequences, but not so many."""
        return HeldOut(self.task, longest=self._longest, sequences=sequences, seed=self._seed)

    def edges(self, names: Sequence[str], on: str) -> EdgeSets | None:
        """The edges of the named scores that are measured on "own" or on "repeats"; None if there are none."""
        if (on, *names) not in self._edges:
            self._edges[on, *names] = self._edge_sets(names, self.own if on == "own" else self.repeats, on)
        return self._edges[on, *names]

    def _edge_sets(self, names: Sequence[str], batch: Batch | None, on: str) -> EdgeSets | None:
        found = []
        for score in (SCORES[name] for name in names):
            if batch is None or score.edges is None or score.on != on or not score.possible_on(batch.layout):
                continue
            edges = replace(score.edges(batch.layout), name=score.name)
            found += [edges] if len(edges.src) else []
        return EdgeSets(tuple(found)) if found else None


def check_scores(names: str | Sequence[str] | None, task: Task) -> tuple[str, ...]:
    """The named scores, by default all that the task can have; a score that it cannot have is refused."""
    names = [names] if isinstance(names, str) else names
    layout = task.batch(0, split="test", size=1).layout
    repeats = task.inputs == "tokens"
    possible = tuple(
        name for name, score in SCORES.items() if (repeats and score.on == "repeats") or score.possible_on(layout)
    )
    for name in names or ():
        if SCORES[name].name not in possible:
            needs = "keys, values and queries" if SCORES[name].on == "own" else "tokens, of which blocks are repeated"
            raise UserError(f"{name} needs a task with {needs}, and {task.name} has none; valid: {', '.join(possible)}")
    return tuple(names or possible)
