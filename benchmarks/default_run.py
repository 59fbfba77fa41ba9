"""(f) The default run, from the command line and with no options: time and accuracy."""

import os
import subprocess
import time
from pathlib import Path

from benchmarks.rows import Section, limit
from benchmarks.startup import program
from benchmarks.workload import temporary_folder
from circuitscope.runs.run import newest_run


def measure(quick: bool) -> Section:
    options = ["--steps", "5"] if quick else []
    with temporary_folder() as folder:
        began = time.perf_counter()
        subprocess.run(
            [program(), "train", *options],
            check=True,
            stdout=subprocess.DEVNULL,
            cwd=folder,
            env=os.environ | {"CIRCUITSCOPE_RUNS": str(Path(folder) / "runs")},
        )
        seconds = time.perf_counter() - began
        rows = newest_run(Path(folder) / "runs").metrics
    held = rows[rows.split == "validation"]
    accuracy = float(held.iloc[-1].accuracy)
    reached = held[held.accuracy >= 0.99]
    when = f"; 99% first at step {int(reached.iloc[0].step)}" if len(reached) else ""
    note = f"one real process, imports included, {int(held.iloc[-1].step)} steps{when}"
    return Section(
        [
            limit("circuitscope train, time", f"{seconds:.1f} s", "at most 120 s on 2 cores", seconds <= 120, note),
            limit("circuitscope train, validation accuracy", f"{accuracy:.2%}", "at least 99%", accuracy >= 0.99),
        ]
    )
