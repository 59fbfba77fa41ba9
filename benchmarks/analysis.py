"""Analysis against the training that made the checkpoints, of a wide model, and its start; all as one sees them."""

import os
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.rows import Row, Section, limit
from benchmarks.startup import program, seconds
from benchmarks.workload import temporary_folder
from circuitscope.runs.run import newest_run

_SECONDS = 60  # for the wide model
_LATER = 1.0  # seconds after the imports that nobody can avoid
_NOTE = (
    "two real processes, imports included; per checkpoint 256 sequences of the task and 64 of repeated blocks;"
    " transitions, circuit and knockouts included"
)


def measure(quick: bool) -> Section:
    few = ["--steps", "4", "--save-every", "2"] if quick else []
    rows = [
        *_against_training("the default run", few or ["--save-every", "15"], share=0.15, again=True),
        *_against_training(
            "a run of one layer of Mamba with 128 channels, length 64",
            ["--model", "mamba", "--layers", "1", *(few or ["--save-every", "100"])],
            share=0.25,
        ),
        *_wide(["--d-model", "32", "--length", "16"] if quick else ["--d-model", "256", "--length", "128"]),
        _start(1 if quick else 5),
    ]
    return Section(rows)


def _against_training(name: str, options: list[str], share: float, again: bool = False) -> list[Row]:
    """`analyze --induction` of all checkpoints of a run as a share of the time that its training took."""
    with temporary_folder() as folder:
        runs = Path(folder) / "runs"
        training = seconds([program(), "train", *options], folder, runs)
        analyze = [program(), "analyze", "--induction"]
        first = seconds(analyze, folder, runs)
        second = seconds(analyze, folder, runs) if again else None
        count = len(newest_run(runs).steps)
    rows = [
        limit(
            f"circuitscope analyze --induction, {count} checkpoints of {name}",
            f"{first:.1f} s = {first / training:.0%} of {training:.1f} s",
            f"at most {share:.0%} of the time the run took",
            first <= share * training,
            _NOTE,
        )
    ]
    if second is not None:
        rows.append(
            limit(
                "the same again",
                f"{second:.1f} s",
                "less than the first time",
                second < first,
                "scores and knockouts are read from the run's tables; imports and the search for transitions remain",
            )
        )
    return rows


def _wide(size: list[str]) -> list[Row]:
    """`analyze` and then `report` of three checkpoints of a wide model."""
    with temporary_folder() as folder:
        runs = Path(folder) / "runs"
        seconds([program(), "train", "--model", "mamba", *size, "--steps", "2", "--save-every", "1"], folder, runs)
        analysis = seconds([program(), "analyze"], folder, runs)
        report = seconds([program(), "report"], folder, runs)
        count = len(newest_run(runs).steps)
    called = f"width {size[1]}, length {size[3]}"
    return [
        limit(
            f"circuitscope analyze and report, {count} checkpoints of Mamba, {called}",
            f"{analysis:.1f} s + {report:.1f} s",
            f"at most {_SECONDS} s together",
            analysis + report <= _SECONDS,
            "two real processes, imports included; barely trained, so the circuit is looked for at every place",
        )
    ]


def _start(rounds: int) -> Row:
    """The time until `analyze` prints its first line, against a process that imports torch and transformer_lens."""
    imports = [sys.executable, "-c", "import torch, transformer_lens; print()"]
    with temporary_folder() as folder:
        runs = Path(folder) / "runs"
        train = [program(), "train", "--steps", "2", "--save-every", "1"]
        seconds(train, folder, runs)
        later = []
        for _ in range(rounds + 1):
            alone = _first_line(imports, folder, runs)
            later.append(_first_line([program(), "analyze"], folder, runs) - alone)
    middle = sorted(later[1:])[rounds // 2]
    return limit(
        "circuitscope analyze, first line, later than the imports of torch and transformer_lens",
        f"{middle:+.2f} s",
        f"at most {_LATER:g} s",
        middle <= _LATER,
        "the median difference of real processes that take turns, after one turn of each that does not count",
    )


def _first_line(command: list[str], folder: str | Path, runs: Path) -> float:
    """How long a command takes to print its first line; then it is left to end by itself."""
    began = time.perf_counter()
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        cwd=folder,
        env=os.environ | {"CIRCUITSCOPE_RUNS": str(runs), "PYTHONUNBUFFERED": "1"},
    ) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        taken = time.perf_counter() - began
        process.stdout.read()
    if not line or process.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with {process.returncode}")
    return taken
