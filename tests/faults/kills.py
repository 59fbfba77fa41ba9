"""Real processes for the fault tests: started cheaply, killed for real, what they leave behind compared.

`start` runs `circuitscope …` in a process of its own, forked from a server that has imported the
package once (multiprocessing's forkserver): a trial costs what training costs, not what imports cost.
`kill_and_resume` is the soak: SIGKILL at random moments and in the middle of writes, resumed until done.
"""

import json
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch

from circuitscope.runs.metrics import read_metrics
from circuitscope.runs.store import DamagedFile, read_tensors

COMMAND = Path(sys.executable).with_name("circuitscope")
PATIENCE = 120.0  # seconds before a process counts as hung; the machine may be busy

_FORK = multiprocessing.get_context("forkserver")
_FORK.set_forkserver_preload(["circuitscope.cli.main", "circuitscope.training.trainer", "pandas", "torch._dynamo"])

Saved = dict[str, dict[str, torch.Tensor]]


def flags(*, steps: int, save_every: int, resume_every: int, keep_resume: int = 3, eval_batches: int = 2) -> list[str]:
    """A run that takes a few milliseconds per step on one thread."""
    return (
        f"--length 16 --pairs 2 --vocab-size 64 --d-model 8 --batch-size 8 --threads 1 --device cpu --seed 3"
        f" --steps {steps} --save-every {save_every} --resume-every {resume_every} --keep-resume {keep_resume}"
        f" --set train.log_every=4 --set train.eval_every=10 --set train.eval_batches={eval_batches}"
        f" --set train.eval_batch_size=8"
    ).split()


SIZES = {"steps": 160, "save_every": 20, "resume_every": 30}
FLAGS = flags(**SIZES)  # a second or two: time for something to happen


class Started:
    """A process that runs the command; its output is in files."""

    def __init__(self, process: BaseProcess, out: Path, err: Path):
        self.process, self._out, self._err = process, out, err

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    @property
    def out(self) -> str:
        return self._out.read_text()

    @property
    def err(self) -> str:
        return self._err.read_text()

    def send(self, signum: int) -> None:
        os.kill(self.pid, signum)

    def wait(self) -> int:
        """The exit code, −N if signal N ended it."""
        self.process.join(PATIENCE)
        if self.process.exitcode is None:
            self.process.kill()
            raise AssertionError(f"process {self.pid} hangs; it said: {self.err}")
        return self.process.exitcode


def start(*argv: object, logs: Path, out: Path | None = None, file_limit: int | None = None) -> Started:
    """`circuitscope ARGV` in a forked process.

    Its output goes to files in `logs`, or to the pipe `out`; with `file_limit` none of its files may
    grow beyond so many bytes.
    """
    logs.mkdir(parents=True, exist_ok=True)
    stem = logs / f"{time.monotonic_ns()}"
    out, err = out or stem.with_suffix(".out"), stem.with_suffix(".err")
    process = _FORK.Process(target=_run_command, args=([str(a) for a in argv], out, err, file_limit))
    process.start()
    return Started(process, out, err)


def _run_command(argv: list[str], out: Path, err: Path, file_limit: int | None) -> None:
    import resource

    from circuitscope.cli.main import main

    for number, path in ((1, out), (2, err)):
        os.dup2(os.open(path, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o600), number)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if file_limit is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (file_limit, file_limit))
    sys.argv = [str(COMMAND), *argv]
    main()


def start_command(*argv: object, logs: Path) -> subprocess.Popen[str]:
    """The installed `circuitscope` program, as a shell would start it."""
    return subprocess.Popen(
        [COMMAND, *map(str, argv)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=logs
    )


def wait_for(happened: Callable[[], object], what: str) -> None:
    """Polls until it happened."""
    end = time.monotonic() + PATIENCE
    while not happened():
        if time.monotonic() > end:
            raise AssertionError(f"waited {PATIENCE:.0f} s for {what}")
        time.sleep(0.001)


def checkpoint(run: Path, step: int) -> Path:
    return run / "checkpoints" / f"step-{step:08d}.safetensors"


def status(run: Path) -> dict[str, object]:
    return dict(json.loads((run / "status.json").read_text()))


def saved(run: Path) -> Saved:
    """Every checkpoint and resume point by its path in the run; raises DamagedFile at a bad one."""
    return {
        str(path.relative_to(run)): read_tensors(path)[0]
        for folder in ("checkpoints", "resume")
        for path in sorted((run / folder).glob("step-*.safetensors"))
    }


def same_bits(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    """Same names, and tensors equal in every bit (so −0 is not 0, and a NaN is itself)."""
    return a.keys() == b.keys() and all(
        a[n].dtype == b[n].dtype and a[n].shape == b[n].shape and a[n].numpy().tobytes() == b[n].numpy().tobytes()
        for n in a
    )


def differing(run: Path, unbroken: Saved) -> list[str]:
    """Files of a run that are not, bit by bit, what the unbroken run saved at that step."""
    return [name for name, tensors in saved(run).items() if not same_bits(tensors, unbroken[name])]


def last_files(kept: Saved) -> list[str]:
    """The checkpoints, and the resume point of the end."""
    checkpoints = [n for n in kept if n.startswith("checkpoints")]
    return [*checkpoints, max(n for n in kept if n.startswith("resume"))]


def rows(run: Path) -> list[dict[str, object]]:
    """Metrics without the one field that is a time."""
    return [{k: v for k, v in row.items() if k != "seconds"} for row in read_metrics(run)]


def temporaries(run: Path) -> Iterator[Path]:
    for folder in (run, run / "checkpoints", run / "resume"):
        yield from folder.glob(".*.tmp")


@dataclass
class Tally:
    """What the soak saw. The lists name what must never be."""

    kills: int = 0
    in_a_write: int = 0
    resumes: int = 0
    runs: int = 0
    unreadable: list[str] = field(default_factory=list)
    other_bits: list[str] = field(default_factory=list)
    other_rows: list[str] = field(default_factory=list)
    leftovers: list[str] = field(default_factory=list)

    @property
    def clean(self) -> bool:
        return not (self.unreadable or self.other_bits or self.other_rows or self.leftovers)

    def __str__(self) -> str:
        weights = "all final weights equal" if not self.other_bits else f"OTHER BITS in {len(self.other_bits)}"
        return (
            f"{self.kills} kills ({self.in_a_write} in the middle of a write), {self.resumes} resumes,"
            f" {self.runs} runs finished, unreadable checkpoints {len(self.unreadable)}, {weights},"
            f" runs with other metrics {len(self.other_rows)}, with leftover files {len(self.leftovers)}"
        )


def kill_and_resume(root: Path, kills: int, seed: int, tell: Callable[[Tally], None] = lambda tally: None) -> Tally:
    """SIGKILLs runs `kills` times, each time looking at all they saved, and resumes each until it is finished.

    Half the kills come at a moment drawn from the whole length of a run, start and exit included; half as
    soon as a temporary file is seen, that is while a checkpoint, resume point or status is being written.
    """
    draw = random.Random(seed)
    often = {"steps": 40, "save_every": 2, "resume_every": 3}
    root.mkdir(parents=True, exist_ok=True)
    whole = root / "unbroken"
    warm = start("train", *flags(**often, keep_resume=100), "--runs", root, "--name", "warm", logs=root / "logs")
    assert warm.wait() == 0, warm.err  # pays the server's imports, so that the next one's length is a run's length
    began = time.monotonic()
    first = start("train", *flags(**often, keep_resume=100), "--runs", root, "--name", whole.name, logs=root / "logs")
    assert first.wait() == 0, first.err
    length = time.monotonic() - began
    unbroken, unbroken_rows = saved(whole), rows(whole)

    tally = Tally()
    while tally.kills < kills:
        run = root / f"run-{tally.runs + 1}"
        while True:
            before = set(temporaries(run))
            if (run / "config.yaml").exists():
                process = start("train", "--resume", run, logs=root / "logs")
                tally.resumes += 1
            else:
                process = start("train", *flags(**often), "--runs", root, "--name", run.name, logs=root / "logs")
            if tally.kills < kills:
                if draw.random() < 0.5:
                    process.process.join(draw.uniform(0, 1.1 * length))
                else:
                    _wait_for_write(process, run, nth=draw.randint(1, 20))
                process.process.kill()
            if (code := process.wait()) == 0:
                break
            assert code == -signal.SIGKILL, f"exit code {code}: {process.err}"
            tally.kills += 1
            tally.in_a_write += bool(set(temporaries(run)) - before)
            _look(run, unbroken, tally)
            tell(tally)
        tally.runs += 1
        _look(run, unbroken, tally)
        kept = saved(run)
        if {n for n in kept if n.startswith("checkpoints")} != {n for n in unbroken if n.startswith("checkpoints")}:
            tally.other_bits.append(f"{run}: other checkpoints than the unbroken run")
        if not same_bits(kept[last_files(kept)[-1]], unbroken[last_files(unbroken)[-1]]):
            tally.other_bits.append(f"{run}: final resume point")
        if rows(run) != unbroken_rows:
            tally.other_rows.append(str(run))
        tally.leftovers += map(str, temporaries(run))
    return tally


def _wait_for_write(process: Started, run: Path, nth: int) -> None:
    """Returns when the nth new temporary file of the run is there, or when the process has ended."""
    seen: set[tuple[str, int]] = set()
    while process.process.exitcode is None:
        for folder in (run, run / "checkpoints", run / "resume"):
            try:
                with os.scandir(folder) as entries:
                    seen.update((e.name, e.inode()) for e in entries if e.name.endswith(".tmp"))
            except OSError:
                continue
            if len(seen) >= nth:
                return


def _look(run: Path, unbroken: Saved, tally: Tally) -> None:
    if not (run / "config.yaml").exists():
        return
    for folder in ("checkpoints", "resume"):
        for path in (run / folder).glob("step-*.safetensors"):
            try:
                tensors, _ = read_tensors(path)
            except DamagedFile as error:
                tally.unreadable.append(str(error))
                continue
            if not same_bits(tensors, unbroken[str(path.relative_to(run))]):
                tally.other_bits.append(str(path))
