"""Synthetic recall tasks, usable with no trainer: `task("mqar", pairs=4).batch(7)`."""

from typing import Any

from pydantic import ValidationError

from circuitscope.errors import unknown
from circuitscope.explain import explain
from circuitscope.tasks.batch import NO_LABEL, Batch, Layout, Role
from circuitscope.tasks.induction import Induction
from circuitscope.tasks.mqar import AR, MQAR
from circuitscope.tasks.task import Split, Task

__all__ = ["AR", "MQAR", "NO_LABEL", "Batch", "Induction", "Layout", "Role", "Split", "Task", "names", "task"]

_TASKS: dict[str, type[Task]] = {"ar": AR, "induction": Induction, "mqar": MQAR}


def names() -> list[str]:
    """Names that `task` takes."""
    return sorted(_TASKS)


def task_class(name: object) -> type[Task]:
    """The class behind a name."""
    if not isinstance(name, str) or name not in _TASKS:
        raise unknown("task", name, _TASKS)
    return _TASKS[name]


def task(name: str = "mqar", /, **options: Any) -> Task:
    """A task by name with the given options; the rest at their defaults."""
    cls = task_class(name)
    try:
        return cls.model_validate({"name": name, **options})
    except ValidationError as error:
        raise explain(error, cls, at="task") from None
