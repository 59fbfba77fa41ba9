"""What a training writes to its run: lock, status, checkpoints, metrics, trackers. Of several processes, one writes."""

from typing import Any

from filelock import BaseFileLock, SoftFileLock
from torch import nn

from circuitscope.config import RunConfig
from circuitscope.runs.checkpoints import Checkpoints, CheckpointWriter, Tensors
from circuitscope.runs.metrics import MetricsLog
from circuitscope.runs.run import Run, RunState
from circuitscope.training.trackers import Trackers


class Record:
    """The record of a run, kept by this process."""

    def __init__(self, run: Run):
        self.run = run

    def lock(self) -> BaseFileLock:
        """Acquires the run's lock; whoever gets it releases it."""
        return self.run.lock()

    def status(self, state: RunState, step: int, message: str = "", looks: str = "") -> None:
        self.run.write_status(state, step, message, looks)

    def writer(self, keep_resume: int) -> CheckpointWriter:
        return CheckpointWriter(self.run.path, lambda: self.run.digest, keep_resume)

    def log(self, resumed_from: int | None) -> MetricsLog:
        return MetricsLog(self.run.path, resumed_from)

    def trackers(self, config: RunConfig) -> Trackers:
        return Trackers(config, self.run)


class Unrecorded(Record):
    """The record of a run that another process keeps: what this one would write is dropped."""

    def lock(self) -> BaseFileLock:
        return SoftFileLock(self.run.path / ".lock")  # never acquired, and free to be released

    def status(self, state: RunState, step: int, message: str = "", looks: str = "") -> None:
        pass

    def writer(self, keep_resume: int) -> CheckpointWriter:
        return _NoWriter(self.run)

    def log(self, resumed_from: int | None) -> MetricsLog:
        return _NoLog()

    def trackers(self, config: RunConfig) -> Trackers:
        off = config.train.model_copy(update={"tensorboard": False, "wandb": None})
        return Trackers(config.model_copy(update={"train": off}), self.run)


class _NoWriter(CheckpointWriter):
    def __init__(self, run: Run):
        Checkpoints.__init__(self, run.path, lambda: run.digest)
        self.written = 0

    def __enter__(self) -> "_NoWriter":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        pass

    def save(self, step: int, model: nn.Module) -> None:
        pass

    def save_resume_point(self, step: int, model: nn.Module, moments: Tensors) -> None:
        pass

    def flush(self) -> None:
        pass


class _NoLog(MetricsLog):
    def __init__(self) -> None:
        pass

    def write(self, row: dict[str, Any]) -> None:
        pass

    def close(self) -> None:
        pass
