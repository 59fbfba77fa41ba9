"""What a probe decodes: labels by position, read from a batch and its layout, and sets of candidates.

A label belongs to its anchor, the position it is about; the activation may be read elsewhere. The decorator `target`
registers the function that gives the labels; an installed package does so through the entry-point group
`circuitscope.targets`.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import numpy as np
import torch

from circuitscope.analysis.probes.estimators import Ints
from circuitscope.arguments import explained
from circuitscope.errors import UserError, unknown
from circuitscope.registry import Registry
from circuitscope.tasks import Batch, Role

if TYPE_CHECKING:
    from circuitscope.analysis.probes.definition import Definition

CANDIDATES = ("context", "sequence", "vocabulary")
Kind = Literal["token", "class", "vector"]
Labels = TypeVar("Labels", bound=Callable[[Batch], Any])
_MODELS: dict[Kind, tuple[str, ...]] = {
    "token": ("embedding", "candidates", "logistic"),
    "class": ("logistic",),
    "vector": ("ridge",),
}


@dataclass(frozen=True)
class Target:
    """What a probe decodes; `target` says what the fields mean."""

    name: str
    about: str
    kind: Kind
    labels: Callable[[Batch], Any]
    context: Callable[[Batch], Any] | None = None

    @property
    def models(self) -> tuple[str, ...]:
        """The models that decode it."""
        return _MODELS[self.kind]

    def labels_of(self, batch: Batch) -> Any:
        """Its labels of a batch, as an array of the right shape."""
        labels, (rows, length) = np.asarray(self.labels(batch)), batch.layout.roles.shape
        expected = (rows, *labels.shape[1:2]) if self.kind == "vector" else (rows, length)
        if labels.ndim != 2 or labels.shape != expected:
            shape = f"[{rows}, d]" if self.kind == "vector" else f"[{rows}, {length}]"
            raise UserError(f"the target {self.name} gives labels {list(labels.shape)}; expected {shape}")
        return labels


TARGETS: Registry[Target] = Registry("target", "targets")


def target(
    name: str, about: str, kind: Kind, *, context: Callable[[Batch], Any] | None = None
) -> Callable[[Labels], Labels]:
    """Registers a function batch → labels as a target of probes.

    Args:
        about: what the label is, in a few words.
        kind: "token" or "class": the function gives [batch, pos] whole numbers, −1 where there is no label; or
            "vector": it gives [batch, d], one vector per sequence.
        context: gives the tokens [batch, candidate] among which the label is, for `candidates: context`.
    """

    def register(labels: Labels) -> Labels:
        TARGETS.add(name, Target(name, about, kind, labels, context), labels.__module__)
        return labels

    return register


@dataclass(frozen=True)
class ProbeExamples:
    """Labels with the positions from which they are read, ordered by sequence.

    `pos` is where the activation is read, `anchor` the position that the label is about, `identity` the token at
    the anchor.
    """

    sequence: Ints
    pos: Ints
    anchor: Ints
    label: Any
    identity: Ints
    candidates: Ints | None = None

    def __len__(self) -> int:
        return len(self.sequence)

    def at_most(self, per_sequence: int, seed: int = 0) -> "ProbeExamples":
        """At most `per_sequence` examples of each sequence, chosen at random where there are more."""
        rank = np.lexsort((np.random.default_rng(seed).random(len(self)), self.sequence))
        first = np.searchsorted(self.sequence[rank], self.sequence[rank])
        kept = np.sort(rank[np.arange(len(rank)) - first < per_sequence])
        return self.where(kept)

    def where(self, kept: Any) -> "ProbeExamples":
        """Some of the examples."""
        return ProbeExamples(
            self.sequence[kept],
            self.pos[kept],
            self.anchor[kept],
            self.label[kept],
            self.identity[kept],
            None if self.candidates is None else self.candidates[kept],
        )


def _keys(batch: Batch) -> Ints:
    if batch.layout.key_pos is None:
        raise UserError("bound-key needs keys that stand apart from their values, as in mqar; this layout has none")
    return np.take_along_axis(_own(batch), batch.layout.key_pos.numpy(), axis=1)


def _values(batch: Batch) -> Ints:
    return batch.values().cpu().numpy()


@target("own-token", "the token at the position", "token")
def _own(batch: Batch) -> Ints:
    return batch.tokens.cpu().numpy()


def _identity(batch: Batch) -> Ints:
    """What stands at each position, as a number [batch, pos]: the token; vectors of different sequences differ."""
    if not batch.inputs.is_floating_point():
        return _own(batch)
    return np.broadcast_to(np.arange(len(batch))[:, None], batch.layout.roles.shape)


@target("previous-token", "the token one position before", "token")
def _previous(batch: Batch) -> Ints:
    tokens = _own(batch)
    return np.concatenate([np.full((len(tokens), 1), -1), tokens[:, :-1]], axis=1)


@target("bound-key", "at a context value, the key it is bound to", "token", context=_keys)
def _bound_key(batch: Batch) -> Ints:
    value_pos = _pairs(batch, "bound-key").numpy()
    labels = np.full(batch.layout.roles.shape, -1)
    np.put_along_axis(labels, value_pos, _keys(batch), axis=1)
    return labels


@target("bound-value", "at a query, the value bound to its key", "token", context=_values)
def _bound_value(batch: Batch) -> Ints:
    _pairs(batch, "bound-value")
    layout = batch.layout
    assert layout.query_pos is not None
    labels = np.full(batch.layout.roles.shape, -1)
    assert layout.query_pair is not None
    answers = np.take_along_axis(_values(batch), layout.query_pair.numpy(), axis=1)
    np.put_along_axis(labels, layout.query_pos.numpy(), answers, axis=1)
    return labels


@target("position", "the position itself", "class")
def _position(batch: Batch) -> Ints:
    roles = batch.layout.roles
    return np.broadcast_to(np.arange(roles.shape[1]), roles.shape)


@target("weight-vector", "the weight vector of the regression", "vector")
def _weight_vector(batch: Batch) -> Any:
    if batch.weights is None:
        raise UserError(
            "weight-vector needs a batch that carries the weight vector of its regression, `weights` [batch, d];"
            " this task has none: it is for tasks on vectors"
        )
    return batch.weights.cpu().numpy()


def _pairs(batch: Batch, name: str) -> torch.Tensor:
    if batch.layout.value_pos is None or batch.layout.query_pos is None:
        raise UserError(f"{name} needs a task with keys, values and queries, such as mqar; this layout has none")
    return batch.layout.value_pos


@explained
def examples_of(definition: "str | Definition", batch: Batch) -> dict[str, ProbeExamples]:
    """The examples that a probe, given by its definition or by its name, has in a batch, by role."""
    from circuitscope.analysis.probes.definition import Definition  # which imports this module

    definition = Definition.load(definition)
    wanted = TARGETS[definition.target]
    labels, roles = wanted.labels_of(batch), batch.layout.roles.numpy()
    there = np.ones(roles.shape, dtype=bool) if wanted.kind == "vector" else labels >= 0
    present = [r for r in Role if (roles == r).any()]
    possible = {r.name: r for r in present if (there & (roles == r)).any()}
    asked = tuple(possible) if definition.roles == "each" else definition.roles
    found = {}
    has_labels = f"{definition.target} has labels at: {', '.join(possible)}"
    for name in asked:
        if name not in {r.name for r in present}:
            raise (
                unknown("role", name, possible)
                if len(possible) > 1
                else UserError(f"no position of this task has the role '{name}'; {has_labels}")
            )
        if name not in possible:
            raise UserError(f"{definition.target} has no label at role '{name}'; {has_labels}")
        sequence, anchor = np.nonzero(there & (roles == possible[name]))
        pos = _read_at(definition, batch, sequence, anchor)
        inside = (pos >= 0) & (pos < roles.shape[1])
        if not inside.any():
            raise UserError(f"at: {definition.at} is outside the sequence at every {name}")
        found[name] = ProbeExamples(
            sequence=sequence[inside],
            pos=pos[inside],
            anchor=anchor[inside],
            label=labels[sequence[inside]] if wanted.kind == "vector" else labels[sequence, anchor][inside],
            identity=_identity(batch)[sequence, anchor][inside],
        )
    sets = _candidates(definition, wanted, batch)
    if sets is None:
        return found
    return {name: replace(e, candidates=sets[e.sequence]) for name, e in found.items()}


def _read_at(definition: "Definition", batch: Batch, sequence: Ints, anchor: Ints) -> Ints:
    if definition.offset is not None:
        return anchor + definition.offset
    last: Ints = _pairs(batch, "at: context-end").numpy().max(axis=1)
    return last[sequence]


def _candidates(definition: "Definition", wanted: Target, batch: Batch) -> Ints | None:
    """Tokens to choose from [batch, candidate], −1 where empty; None for the whole vocabulary, or for classes."""
    if definition.model not in ("embedding", "candidates"):
        return None
    kind = definition.candidates or ("context" if wanted.context else "sequence")
    if kind == "context":
        if wanted.context is None:
            raise UserError(
                f"{definition.target} has no candidates in the context; expected candidates: sequence or vocabulary"
            )
        return np.asarray(wanted.context(batch))
    if kind == "sequence":
        tokens = np.sort(_own(batch), axis=1)
        repeated = np.concatenate([np.zeros((len(tokens), 1), dtype=bool), tokens[:, 1:] == tokens[:, :-1]], axis=1)
        return np.where(repeated, -1, tokens)
    if definition.model == "candidates":
        raise UserError("the model 'candidates' needs a set: candidates: context or sequence")
    return None
