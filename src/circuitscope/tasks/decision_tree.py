"""Decision trees, learned in context: y is the leaf that x reaches in a full binary tree of the sequence's own."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from pydantic import Field

from circuitscope.section import Unit
from circuitscope.tasks.base import register
from circuitscope.tasks.baselines import Rule, fitted
from circuitscope.tasks.in_context import Floats, InContext
from circuitscope.tasks.linear_regression import NEAREST
from circuitscope.tasks.streams import I64, below, normal, stream_key, words

_DEEPEST = 4  # of a tree that is printed


@register("decision_tree")
class DecisionTree(InContext):
    """In-context learning of a decision tree: at each node one coordinate of x is compared with 0, leaves are N(0, 1).

    x[c] > 0 goes to the right. Nodes are numbered from the root down, level by level: the children of i are 2i + 1
    (left) and 2i + 2.
    """

    small: ClassVar = {"dims": 3, "points": 6, "depth": 2}
    recipe: ClassVar = {
        "task.dims": 4,
        "task.points": 32,
        "task.depth": 2,
        "train.lr": 3e-3,
        "train.beta2": 0.95,
        "train.weight_decay": 0.0,
        "train.schedule": "cosine",
        "train.warmup_steps": 100,
        "train.steps": 2000,
    }

    name: Literal["decision_tree"] = "decision_tree"
    points: Annotated[int, Unit("points")] = Field(
        default=101, ge=2, le=2**22, description="points (x, y) of a sequence, which has two positions for each"
    )
    depth: Annotated[int, Unit("comparisons")] = Field(
        default=4, ge=1, le=16, description="comparisons on the way from the root to a leaf"
    )

    @property
    def zero_error(self) -> float:
        return 1.0

    @property
    def rules(self) -> Mapping[str, Rule]:
        return {"a tree fitted greedily": Rule(fitted(_tree), prompts=2), **NEAREST}

    def nodes(self, key: int, examples: I64) -> tuple[I64, Floats]:
        """The coordinate of each inner node [example, node], and the values of the leaves [example, leaf]."""
        inner = 2**self.depth - 1
        coordinates = below(words(stream_key(key, "nodes"), examples, inner), self.active)
        return coordinates, normal(words(stream_key(key, "leaves"), examples, inner + 1))

    def function(self, key: int, example: int) -> list[str]:
        coordinates, leaves = (part[0] for part in self.nodes(key, np.array([example])))

        def lines(node: int) -> list[str]:
            if node >= len(coordinates):
                return [f"y = {leaves[node - len(coordinates)]:.2f}"]
            right, left = lines(2 * node + 2), lines(2 * node + 1)
            asked = f"if x{coordinates[node] + 1} > 0: "
            return [
                asked + right[0],
                *_below(asked, right[1:]),
                f"{'else: ':>{len(asked)}}{left[0]}",
                *_below(asked, left[1:]),
            ]

        return lines(0) if self.depth <= _DEEPEST else []

    def outputs(self, key: int, examples: I64, x: Floats) -> Floats:
        coordinates, leaves = self.nodes(key, examples)
        node = np.zeros(x.shape[:2], dtype=np.int64)
        for _ in range(self.depth):
            compared = np.take_along_axis(coordinates, node, axis=1)
            value = np.take_along_axis(x, compared[:, :, None], axis=2)[:, :, 0]
            node = 2 * node + 1 + (value > 0)
        return np.take_along_axis(leaves, node - coordinates.shape[1], axis=1)


def _below(head: str, lines: list[str]) -> list[str]:
    """Lines that stand under what follows a head."""
    return [" " * len(head) + line for line in lines]


def _tree() -> Any:
    from sklearn.tree import DecisionTreeRegressor

    return DecisionTreeRegressor(random_state=0)
