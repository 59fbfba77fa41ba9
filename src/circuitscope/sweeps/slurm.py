"""The Slurm executor: one job array whose tasks are trials, each a `circuitscope sweep GRID --trial DIGEST`.

It submits the array and gives no rows: a trial leaves its row in its run, where the next sweep collects it. A trial
that meets its time limit saves a resume point, goes back into the queue and continues from there.
"""

import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from circuitscope.errors import RunFailed, UserError, shown
from circuitscope.runs.store import write_text
from circuitscope.sweeps.executor import ONE_THREAD, Job, Watch
from circuitscope.sweeps.results import Row
from circuitscope.sweeps.sweep import Sweep

_BEFORE = 60  # seconds before the time limit at which a trial is told to save; Slurm may be a minute early
_LEAST = 300  # seconds of a time limit; with less, a trial would be told to save before it has done anything
_TIME = re.compile(r"(\d+-)?\d+(:\d+){0,2}")
_SCRIPT = """\
#!/bin/bash
{options}
# Trains the trials of {name}, one in each task of the array. circuitscope wrote this file.
trials=(
{trials}
)
trial=${{trials[$SLURM_ARRAY_TASK_ID]}}
{threads}
cd -- {here} || exit 1
child= again=
trap 'again=yes; kill -TERM "$child"' USR1  # the time limit is near
trap 'kill -TERM "$child"' TERM  # scancel, or another job takes the node
{command} --trial "$trial" &
child=$!
wait "$child"
while kill -0 "$child" 2>/dev/null; do wait "$child"; done  # a signal ends wait, but not the trial
wait "$child"
code=$?
if [ -n "$again" ] && [ "$code" -ne 0 ]; then
  echo "the time limit is near: $trial goes back into the queue"
  scontrol requeue "${{SLURM_ARRAY_JOB_ID}}_$SLURM_ARRAY_TASK_ID" && exit 0
fi
exit "$code"
"""


@dataclass
class SlurmExecutor:
    """Submits jobs as one array of Slurm.

    Args:
        grid: the grid file or folder that the jobs are of.
        most: how many jobs run at once; by default Slurm decides.
        cpus: cores of each job.
        gpus: GPUs of each job.
        time: time limit of each job as Slurm takes it, such as 30 (minutes), 4:00:00 or 2-0 (days-hours).
        options: further options of sbatch, such as --partition=gpu.
    """

    sweep: Sweep
    grid: Path
    most: int | None = None
    cpus: int = 1
    gpus: int = 0
    time: str | None = None
    options: Sequence[str] = ()
    submitted: str | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        if self.time is not None and not (_TIME.fullmatch(self.time) and _seconds(self.time) >= _LEAST):
            raise UserError(
                f"--time: expected minutes, H:MM:SS or D-HH:MM:SS, at least 5 minutes, got {shown(self.time)}"
            )
        for option in self.options:
            if not (re.match("--[a-z]", option) and option.isprintable()):
                raise UserError(f"--slurm: expected one option of sbatch such as --partition=NAME, got {shown(option)}")

    def __call__(self, jobs: Sequence[Job], watch: Watch) -> Iterator[Row]:
        if jobs:
            if before := self.queued():
                raise UserError(f"job {before} of this sweep is still in the queue; end it with: scancel {before}")
            self.submit(jobs)
        yield from ()

    @property
    def path(self) -> Path:
        """Where the script is."""
        return self.sweep.runs.resolve() / "array.sh"

    def script(self, jobs: Sequence[Job]) -> str:
        """The array script; its tasks are numbered from 0 in the order of the jobs."""
        runs = self.path.parent
        if not str(runs).isprintable() or set(str(runs)) & set('"\\'):
            raise UserError(f"Slurm cannot write to {runs}; name a folder without quotes and line breaks with --runs")
        name = re.sub(r"[^\w.-]", "_", self.sweep.grid.name)
        options = [
            f"--job-name={name}",
            f"--array=0-{len(jobs) - 1}" + (f"%{self.most}" if self.most else ""),
            f"--cpus-per-task={self.cpus}",
            *([f"--gpus={self.gpus}"] if self.gpus else []),
            *([f"--time={self.time}"] if self.time else []),
            f'--output="{str(runs).replace("%", "%%")}/slurm-%A_%a.out"',
            "--open-mode=append",
            "--requeue",
            f"--signal=B:USR1@{_BEFORE}",
            *self.options,
        ]
        program = [sys.executable, "-c", "from circuitscope.cli.main import command; command()"]
        command = [*program, "sweep", str(self.grid.resolve()), "--runs", str(runs.parent)]
        return _SCRIPT.format(
            options="\n".join(f"#SBATCH {option}" for option in options),
            name=name,
            trials="\n".join(f"  {job.digest}" for job in jobs),
            threads="export " + " ".join(f"{name}={value}" for name, value in ONE_THREAD.items()),
            here=shlex.quote(str(Path.cwd())),
            command=shlex.join(command),
        )

    def submit(self, jobs: Sequence[Job]) -> None:
        """Writes the script and gives it to sbatch."""
        text = self.script(jobs)
        try:
            write_text(self.path, text)
        except OSError as error:
            raise UserError(f"cannot write {self.path}: {error.strerror}") from None
        if shutil.which("sbatch") is None:
            raise UserError(f"Slurm's sbatch is not on this machine; where it is, submit with: sbatch {self._quoted}")
        done = _run("sbatch", "--parsable", str(self.path))
        number = done.stdout.strip().partition(";")[0]
        if done.returncode or not number.isdecimal():
            why = " ".join((done.stderr.strip() or done.stdout.strip() or f"exit code {done.returncode}").split())
            raise RunFailed(f"{why}; the script is {self.path}")
        self.submitted = number
        write_text(self._noted, json.dumps(int(number)))

    def queued(self) -> str | None:
        """The number of an array of this sweep that is still in the queue."""
        try:
            number = str(int(json.loads(self._noted.read_text())))
        except (OSError, ValueError, TypeError):
            return None
        if shutil.which("squeue") is None:
            return None
        done = _run("squeue", "--noheader", f"--jobs={number}")
        return number if done.returncode == 0 and done.stdout.strip() else None

    @property
    def _quoted(self) -> str:
        return shlex.quote(str(self.path))

    @property
    def _noted(self) -> Path:
        """Where the number of the array is noted."""
        return self.path.with_name(".slurm.json")


def _seconds(time: str) -> int:
    """A time as Slurm takes it: M, M:S, H:M:S, D-H, D-H:M or D-H:M:S."""
    days, dash, clock = time.rpartition("-")
    parts = [int(part) for part in clock.split(":")]
    if not dash and len(parts) < 3:
        parts = [0, *parts]
    hours, minutes, seconds = [*parts, 0, 0][:3]
    return 86400 * int(days or 0) + 3600 * hours + 60 * minutes + seconds


def _run(*command: str) -> "subprocess.CompletedProcess[str]":
    try:
        return subprocess.run(command, capture_output=True, text=True, errors="replace", check=False, timeout=60)
    except subprocess.TimeoutExpired:
        raise RunFailed(f"{command[0]} gave no answer within a minute") from None
