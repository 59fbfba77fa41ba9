"""The local executor: one trial per core, each on one thread, in processes that are used again and again."""

import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from circuitscope.errors import RunFailed
from circuitscope.sweeps.executor import ONE_THREAD, PATIENCE, TRIES, Job, Moved, Watch, failed
from circuitscope.sweeps.results import Row

News = queue.Queue[tuple["_Worker", dict[str, Any] | None]]
"""What workers say, each with the worker that said it; None at its end."""


def cores() -> int:
    """How many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@dataclass
class LocalExecutor:
    """Runs jobs in worker processes on this machine.

    Args:
        workers: how many trials run at once; by default one per core.
        minutes: after this time no further trial is started; those that run come to their end.
        pids: where to note the process numbers of the workers, for `pause`.
    """

    workers: int | None = None
    minutes: float | None = None
    pids: Path | None = None

    def __call__(self, jobs: Sequence[Job], watch: Watch) -> Iterator[Row]:
        waiting, tries = deque(jobs), dict.fromkeys((job.digest for job in jobs), 0)
        deadline = time.monotonic() + 60 * self.minutes if self.minutes is not None else float("inf")
        team: list[_Worker] = []
        every: News = queue.Queue()
        try:
            while True:
                for worker in [w for w in team if w.job is None]:
                    if waiting and time.monotonic() < deadline:
                        self._give(worker, waiting.popleft(), watch)
                while waiting and len(team) < (self.workers or cores()) and time.monotonic() < deadline:
                    team.append(_Worker(every))
                    self._note(team)
                    self._give(team[-1], waiting.popleft(), watch)
                if not any(w.job for w in team):
                    return
                worker, news = every.get()
                if news is None:
                    team.remove(worker)
                    self._note(team)
                    yield from self._died(worker, waiting, tries)
                elif "moved" in news:
                    watch.moved(Moved(**news["moved"]))
                elif "row" in news:
                    worker.job = None
                    yield news["row"]
        finally:
            try:
                _stop(team)
            finally:
                if self.pids is not None:
                    self.pids.unlink(missing_ok=True)

    def _give(self, worker: "_Worker", job: Job, watch: Watch) -> None:
        worker.job = job
        watch.started(job.digest)
        worker.give(job)

    def _died(self, worker: "_Worker", waiting: deque[Job], tries: dict[str, int]) -> Iterator[Row]:
        """A worker that ended by itself was killed, for example by the system when memory ran out: try again."""
        job, code = worker.job, worker.process.wait()
        if job is None:
            return
        tries[job.digest] += 1
        if tries[job.digest] < TRIES:
            waiting.appendleft(job)
            return
        why = f"signal {-code}" if code < 0 else f"exit code {code}"
        yield failed(job, f"its process died {TRIES} times, the last time with {why}{worker.last_words}")

    def _note(self, team: "list[_Worker]") -> None:
        if self.pids is not None:
            self.pids.write_text(json.dumps([worker.process.pid for worker in team]))


class _Worker:
    """One worker process, its job, and a thread that passes on what it says."""

    def __init__(self, news: "News"):
        self.job: Job | None = None
        self.errors: deque[str] = deque(maxlen=3)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "circuitscope.sweeps.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            encoding="utf-8",
            errors="replace",
            env={**os.environ, **ONE_THREAD},
            start_new_session=True,  # Ctrl-C reaches the sweep alone, which then stops its workers
        )
        threading.Thread(target=self._listen, args=(news,), daemon=True).start()
        self._hears = threading.Thread(target=self._overhear, daemon=True)
        self._hears.start()

    def give(self, job: Job) -> None:
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps(job.plain()) + "\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            pass  # the worker has died, which its reader reports

    @property
    def last_words(self) -> str:
        self._hears.join(timeout=1)
        said = " ".join(" ".join(list(self.errors)).split())
        return f" ({said})" if said else ""

    def close(self) -> None:
        """Closes the pipes of a worker that has ended."""
        for pipe in (self.process.stdin, self.process.stdout, self.process.stderr):
            if pipe is not None:
                with suppress(OSError):
                    pipe.close()

    def _listen(self, news: "News") -> None:
        assert self.process.stdout is not None
        try:
            for line in self.process.stdout:
                news.put((self, json.loads(line)))
        except ValueError:  # the worker was killed in the middle of a line
            pass
        finally:
            news.put((self, None))

    def _overhear(self) -> None:
        assert self.process.stderr is not None
        self.errors.extend(self.process.stderr)


def _stop(team: Sequence[_Worker]) -> None:
    """Ends the workers: those with a job save their run first, so that it can be continued."""
    for worker in team:
        if worker.job is not None:
            worker.process.terminate()
            worker.process.send_signal(signal.SIGCONT)  # it may be held still
        else:
            worker.process.kill()
    until = time.monotonic() + PATIENCE
    for worker in team:
        try:
            worker.process.wait(timeout=max(0.1, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            worker.process.kill()
            worker.process.wait()
        worker._hears.join(timeout=1)
        worker.close()


def worker_pids(path: Path) -> list[int]:
    """The process numbers of the workers of a sweep that is running."""
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        raise RunFailed("no sweep is running here on this machine") from None
    return [int(pid) for pid in found]
