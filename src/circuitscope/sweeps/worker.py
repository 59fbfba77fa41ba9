"""`python -m circuitscope.sweeps.worker`: a process that runs jobs for the local executor, one after the other.

It reads jobs as lines of JSON from its input, and writes what happens as lines of JSON to its output: {"moved": …} and
{"row": …}. Imports and compiled kernels are loaded once for all jobs. If its input ends, the process that gave the jobs
has died: the training is saved as after a signal, and the worker ends too.
"""

import json
import os
import queue
import signal
import sys
import threading
from dataclasses import asdict
from typing import IO, Any

from circuitscope.errors import Stopped
from circuitscope.sweeps.executor import Job, Telling, run_job


def main() -> None:
    news: IO[str] = os.fdopen(os.dup(1), "w", buffering=1, encoding="utf-8")
    os.dup2(2, 1)  # what a library prints does not come between
    jobs: queue.Queue[dict[str, Any] | None] = queue.Queue()
    threading.Thread(target=_read, args=(jobs,), daemon=True).start()
    while (data := jobs.get()) is not None:
        job = Job(**data)
        with Telling(job, lambda moved: _tell(news, "moved", asdict(moved))) as progress:
            try:
                row = run_job(job, progress)
            except Stopped as stop:
                _tell(news, "stopped", str(stop))
                return
        _tell(news, "row", row)


def _read(jobs: "queue.Queue[dict[str, Any] | None]") -> None:
    for line in sys.stdin:
        jobs.put(json.loads(line))
    jobs.put(None)
    os.kill(os.getpid(), signal.SIGTERM)


def _tell(news: IO[str], kind: str, what: Any) -> None:
    try:
        news.write(json.dumps({kind: what}, default=str) + "\n")
    except BrokenPipeError:  # the process that gave the jobs has died; the end of the input says so
        pass


if __name__ == "__main__":
    main()
