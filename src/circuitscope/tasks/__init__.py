"""Synthetic tasks of recall and in-context learning; they also work without the trainer: `task("mqar").batch(7)`.

A new task is one class with `@register("its_name")` above it, here or in a package that names its module under the
entry-point group `circuitscope.tasks`.
"""

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from circuitscope.arguments import explained
from circuitscope.errors import UserError, shown
from circuitscope.explain import explain
from circuitscope.tasks.base import TASKS, Baseline, Metric, Split, Task, register
from circuitscope.tasks.batch import NO_LABEL, Batch, Layout, check_batch
from circuitscope.tasks.compound import CompoundRecall
from circuitscope.tasks.copy import Copy
from circuitscope.tasks.decision_tree import DecisionTree
from circuitscope.tasks.fuzzy import FuzzyRecall
from circuitscope.tasks.ginc import GINC
from circuitscope.tasks.induction import Induction
from circuitscope.tasks.linear_regression import LinearRegression, SparseLinear
from circuitscope.tasks.measure import Measure
from circuitscope.tasks.mqar import AR, MQAR
from circuitscope.tasks.outliers import ManyOutlier, OrthogonalOutlier
from circuitscope.tasks.recall import Recall, any_value
from circuitscope.tasks.regbench import RegBench
from circuitscope.tasks.roles import Role
from circuitscope.tasks.selective_copy import SelectiveCopy
from circuitscope.tasks.sparse_parity import SparseParity
from circuitscope.tasks.stacked import StackedMQAR
from circuitscope.tasks.token_task import TokenModel, TokenTask
from circuitscope.tasks.two_hop import TwoHop
from circuitscope.tasks.two_layer_network import ChainOfThought, TwoLayerNetwork
from circuitscope.tasks.vector_mqar import VectorMQAR
from circuitscope.tasks.vector_task import VectorModel, VectorTask

__all__ = [
    "AR",
    "GINC",
    "MQAR",
    "NO_LABEL",
    "TASKS",
    "Baseline",
    "Batch",
    "ChainOfThought",
    "CompoundRecall",
    "Copy",
    "DecisionTree",
    "FuzzyRecall",
    "Induction",
    "Layout",
    "LinearRegression",
    "ManyOutlier",
    "Measure",
    "Metric",
    "OrthogonalOutlier",
    "Recall",
    "RegBench",
    "Role",
    "SelectiveCopy",
    "SparseLinear",
    "SparseParity",
    "Split",
    "StackedMQAR",
    "Task",
    "TokenModel",
    "TokenTask",
    "TwoHop",
    "TwoLayerNetwork",
    "VectorMQAR",
    "VectorModel",
    "VectorTask",
    "any_value",
    "check_batch",
    "names",
    "register",
    "task",
]


def names() -> list[str]:
    """The names that `task` takes."""
    return sorted(TASKS)


@explained
def task(name: object = "mqar", /, **options: Any) -> Task:
    """A task by name with the given options; all others have their defaults.

    Instead of a name it takes a task, or a mapping with the fields of one: `task(run.config.task, pairs=8)` is the
    task of a run with other pairs.
    """
    if isinstance(name, Task) and not options:
        return name
    fields = name.describe() if isinstance(name, Task) else name
    if not isinstance(fields, str | Mapping):
        raise UserError(f"task: expected a name or a mapping, got {shown(fields)}; names: {', '.join(names())}")
    given = {"name": fields} if isinstance(fields, str) else {str(key): value for key, value in fields.items()}
    given = {"name": "mqar", **given, **options}
    cls = TASKS[given["name"]]
    try:
        return cls.model_validate(given)
    except ValidationError as error:
        raise explain(error, cls, at="task") from None
