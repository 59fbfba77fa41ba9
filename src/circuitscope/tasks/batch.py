"""What a task returns: inputs (tokens or vectors), labels, and the layout, which gives the role of every position."""

from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from jaxtyping import Bool, Float, Int, Int8
from torch import Tensor

from circuitscope.errors import UserError, described
from circuitscope.tasks.judging import TOKENS, Judge
from circuitscope.tasks.roles import Role

NO_LABEL = -100

Inputs = Int[Tensor, "batch pos"] | Float[Tensor, "batch pos channel"]  # tokens, or vectors
Labels = Int[Tensor, "batch pos"] | Float[Tensor, "batch pos out"]
Rows = slice | Int[Tensor, " row"]


@dataclass(frozen=True)
class Layout:
    """The role of every position, and which positions belong together.

    In pair p of an example, the key at `key_pos[:, p]` is bound to the value at `value_pos[:, p]`. Query q
    stands at `query_pos[:, q]` and asks for pair `query_pair[:, q]`. These are None for tasks without pairs. A task
    may have values that are asked for without keys of their own, so that `key_pos` alone is None. Where the token
    that answers is not the one at `value_pos`, `values` holds it.
    A context of several `passes` names all its pairs in each pass: pair p again as p + pairs / passes, and so on.
    `period` is the block length of repeated sequences, one for all or one for each: tokens at i and i + period are
    equal from position `first_block` on.
    """

    roles: Int8[Tensor, "batch pos"]
    key_pos: Int[Tensor, "batch pair"] | None = None
    value_pos: Int[Tensor, "batch pair"] | None = None
    query_pos: Int[Tensor, "batch query"] | None = None
    query_pair: Int[Tensor, "batch query"] | None = None
    period: int | Int[Tensor, " batch"] | None = None
    first_block: int | Int[Tensor, " batch"] = 1
    passes: int = 1
    values: Int[Tensor, "batch pair"] | None = None

    @staticmethod
    def of_pairs(length: int, *, key_pos: Any, value_pos: Any, query_pos: Any, query_pair: Any) -> "Layout":
        """The layout of sequences with key-value pairs, from tensors, arrays or lists of positions.

        Args:
            length: the number of positions in a sequence; those that are named nowhere are filler.
            key_pos, value_pos: [batch, pair], where the keys and the values stand.
            query_pos: [batch, query], where the queries stand.
            query_pair: [batch, query], which pair each query asks for, counted from 0.
        """
        keys, values, queries, asked = (torch.as_tensor(x).long() for x in (key_pos, value_pos, query_pos, query_pair))
        for name, x, like in (("value_pos", values, keys), ("query_pair", asked, queries)):
            if x.ndim != 2 or x.shape != like.shape or len(x) != len(keys):
                raise UserError(
                    "expected key_pos and value_pos [batch, pair], and query_pos and query_pair [batch, query],"
                    f" got {name} of shape {list(x.shape)}"
                )
        roles = torch.full((len(keys), length), int(Role.FILLER), dtype=torch.int8)
        for role, pos in ((Role.KEY, keys), (Role.VALUE, values), (Role.QUERY, queries)):
            if ((pos < 0) | (pos >= length)).any():
                raise UserError(f"the position of a {role.name} is outside 0 to {length - 1}")
            roles.scatter_(1, pos, int(role))
        if ((asked < 0) | (asked >= keys.shape[1])).any():
            raise UserError(f"query_pair names a pair outside 0 to {keys.shape[1] - 1}")
        return Layout(roles, keys, values, queries, asked)

    def answer_pos(self) -> Int[Tensor, "batch query"]:
        """The position of the context value that each query asks for."""
        if self.value_pos is None or self.query_pair is None:
            raise ValueError("this layout has no key-value pairs")
        return self.value_pos.gather(1, self.query_pair)

    def answering(self) -> Int[Tensor, "batch pass_and_query"]:
        """The pairs that answer the queries: what each asks for, once in every pass; all queries, pass by pass."""
        if self.value_pos is None or self.query_pair is None:
            raise ValueError("this layout has no key-value pairs")
        distinct = self.value_pos.shape[1] // self.passes
        return torch.cat([self.query_pair % distinct + distinct * i for i in range(self.passes)], dim=1)

    def part(self, rows: Rows) -> "Layout":
        """The layout of some of the examples."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        parts: dict[str, Any] = {name: value[rows] for name, value in values.items() if isinstance(value, Tensor)}
        return replace(self, **parts)

    def __repr__(self) -> str:
        n, length = self.roles.shape
        parts = [f"{n} sequences of {length} positions"]
        for positions, one, several in ((self.key_pos, "pair", "pairs"), (self.query_pos, "query", "queries")):
            if positions is not None:
                count = positions.shape[1]
                parts.append(f"{count} {one if count == 1 else several}")
        if self.period is not None:
            low, high = torch.as_tensor(self.period).aminmax()
            parts.append(f"period {low}" if low == high else f"periods {low} to {high}")
        roles = ", ".join(Role(number).name for number in self.roles.unique().tolist())
        return f"Layout({', '.join(parts)}; roles: {roles})"


Labelled = tuple[Int[Tensor, " label"], Int[Tensor, " label"] | Float[Tensor, "label out"]]


@dataclass(frozen=True)
class Batch:
    """Inputs (tokens or vectors), their labels and their layout.

    Labels are tokens with −100 where there is none, or vectors with nan where there is none. `judge` says how wrong an
    answer is. `weights` holds the weight vector of each sequence where the task is a linear regression.

    A batch that was moved to a device keeps what `labelled` gives, because to look for it there would make the CPU wait
    for the device.
    """

    inputs: Inputs
    labels: Labels
    layout: Layout
    judge: Judge = TOKENS
    weights: Float[Tensor, "batch coordinate"] | None = None
    _known: Labelled | None = field(default=None, init=False, repr=False, compare=False)

    def labelled(self) -> Labelled:
        """Flat indices (row · length + pos) of labelled positions, and the labels there."""
        if self._known is not None:
            return self._known
        where = self.has_label().flatten().nonzero().squeeze(1)
        return where, self.labels.flatten(0, 1)[where]

    @property
    def tokens(self) -> Int[Tensor, "batch pos"]:
        """The inputs of a batch of tokens."""
        if self.inputs.is_floating_point():
            raise UserError("this batch has vectors and no tokens; read batch.inputs")
        return self.inputs

    @property
    def length(self) -> int:
        """The number of positions."""
        return self.inputs.shape[1]

    def has_label(self) -> Bool[Tensor, "batch pos"]:
        """Where the labels stand."""
        return ~self.labels.isnan().any(dim=2) if self.labels.is_floating_point() else self.labels != NO_LABEL

    def losses(self, answers: Float[Tensor, "label out"]) -> Float[Tensor, " label"]:
        """The loss at each label, from what a model gives there."""
        return self.judge.losses(self, answers)

    def right(self, answers: Float[Tensor, "label out"]) -> Float[Tensor, " label"]:
        """How right each answer is, at most 1; the mean is the accuracy, or what `judge.measures` names."""
        return self.judge.right(self, answers)

    @property
    def label_count(self) -> int:
        """How many labels there are."""
        return int(self.has_label().sum()) if self._known is None else len(self._known[0])

    def values(self) -> Int[Tensor, "batch pair"] | Float[Tensor, "batch pair channel"]:
        """The tokens or vectors that answer with the values of the context."""
        if self.layout.value_pos is None:
            raise ValueError("this layout has no key-value pairs")
        if self.layout.values is not None:
            return self.layout.values
        rows = torch.arange(len(self), device=self.inputs.device)[:, None]
        return self.inputs[rows, self.layout.value_pos.to(rows.device)]

    def names(self, row: int) -> list[int] | None:
        """What a figure writes beside the positions of a sequence: its tokens; vectors have no such names."""
        found: list[int] | None = None if self.inputs.is_floating_point() else self.inputs[row].tolist()
        return found

    def part(self, rows: Rows) -> "Batch":
        """Some of the examples, given as a slice or as a tensor of row numbers, with their part of the layout."""
        weights = None if self.weights is None else self.weights[rows]
        return Batch(self.inputs[rows], self.labels[rows], self.layout.part(rows), self.judge, weights)

    def to(self, device: torch.device | str) -> "Batch":
        """The batch with its inputs and labels on a device; its layout stays on the CPU, where analyses read it."""
        device = torch.device(device)
        moved = replace(self, inputs=_moved(self.inputs, device), labels=_moved(self.labels, device))
        where, target = self.labelled()
        object.__setattr__(moved, "_known", (_moved(where, device), _moved(target, device)))
        return moved

    def __len__(self) -> int:
        return len(self.inputs)

    def __repr__(self) -> str:
        what = "vectors" if self.inputs.is_floating_point() else "tokens"
        return f"Batch({what} {list(self.inputs.shape)}, {self.label_count} labels, {self.layout!r})"


def _moved(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor on a device. To a CUDA device it goes through pinned memory, and nobody waits for its arrival."""
    if device.type == "cuda" and tensor.device.type == "cpu":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def check_batch(batch: object) -> None:
    """Refuses what is no batch, such as its tokens alone."""
    if not isinstance(batch, Batch):
        raise UserError(
            f"expected a Batch with inputs, labels and layout, such as task.batch(0) gives, got {described(batch)}"
        )
