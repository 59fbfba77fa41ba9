"""What a probe decodes: labels by position, read from a batch and its layout, and sets of candidates.

A label stands at its anchor, the position it speaks of; the activation may be read elsewhere.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch

from circuitscope.analysis.probes.estimators import Ints
from circuitscope.errors import UserError, unknown
from circuitscope.tasks import Batch, Role

if TYPE_CHECKING:
    from circuitscope.analysis.probes.definition import Definition

CANDIDATES = ("context", "sequence", "vocabulary")


@dataclass(frozen=True)
class Target:
    """Labels of a batch: `labels(batch)` is [batch, pos], −1 where there is none; of a vector [batch, d]."""

    about: str
    kind: Literal["token", "class", "vector"]
    labels: Callable[[Batch], Any]
    models: tuple[str, ...]
    context: Callable[[Batch], Ints] | None = None  # candidates of a sequence [batch, candidate]


@dataclass(frozen=True)
class Examples:
    """Labels with the places they are read from; ordered by sequence.

    `pos` is where the activation is read, `anchor` the position that the label speaks of, `identity` the
    token there.
    """

    sequence: Ints
    pos: Ints
    anchor: Ints
    label: Any
    identity: Ints
    candidates: Ints | None = None

    def __len__(self) -> int:
        return len(self.sequence)

    def at_most(self, per_sequence: int, seed: int = 0) -> "Examples":
        """A random choice where a sequence has more."""
        rank = np.lexsort((np.random.default_rng(seed).random(len(self)), self.sequence))
        first = np.searchsorted(self.sequence[rank], self.sequence[rank])
        kept = np.sort(rank[np.arange(len(rank)) - first < per_sequence])
        return self.where(kept)

    def where(self, kept: Any) -> "Examples":
        """Some of the examples."""
        return Examples(
            self.sequence[kept],
            self.pos[kept],
            self.anchor[kept],
            self.label[kept],
            self.identity[kept],
            None if self.candidates is None else self.candidates[kept],
        )


def _own(batch: Batch) -> Ints:
    return batch.tokens.cpu().numpy()


def _previous(batch: Batch) -> Ints:
    tokens = _own(batch)
    return np.concatenate([np.full((len(tokens), 1), -1), tokens[:, :-1]], axis=1)


def _position(batch: Batch) -> Ints:
    tokens = _own(batch)
    return np.broadcast_to(np.arange(tokens.shape[1]), tokens.shape)


def _keys(batch: Batch) -> Ints:
    assert batch.layout.key_pos is not None
    return np.take_along_axis(_own(batch), batch.layout.key_pos.numpy(), axis=1)


def _values(batch: Batch) -> Ints:
    assert batch.layout.value_pos is not None
    return np.take_along_axis(_own(batch), batch.layout.value_pos.numpy(), axis=1)


def _bound_key(batch: Batch) -> Ints:
    value_pos = _pairs(batch, "bound-key").numpy()
    labels = np.full(batch.tokens.shape, -1)
    np.put_along_axis(labels, value_pos, _keys(batch), axis=1)
    return labels


def _bound_value(batch: Batch) -> Ints:
    _pairs(batch, "bound-value")
    layout = batch.layout
    assert layout.query_pos is not None
    labels = np.full(batch.tokens.shape, -1)
    answers = np.take_along_axis(_own(batch), layout.answer_pos().numpy(), axis=1)
    np.put_along_axis(labels, layout.query_pos.numpy(), answers, axis=1)
    return labels


def _pairs(batch: Batch, name: str) -> torch.Tensor:
    if batch.layout.value_pos is None or batch.layout.query_pos is None:
        raise UserError(f"{name} needs a task with keys, values and queries, such as mqar; this layout has none")
    return batch.layout.value_pos


def _weight_vector(batch: Batch) -> Any:
    weights = getattr(batch, "weights", None)
    if weights is None:
        raise UserError(
            "weight-vector needs a batch that carries the weight vector of its regression, `weights` [batch, d];"
            " this task has none: it is for tasks on vectors"
        )
    return weights.cpu().numpy()


_TOKEN = ("embedding", "candidates", "logistic")
TARGETS: dict[str, Target] = {
    "own-token": Target("the token at the position", "token", _own, _TOKEN),
    "previous-token": Target("the token one position before", "token", _previous, _TOKEN),
    "bound-key": Target("at a context value, the key it is bound to", "token", _bound_key, _TOKEN, _keys),
    "bound-value": Target("at a query, the value bound to its key", "token", _bound_value, _TOKEN, _values),
    "position": Target("the position itself", "class", _position, ("logistic",)),
    "weight-vector": Target("the weight vector of the regression", "vector", _weight_vector, ("ridge",)),
}


def examples_of(definition: "Definition", batch: Batch) -> dict[str, Examples]:
    """The examples of a probe on a batch, by role."""
    target = TARGETS[definition.target]
    labels, roles = target.labels(batch), batch.layout.roles.numpy()
    there = np.ones(roles.shape, dtype=bool) if target.kind == "vector" else labels >= 0
    present = [r for r in Role if (roles == r).any()]
    possible = {r.name: r for r in present if (there & (roles == r)).any()}
    asked = tuple(possible) if definition.roles == "each" else definition.roles
    found = {}
    for name in asked:
        if name not in {r.name for r in present}:
            raise (
                unknown("role", name, possible)
                if len(possible) > 1
                else UserError(
                    f"no position of this task has the role '{name}'; {definition.target} is at: {', '.join(possible)}"
                )
            )
        if name not in possible:
            raise UserError(f"{definition.target} has no label at role '{name}'; it is at: {', '.join(possible)}")
        sequence, anchor = np.nonzero(there & (roles == possible[name]))
        pos = _read_at(definition, batch, sequence, anchor)
        inside = pos >= 0
        found[name] = Examples(
            sequence=sequence[inside],
            pos=pos[inside],
            anchor=anchor[inside],
            label=labels[sequence[inside]] if target.kind == "vector" else labels[sequence, anchor][inside],
            identity=_own(batch)[sequence, anchor][inside],
        )
    sets = _candidates(definition, target, batch)
    if sets is None:
        return found
    return {name: replace(e, candidates=sets[e.sequence]) for name, e in found.items()}


def _read_at(definition: "Definition", batch: Batch, sequence: Ints, anchor: Ints) -> Ints:
    if definition.at == "own":
        return anchor
    if definition.at == "before":
        return anchor - 1
    last: Ints = _pairs(batch, "at: context-end").numpy().max(axis=1)
    return last[sequence]


def _candidates(definition: "Definition", target: Target, batch: Batch) -> Ints | None:
    """Tokens to choose from [batch, candidate], −1 where empty; None: the vocabulary, or classes."""
    if definition.model not in ("embedding", "candidates"):
        return None
    kind = definition.candidates or ("context" if target.context else "sequence")
    if kind == "context":
        if target.context is None:
            raise UserError(
                f"{definition.target} has no candidates in the context; expected candidates: sequence or vocabulary"
            )
        return target.context(batch)
    if kind == "sequence":
        tokens = np.sort(_own(batch), axis=1)
        repeated = np.concatenate([np.zeros((len(tokens), 1), dtype=bool), tokens[:, 1:] == tokens[:, :-1]], axis=1)
        return np.where(repeated, -1, tokens)
    if definition.model == "candidates":
        raise UserError("the model 'candidates' needs a set: candidates: context or sequence")
    return None
