"""A sweep: the trials of a grid, what is done of them, and the executor that does the rest."""

import shutil
import signal
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock, Timeout

from circuitscope.errors import RunFailed, UserError
from circuitscope.runs.run import Run, runs_root
from circuitscope.sweeps.executor import Executor, Job, Watch
from circuitscope.sweeps.grid import FILE, Grid, Trial, grid_path, read_grid
from circuitscope.sweeps.local import worker_pids
from circuitscope.sweeps.measures import check_measures
from circuitscope.sweeps.results import DONE, ResultsTable, Row
from circuitscope.sweeps.trial import SAVED_ROW, curves_of, saved_row

_SECTIONS = ("recipe", "model", "task", "train")  # of a config; a column that begins so is an axis


@dataclass(frozen=True)
class Sweep:
    """A grid with the folder of its runs and the table of its results."""

    grid: Grid
    runs: Path
    results: ResultsTable

    @staticmethod
    def open(path: str | Path, root: str | Path | None = None) -> "Sweep":
        """The sweep of a grid file, or of a folder with one.

        Runs are in RUNS/NAME/DIGEST. Results are beside the grid if it is a folder's grid.yaml, otherwise beside the
        runs.
        """
        file, grid = grid_path(path), read_grid(path)
        check_measures(grid.measure)
        runs = runs_root(root) / grid.name
        if (runs / "config.yaml").exists():
            raise UserError(f"{runs} is a run; give the grid another name, or name another folder with --runs")
        return Sweep(grid, runs, ResultsTable(file.parent if file.name == FILE else runs))

    @property
    def missing(self) -> list[Trial]:
        """The trials that have no row yet, or none of a run that came to its end."""
        return [trial for trial in self.grid.trials if not self.results.done(trial.digest, self.grid.measure)]

    def collect(self, write: bool = False) -> int:
        """Takes in rows that are not yet in the table; says how many.

        They are those that trials left in their runs and no sweep has written down, and those of the same trials in
        the tables of other sweeps, if everything was measured there that is asked for here.
        """
        found = 0
        for trial in self.missing:
            if not (self.runs / trial.digest / "config.yaml").exists():
                continue
            run = Run(self.runs / trial.digest)
            row = saved_row(run)
            measured = set(str((row or {}).get("measured", "")).split())
            if row and (
                row.get("state") == "diverged" or (row.get("state") in DONE and measured >= set(self.grid.measure))
            ):
                self._add({**row, **trial.values}, write=False)
                found += 1
        found += self._from_other_tables()
        if write:
            self.results.write_changes()
        return found

    def go(self, executor: Executor, watch: Watch) -> Iterator[Row]:
        """Brings the missing trials to their end and puts their rows into the table, which is written now and then.

        A row that was not written when the sweep was killed is taken from its run the next time.
        """
        with self._alone():
            self.results.read()  # another sweep may have ended meanwhile
            with suppress(RunFailed):  # workers that were held still when their sweep was killed
                self.hold(still=False)
            self.collect(write=True)
            self._borrow()
            jobs = [Job.of(trial, self.grid, self.runs) for trial in self.missing]
            try:
                with closing(executor(jobs, watch)) as rows:  # type: ignore[type-var]
                    for row in rows:
                        self._add(row, write=False)
                        self.results.write_changes(now=False)
                        yield row
            finally:
                self.results.write_changes()

    def _from_other_tables(self) -> int:
        """Takes over rows and curves from the tables in folders beside this one, and in the one above; says how many.

        The columns of fields of the config are left out: they are what other grids have as axes.
        """
        wanted = {trial.digest: trial for trial in self.missing}
        here, found = self.results.folder.resolve(), 0
        tables = [*sorted(here.parent.glob(f"*/{FILE}")), *here.parent.glob(FILE)]
        for file in tables if wanted else ():
            if file.parent == here:
                continue
            try:
                theirs = ResultsTable(file.parent)
            except UserError:  # what another sweep has wrong does not stop this one
                continue
            for digest in [digest for digest in wanted if theirs.done(digest, self.grid.measure)]:
                row, curves = theirs.rows[digest], theirs.curves.get(digest, [])
                shares = {f"{wanted[digest].config.task.metric}_at_{share:g}" for share in self.grid.fractions}
                if row["state"] == "diverged" or (curves and shares <= row.keys()):
                    rest = {name: value for name, value in row.items() if name.partition(".")[0] not in _SECTIONS}
                    values = wanted.pop(digest).values
                    self.results.add({"digest": digest, **values, **rest}, curves, write=False)
                    found += 1
        return found

    def _borrow(self) -> None:
        """Copies the runs of missing trials that another sweep in the same folder has brought to their end.

        They are not trained again; what they lack is measured on the copy. The row that the other sweep left in its run
        does not come along.
        """
        for trial in self.missing:
            here, copy = self.runs / trial.digest, self.runs / f".{trial.digest}.copy"
            for there in [] if here.exists() else sorted(self.runs.parent.glob(f"*/{trial.digest}")):
                if not _ended(there, trial):
                    continue
                shutil.rmtree(copy, ignore_errors=True)
                try:
                    shutil.copytree(there, copy, ignore=shutil.ignore_patterns(SAVED_ROW, "*.tmp"))
                    copy.rename(here)
                    break
                except OSError:  # then the trial is trained
                    shutil.rmtree(copy, ignore_errors=True)

    def _add(self, row: Row, write: bool = True) -> None:
        """Puts a row into the table, with the curves of its run if the run came to its end."""
        curves = curves_of(Run(self.runs / str(row["digest"]))) if row["state"] in DONE else []
        self.results.add(row, curves, write)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Holds the lock of the sweep; a second one is refused."""
        try:
            self.runs.mkdir(parents=True, exist_ok=True)
            lock = FileLock(self.runs / ".sweep.lock", timeout=0)
            lock.acquire()
        except Timeout:
            raise UserError(f"a sweep of {self.grid.name} is running already in {self.runs}") from None
        except OSError as error:
            raise UserError(f"cannot write to {self.runs}: {error.strerror}") from None
        try:
            yield
        finally:
            lock.release()

    @property
    def pids(self) -> Path:
        """Where the process numbers of running workers are noted."""
        return self.runs / ".workers.json"

    def hold(self, still: bool) -> int:
        """Holds the workers of the running sweep still, or lets them go on; says how many there are."""
        import psutil

        count = 0
        for pid in worker_pids(self.pids):
            try:
                process = psutil.Process(pid)
                if "circuitscope.sweeps.worker" not in process.cmdline():
                    continue  # the number was taken over by another program
                process.send_signal(signal.SIGSTOP if still else signal.SIGCONT)
                count += 1
            except psutil.NoSuchProcess:
                continue
        return count

    def estimated_seconds(self) -> dict[str, float]:
        """Seconds of training on one thread per missing trial: from rows of the same model, or by timing three steps.

        A trial that stops early takes less.
        """
        known: dict[str, float] = {}
        for trial in self.grid.trials:
            row = self.results.rows.get(trial.digest, {})
            if row.get("steps") and row.get("seconds"):
                known.setdefault(_cost_key(trial), row["seconds"] / row["steps"])
        out = {}
        for trial in self.missing:
            key = _cost_key(trial)
            if key not in known:
                known[key] = seconds_per_step(trial)
            out[trial.digest] = known[key] * trial.config.train.steps
        return out


def _ended(path: Path, trial: Trial) -> bool:
    """Whether a folder holds the run of a trial, with its checkpoints, and a sweep has measured it to the end."""
    try:
        run = Run(path)
        known = run.digest == trial.digest and saved_row(run) is not None
        return known and run.status.get("state") in DONE and bool(run.steps)
    except UserError:
        return False


def _cost_key(trial: Trial) -> str:
    """What the time of a step depends on: the model, the task and the batch."""
    return repr((trial.config.model, trial.config.task, trial.config.train.batch_size))


def seconds_per_step(trial: Trial, steps: int = 3) -> float:
    """The time of a training step on one thread, the fastest of a few after one to warm up."""
    import torch

    from circuitscope.models.build import build_model
    from circuitscope.training.optimizer import make_optimizer

    config, threads = trial.config, torch.get_num_threads()
    torch.set_num_threads(config.train.threads or 1)
    try:
        model = build_model(config.model, seed=0).train()
        optimizer = make_optimizer(model, config.train)
        taken = []
        for step in range(steps + 1):
            began = time.perf_counter()
            loss, _ = config.task.loss(model, config.task.batch(step, size=config.train.batch_size))
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
            taken.append(time.perf_counter() - began)
        return min(taken[1:])
    finally:
        torch.set_num_threads(threads)
