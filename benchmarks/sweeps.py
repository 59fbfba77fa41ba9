"""(k) Sweeps by the command: what a trial costs beyond its training, how full two cores are, and whether memory grows.

Another executor gets rows of its own by one more line in `_EXECUTORS`.
"""

import os
import re
import statistics
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import yaml

from benchmarks.rows import Row, Section, limit
from benchmarks.startup import program
from benchmarks.workload import temporary_folder
from circuitscope.config import RunConfig
from circuitscope.sweeps.grid import Trial
from circuitscope.sweeps.sweep import seconds_per_step
from circuitscope.training.trainer import train

_EXECUTORS: dict[str, list[str]] = {"local": [], "ray": ["--executor", "ray"]}  # name → options of `circuitscope sweep`
_TINY: dict[str, Any] = {
    "model": {"d_model": 8, "n_layers": 1},
    "task": {"length": 16, "pairs": 2, "vocab_size": 64},
    "train": {"steps": 20, "batch_size": 8, "eval_batches": 2, "eval_batch_size": 8, "device": "cpu", "threads": 1},
}
_ENDED = re.compile(r"(\d+)/\d+ .*")
_MEGABYTE = 2**20


@dataclass
class Watched:
    """A sweep that was watched from outside: when its trials ended, and its memory at those times, in megabytes."""

    seconds: float = 0.0
    ended: list[float] = field(default_factory=list)
    own: list[float] = field(default_factory=list)
    workers: list[float] = field(default_factory=list)


def measure(quick: bool) -> Section:
    rows: list[Row] = []
    with temporary_folder() as folder:
        for name, options in _EXECUTORS.items():
            rows.append(_overhead(name, options, folder, trials=3 if quick else 20))
            rows.append(_fullness(name, options, folder, *((0.1, 2) if quick else (60.0, 8))))
            rows.append(_memory(name, options, folder, trials=9 if quick else 1000))
    return Section(rows)


def _overhead(name: str, options: list[str], folder: Path, trials: int) -> Row:
    """Trials one after the other in one worker, from the end of the first on, against the same trainings alone."""
    seen = _sweep(folder / f"{name}-overhead", _TINY, trials + 1, ["--jobs", "1", *options])
    per_trial = (seen.ended[-1] - seen.ended[0]) / trials
    configs = [RunConfig.parse({**_TINY, "train": {**_TINY["train"], "seed": seed}}) for seed in range(trials + 1)]
    taken = []
    for seed, config in enumerate(configs):
        began = time.perf_counter()
        train(config, root=folder, name=f"{name}-alone-{seed}")
        taken.append(time.perf_counter() - began)
    alone = statistics.mean(taken[1:])
    note = (
        f"{trials} trials of 20 steps in one worker, after a first one that pays for the start of its process; a trial"
        f" takes {per_trial:.2f} s, {alone:.2f} s of it training. The rest is the evaluation of 3,000 test examples"
        " with the last and the best checkpoint, the row and the table"
    )
    return limit(
        f"{name} sweep, a trial beyond its training",
        f"{per_trial - alone:.2f} s",
        "under 0.5 s",
        per_trial - alone < 0.5,
        note,
    )


def _fullness(name: str, options: list[str], folder: Path, seconds: float, trials: int) -> Row:
    """Trials of so many seconds on two cores, against what runs alone on one and on two threads would allow."""
    base: dict[str, Any] = {"train": {"device": "cpu"}}
    step = seconds_per_step(Trial(RunConfig.parse(base), {}), steps=5)
    base["train"]["steps"] = max(2, round(seconds / step))
    alone = {}
    for threads in (1, 2):
        config = RunConfig.parse({"train": {**base["train"], "threads": threads, "seed": 0}})
        began = time.perf_counter()
        train(config, root=folder, name=f"{name}-threads-{threads}")
        alone[threads] = time.perf_counter() - began
    ideal = trials * min(alone[1] / 2, alone[2])
    seen = _sweep(folder / f"{name}-fullness", base, trials, ["--jobs", "2", *options])
    note = (
        f"{trials} default runs of {base['train']['steps']} steps, the whole command, two at a time. One takes"
        f" {alone[1]:.1f} s alone on one thread and {alone[2]:.1f} s on two; the ideal is the better of two at a time"
        " on one thread each and one after the other on two"
    )
    return Row(
        f"{name} sweep, {trials} trials on 2 cores",
        f"{seen.seconds:.1f} s",
        f"{ideal:.1f} s",
        f"{ideal / seen.seconds:.2f}",
        "at least 0.9 of the ideal",
        ideal / seen.seconds >= 0.9,
        note,
    )


def _memory(name: str, options: list[str], folder: Path, trials: int) -> Row:
    """Resident memory of the sweep and of its workers, early and at the end of very many trials."""
    seen = _sweep(folder / f"{name}-memory", _TINY, trials, ["--jobs", "2", *options])
    tenth = max(3, trials // 10)  # workers have gone at the very end, so the largest value of a stretch counts
    grown = [(max(x[tenth : 2 * tenth]), max(x[-tenth:])) for x in (seen.own, seen.workers)]
    note = (
        f"{trials} trials of 20 steps in {seen.seconds:.0f} s; resident memory of the sweep's process, and of all that"
        f" it started together: the most in the second and in the last {tenth} trials"
    )
    return limit(
        f"{name} sweep, memory over {trials} trials",
        " and ".join(f"{a:.0f} → {b:.0f} MB" for a, b in grown),
        "at most 5% more",
        all(b <= 1.05 * a for a, b in grown),
        note,
    )


def _sweep(folder: Path, base: dict[str, Any], trials: int, options: list[str]) -> Watched:
    """Runs `circuitscope sweep` on a grid of seeds, and looks on."""
    folder.mkdir()
    grid = {"base": base, "axes": {"train.seed": list(range(trials))}}
    (folder / "grid.yaml").write_text(yaml.safe_dump(grid), encoding="utf-8")
    command = [program(), "sweep", str(folder), "--runs", str(folder / "runs"), *options]
    seen, began = Watched(), time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, "COLUMNS": "200"}) as process:
        for now in _ends(process):
            seen.ended.append(now - began)
            own, workers = _resident(process.pid)
            seen.own.append(own)
            seen.workers.append(workers)
    seen.seconds = time.perf_counter() - began
    if process.returncode or len(seen.ended) != trials:
        raise RuntimeError(f"{' '.join(command)} ended with code {process.returncode} after {len(seen.ended)} trials")
    return seen


def _ends(process: "subprocess.Popen[str]") -> Iterator[float]:
    """The moments at which trials end."""
    assert process.stdout is not None
    for line in process.stdout:
        if _ENDED.match(line):
            yield time.perf_counter()


def _resident(pid: int) -> tuple[float, float]:
    """Megabytes of a process, and of all that it started."""
    own = psutil.Process(pid)
    total = 0
    for child in own.children(recursive=True):
        try:
            total += child.memory_info().rss
        except psutil.NoSuchProcess:
            continue
    return own.memory_info().rss / _MEGABYTE, total / _MEGABYTE
