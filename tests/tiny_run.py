"""A run small enough to train in a test, ways to break it off, and what it saved."""

import os
import signal
from pathlib import Path
from typing import Any, Self

import torch

from circuitscope.config import RunConfig
from circuitscope.progress import Silent
from circuitscope.runs.metrics import read_metrics
from circuitscope.runs.store import read_tensors

Tensors = dict[str, torch.Tensor]

TINY: dict[str, Any] = {
    "length": 16,
    "pairs": 2,
    "vocab_size": 64,
    "d_model": 8,
    "batch_size": 8,
    "eval_batch_size": 8,
    "eval_batches": 2,
    "eval_every": 4,
    "log_every": 2,
    "steps": 12,
    "save_every": 3,
    "resume_every": 4,
    "device": "cpu",
    "threads": 1,
}


def tiny(**options: Any) -> RunConfig:
    """Two layers of width 8 on MQAR (16, 2) over 64 tokens; 12 steps, on one thread."""
    model = None if "mixers" in options else "attention"
    return RunConfig.build(model, "mqar", **{**TINY, **options})


class Listens(Silent):
    """Remembers what a person would have been told, and by which steps; stops the work where asked."""

    def __init__(self, stop_at: int | None = None):
        self.lines: list[str] = []
        self.steps: list[int] = []
        self.entered = False
        self.stop_at = stop_at

    def __enter__(self) -> Self:
        self.entered = True
        return self

    def advance(self, step: int, loss: float | None = None, saved: int | None = None) -> None:
        self.steps.append(step)
        if step == self.stop_at:
            raise KeyboardInterrupt

    def say(self, line: str) -> None:
        self.lines.append(line)


class Crash(BaseException):
    """Ends training with nothing saved, as a kill does."""


class CrashAt(Silent):
    """Crashes the run after `step` updates; that step must be one that is logged."""

    def __init__(self, step: int):
        self.at = step

    def advance(self, step: int, loss: float | None = None, saved: int | None = None) -> None:
        if step == self.at:
            raise Crash


class SignalAt(Listens):
    """Sends this process a signal after `step` updates; that step must be one that is logged."""

    def __init__(self, step: int, signum: int = signal.SIGTERM):
        super().__init__()
        self.at, self.signum = step, signum

    def advance(self, step: int, loss: float | None = None, saved: int | None = None) -> None:
        if step == self.at:
            os.kill(os.getpid(), self.signum)


def saved(run: Path, folder: str = "checkpoints") -> dict[int, Tensors]:
    """Everything a run has saved in a folder, by step, each file checked."""
    files = sorted((run / folder).glob("step-*.safetensors"))
    return {int(path.stem.removeprefix("step-")): read_tensors(path)[0] for path in files}


def same_bits(a: Tensors, b: Tensors) -> bool:
    """Same names, and tensors equal in every bit (so −0 is not 0, and a NaN is itself)."""
    return a.keys() == b.keys() and all(
        a[n].dtype == b[n].dtype and a[n].shape == b[n].shape and a[n].numpy().tobytes() == b[n].numpy().tobytes()
        for n in a
    )


def same_run(a: Path, b: Path) -> bool:
    """Same checkpoints at the same steps, and the same resume point at the end, bit by bit."""
    one, other = saved(a), saved(b)
    end, other_end = (max(saved(p, "resume").items(), key=lambda item: item[0]) for p in (a, b))
    checkpoints = one.keys() == other.keys() and all(same_bits(one[s], other[s]) for s in one)
    return checkpoints and end[0] == other_end[0] and same_bits(end[1], other_end[1])


def rows(run: Path) -> list[dict[str, Any]]:
    """Metrics without the one field that is a time."""
    return [{k: v for k, v in row.items() if k != "seconds"} for row in read_metrics(run)]


def listing(folder: Path) -> dict[str, tuple[bytes, int]]:
    """Bytes and modification time of every file below a folder."""
    return {
        str(p.relative_to(folder)): (p.read_bytes(), p.stat().st_mtime_ns)
        for p in sorted(folder.rglob("*"))
        if p.is_file()
    }
