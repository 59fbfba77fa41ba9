"""The sequences that scores are computed on: the task's own, held out, and repeated random blocks.

A model that was trained on repeated blocks may copy from a fixed distance back, without matching anything. Blocks of a
length that training never had tell the two apart.
"""

from collections.abc import Sequence
from dataclasses import replace

from circuitscope.analysis.scores.edges import LATER, STEPS, named_edges
from circuitscope.analysis.scores.of_layers import EdgeSets
from circuitscope.analysis.scores.registry import SCORES, Sequences
from circuitscope.errors import UserError
from circuitscope.tasks import Batch, Induction, Task

_LONGEST = 101  # positions in a sequence of repeated blocks, at most
_FEWER = 4  # repeated blocks are so many times fewer: nearly all their positions count, of the task's own only some do
_TOKENS = 4096  # tokens that a model reads at a time: what a layer makes of more does not stay in a core's cache
_NEEDED = {
    "own": "keys, values and queries",
    "repeats": "tokens, of which blocks are repeated",
    "new period": "repeated blocks",
}


class HeldOut:
    """Sequences of the test split, which training never sees, and repeated blocks where the model can take them.

    Args:
        longest: how many positions the model can take.
        sequences: how many of the task's own; of repeated blocks that training never had there are a quarter as many.
        seed: seed of the examples.
    """

    def __init__(self, task: Task, *, longest: int, sequences: int = 256, seed: int = 0):
        self.task, self.sequences, self._longest, self._seed = task, sequences, longest, seed
        self.own = task.batch(0, split="test", size=sequences, seed=seed)
        blocks = max(2, sequences // _FEWER)
        self.repeats: Batch | None = None
        if "period" in task.features:
            self.repeats = self.own
        elif task.inputs == "tokens" and min(longest, _LONGEST) >= 9:
            repeats = Induction.fitting(min(longest, _LONGEST), task.needs()["vocab_size"])
            self.repeats = repeats.batch(0, split="test", size=blocks, seed=seed)
        self.new_period = _other_blocks(task, longest, blocks, seed)
        self._edges: dict[tuple[str, ...], EdgeSets | None] = {}
        self._pieces: dict[tuple[str, ...], list[tuple[Batch, EdgeSets | None]]] = {}

    def fewer(self, sequences: int) -> "HeldOut":
        """Such sequences, but not so many."""
        return HeldOut(self.task, longest=self._longest, sequences=sequences, seed=self._seed)

    def batch(self, on: Sequences) -> Batch | None:
        """The sequences of a kind; None if the task or the model has none."""
        return {"own": self.own, "repeats": self.repeats, "new period": self.new_period}[on]

    def edges(self, names: Sequence[str], on: Sequences) -> EdgeSets | None:
        """The edges of those of the named scores that are measured on sequences of a kind; None if there are none.

        Args:
            names: of scores, or of their edges some positions later, as in "recall+1".
        """
        if (on, *names) not in self._edges:
            self._edges[on, *names] = self._edge_sets(names, self.batch(on), on)
        return self._edges[on, *names]

    def pieces(self, names: Sequence[str], on: Sequences) -> list[tuple[Batch, EdgeSets | None]]:
        """The sequences of a kind in pieces for a CPU, of about _TOKENS tokens, each with its part of `edges`."""
        if (on, *names) not in self._pieces:
            batch, edges, found = self.batch(on), self.edges(names, on), []
            size = 1 if batch is None else max(1, _TOKENS // batch.length)
            for first in range(0, 0 if batch is None else len(batch), size):
                assert batch is not None
                here = None if edges is None else EdgeSets(tuple(s.part(first, first + size) for s in edges.sets))
                found.append((batch.part(slice(first, first + size)), here))
            self._pieces[on, *names] = found
        return self._pieces[on, *names]

    def _edge_sets(self, names: Sequence[str], batch: Batch | None, on: Sequences) -> EdgeSets | None:
        found = []
        for name in names:
            score = SCORES[name.partition("+")[0]]
            if batch is None or score.edges is None or score.on != on or not score.possible_on(batch.layout):
                continue
            edges = named_edges(name, batch.layout) if "+" in name else score.edges(batch.layout)
            found += [replace(edges, name=name)] if len(edges.src) else []
        return EdgeSets(tuple(found)) if found else None


def with_later(names: Sequence[str]) -> tuple[str, ...]:
    """The names of scores and, of those that are steps of a circuit, also of their edges after the value."""
    return (*names, *(f"{name}+{offset}" for name in names if name in STEPS for offset in LATER))


def _other_blocks(task: Task, longest: int, sequences: int, seed: int) -> Batch | None:
    """Blocks one token longer than any that the task repeats or, where they do not fit twice, one token shorter."""
    vocab, most = task.needs().get("vocab_size", 0), min(longest, _LONGEST) - 1
    for block in (task.periods.stop, task.periods.start - 1) if task.periods else ():
        if 2 <= block < vocab and most // block >= 2:
            other = Induction(block=block, repeats=most // block, varied=False, vocab_size=vocab)
            return other.batch(0, split="test", size=sequences, seed=seed)
    return None


def check_scores(names: str | Sequence[str] | None, task: Task) -> tuple[str, ...]:
    """The named scores, by default all that the task can have; a score that it cannot have is refused."""
    names = [names] if isinstance(names, str) else names
    possible = _possible_scores(task)
    for name in names or ():
        if SCORES[name].name not in possible:
            raise UserError(
                f"{name} needs a task with {_NEEDED[SCORES[name].on]}, and {task.name} has none; valid: "
                + ", ".join(possible)
            )
    return tuple(names or possible)


def scores_left_out(task: Task) -> list[str]:
    """Which scores a task cannot have, and why, in sentences. Those of a new period belong to repeated blocks alone."""
    possible, missing = _possible_scores(task), dict[str, list[str]]()
    for name, score in SCORES.items():
        if name not in possible and score.on != "new period":
            missing.setdefault(_NEEDED[score.on], []).append(name)
    return [f"{', '.join(names)} are left out: they need a task with {what}" for what, names in missing.items()]


def _possible_scores(task: Task) -> tuple[str, ...]:
    layout = task.batch(0, split="test", size=1).layout
    repeats = task.inputs == "tokens"
    return tuple(
        name for name, score in SCORES.items() if (repeats and score.on == "repeats") or score.possible_on(layout)
    )
