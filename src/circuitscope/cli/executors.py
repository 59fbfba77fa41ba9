"""Where the jobs of `sweep` and `analyze` run: which executor, and which of its options fit it."""

from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING

from circuitscope.errors import UserError

if TYPE_CHECKING:
    from circuitscope.sweeps.executor import Executor


class Where(StrEnum):
    """The executors that give rows."""

    local = "local"
    ray = "ray"


class WhereTrials(StrEnum):
    """The executors of a sweep."""

    local = "local"
    ray = "ray"
    slurm = "slurm"


_ONLY: Mapping[str, tuple[str, ...]] = {
    "--address": ("ray",),
    "--cpus": ("ray", "slurm"),
    "--gpus": ("ray", "slurm"),
    "--minutes": ("local", "ray"),
    "--time": ("slurm",),
    "--slurm": ("slurm",),
}


def check_fits(executor: StrEnum | None, given: Mapping[str, object]) -> None:
    """Refuses options that the executor does not have; those that are None, or empty, were not given."""
    name = executor.value if executor else "local"
    for option, value in given.items():
        if value not in (None, []) and name not in _ONLY[option]:
            raise UserError(f"{option} needs --executor {' or '.join(_ONLY[option])}, not {name}")


def rows_from(
    executor: StrEnum | None,
    *,
    jobs: int | None = None,
    minutes: float | None = None,
    pids: Path | None = None,
    address: str | None = None,
    cpus: float | None = None,
    gpus: float | None = None,
) -> "Executor":
    """The executor of that name."""
    if executor == Where.ray:
        from circuitscope.sweeps.ray import RayExecutor

        return RayExecutor(address, jobs, minutes, 1.0 if cpus is None else cpus, gpus or 0.0)
    from circuitscope.sweeps.local import LocalExecutor

    return LocalExecutor(jobs, minutes, pids)
