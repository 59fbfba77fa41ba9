"""What an executor is: it gets jobs, runs each somewhere, and gives back their rows as they end.

A job trains a trial, or analyzes a run. All executors run the same function, `run_job`, so their rows, weights and
tables are the same.
"""

import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

import yaml

from circuitscope import __version__
from circuitscope.config import RunConfig
from circuitscope.devices import reading_on
from circuitscope.errors import Busy, Stopped
from circuitscope.progress import Progress
from circuitscope.runs.run import Run
from circuitscope.sweeps.grid import Grid, Trial
from circuitscope.sweeps.results import Row
from circuitscope.sweeps.trial import run_trial

TRIES = 3  # how often a job is started whose process or machine dies
PATIENCE = 30.0  # seconds that a running job has to save its work when it is stopped
ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")


@dataclass(frozen=True)
class Job:
    """A piece of work as plain data that can be sent to another process or machine: JSON can hold all of it.

    Args:
        digest: the digest of a trial, or the path of the run that is analyzed; no two jobs have the same.
        config: the config of a trial.
        values: the values of a trial on the axes, or the options of an analysis.
        folder: where the run is; it must be the same folder wherever the job runs.
        measure: what a trial measures of itself, or the analyses of a run.
    """

    digest: str
    config: str
    values: dict[str, Any]
    folder: str
    measure: tuple[str, ...] = ()
    fractions: tuple[float, ...] = ()
    kind: Literal["trial", "analysis"] = "trial"

    @staticmethod
    def of(trial: Trial, grid: Grid, folder: Path) -> "Job":
        """The job that brings a trial to its end in FOLDER/DIGEST."""
        where = str(folder.resolve())
        return Job(trial.digest, trial.config.dump(), trial.values, where, grid.measure, grid.fractions)

    @staticmethod
    def analysis(run: Run, names: Sequence[str], steps: str | None, sequences: int, device: str = "cpu") -> "Job":
        """The job that computes analyses of a run on a device; what it finds is in the tables of the run."""
        path = run.path.resolve()
        options = {"steps": steps, "sequences": sequences, "device": device}
        return Job(str(path), "", options, str(path.parent), tuple(names), kind="analysis")

    def plain(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Moved:
    """A job has made `step` of its steps."""

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

    A job that fails gives a row with the state "failed" and a message, and the rest goes on. A job whose process or
    machine dies is started again and goes on from its resume point, up to `TRIES` times. An executor that is closed
    early, or interrupted, stops what is running so that it can be continued, and leaves no process behind.
    """

    def __call__(self, jobs: Sequence[Job], watch: Watch) -> Iterator[Row]: ...


def run_job(job: Job, progress: Progress | None = None, patience: float = 0.0) -> Row:
    """Brings one job to its end, whatever that is; only a signal that stops the work is passed on.

    Args:
        patience: seconds to wait if another process still writes the run: one that is about to end.
    """
    until = time.monotonic() + patience
    while True:
        try:
            return _WORK[job.kind](job, progress)
        except Stopped:
            raise
        except Exception as error:  # the rest of the jobs goes on, and the row says what happened
            if not isinstance(error, Busy) or time.monotonic() > until:
                return failed(job, f"{type(error).__name__}: {' '.join(str(error).split())}")
        time.sleep(0.2)


def _trial(job: Job, progress: Progress | None) -> Row:
    trial = Trial(RunConfig.parse(yaml.safe_load(job.config)), dict(job.values))
    return run_trial(trial, Path(job.folder), measure=job.measure, fractions=job.fractions, progress=progress)


def _analysis(job: Job, progress: Progress | None) -> Row:
    from circuitscope.analysis.checkpoints.runner import analysis_results

    options = dict(job.values)
    try:
        with _terminated_like_interrupted(), reading_on(options.pop("device")):
            analysis_results(job.digest, job.measure, **options, progress=progress)
    except KeyboardInterrupt:
        raise Stopped("stopped; what is done is kept and will be used again") from None
    return {"digest": job.digest, "state": "finished"}


_WORK: dict[str, Callable[[Job, Progress | None], Row]] = {"trial": _trial, "analysis": _analysis}


@contextmanager
def _terminated_like_interrupted() -> Iterator[None]:
    """SIGTERM does what Ctrl-C does, so that tables are written before the process ends."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def failed(job: Job, message: str) -> Row:
    """The row of a job that came to no end; it is tried again the next time."""
    if job.kind == "analysis":
        return {"digest": job.digest, "state": "failed", "message": message}
    return {"digest": job.digest, **job.values, "state": "failed", "message": message, "version": __version__}


class Telling:
    """Passes on the progress of a job as `Moved`, at most a few times per second.

    The steps of a training are its updates; those of an analysis are the checkpoints that it reads.
    """

    def __init__(self, job: Job, tell: Callable[[Moved], None], seconds: float = 0.5):
        self.job, self.tell, self.seconds = job, tell, seconds
        self.steps, self.read, self.trains, self.metric, self.last = 0, 0, True, "", 0.0

    def __enter__(self) -> "Telling":
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def start(self, what: str, total: int, done: int | None = None) -> None:
        self.steps, self.trains = total, done is not None  # an analysis does not say how much was done before
        self.read, self.metric = 0, self.metric if self.trains else what
        self.tell(Moved(self.job.digest, done or 0, total, None, self.metric))

    def doing(self, what: str) -> None:
        pass

    def advance(self, step: int, loss: float | None = None, saved: int | None = None) -> None:
        self.read += 1
        if (loss is not None or not self.trains) and time.monotonic() - self.last >= self.seconds:
            self.last = time.monotonic()
            self.tell(Moved(self.job.digest, step if self.trains else self.read, self.steps, loss, self.metric))

    def evaluated(self, step: int, loss: float, metric: str, saved: int) -> None:
        self.metric = " ".join(metric.split())

    def say(self, line: str) -> None:
        pass
