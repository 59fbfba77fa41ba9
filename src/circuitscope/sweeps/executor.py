"""What an executor is: it gets jobs, runs each somewhere, and gives back their rows as they end.

All executors run the same function, `run_job`, so their rows and weights are the same.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import yaml

from circuitscope import __version__
from circuitscope.config import RunConfig
from circuitscope.errors import Stopped
from circuitscope.progress import Progress
from circuitscope.sweeps.grid import Grid, Trial
from circuitscope.sweeps.results import Row
from circuitscope.sweeps.trial import run_trial


@dataclass(frozen=True)
class Job:
    """A trial as plain data that can be sent to another process or machine: JSON can hold all of it."""

    digest: str
    config: str
    values: dict[str, Any]
    folder: str
    measure: tuple[str, ...] = ()
    fractions: tuple[float, ...] = ()

    @staticmethod
    def of(trial: Trial, grid: Grid, folder: Path) -> "Job":
        """The job that brings a trial to its end in FOLDER/DIGEST."""
        where = str(folder.resolve())
        return Job(trial.digest, trial.config.dump(), trial.values, where, grid.measure, grid.fractions)

    def plain(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Moved:
    """A trial has made `step` of its steps."""

    digest: str
    step: int
    steps: int
    loss: float | None = None
    metric: str = ""


@runtime_checkable
class Watch(Protocol):
    """Somebody who looks on."""

    def started(self, digest: str) -> None: ...
    def moved(self, news: Moved) -> None: ...


@runtime_checkable
class Executor(Protocol):
    """Runs jobs and yields their rows in the order in which they end.

    A job that fails gives a row with the state "failed" and a message, and the rest goes on. An executor that is closed
    early, or interrupted, stops what is running so that it can be continued, and leaves no process behind.
    """

    def __call__(self, jobs: Sequence[Job], watch: Watch) -> Iterator[Row]: ...


def run_job(job: Job, progress: Progress | None = None) -> Row:
    """Brings one job to its end, whatever that is; only a signal that stops the training is passed on."""
    try:
        trial = Trial(RunConfig.parse(yaml.safe_load(job.config)), dict(job.values))
        return run_trial(trial, Path(job.folder), measure=job.measure, fractions=job.fractions, progress=progress)
    except Stopped:
        raise
    except Exception as error:  # the rest of the sweep goes on, and the row says what happened
        return failed(job, f"{type(error).__name__}: {' '.join(str(error).split())}")


def failed(job: Job, message: str) -> Row:
    """The row of a job that came to no end; it is tried again the next time."""
    return {"digest": job.digest, **job.values, "state": "failed", "message": message, "version": __version__}


class Telling:
    """Passes on the progress of a training as `Moved`, at most a few times per second."""

    def __init__(self, job: Job, tell: Callable[[Moved], None], seconds: float = 0.5):
        self.job, self.tell, self.seconds = job, tell, seconds
        self.steps, self.metric, self.last = 0, "", 0.0

    def __enter__(self) -> "Telling":
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def start(self, what: str, total: int, done: int | None = None) -> None:
        if done is not None:  # a training; an analysis does not say how much was done before
            self.steps = total
            self.tell(Moved(self.job.digest, done, total))

    def advance(self, step: int, loss: float | None = None, saved: int | None = None) -> None:
        import time

        if loss is not None and time.monotonic() - self.last >= self.seconds:
            self.last = time.monotonic()
            self.tell(Moved(self.job.digest, step, self.steps, loss, self.metric))

    def evaluated(self, step: int, loss: float, metric: str, saved: int) -> None:
        self.metric = " ".join(metric.split())

    def say(self, line: str) -> None:
        pass
