"""(e) How long help takes, against a Typer program that does nothing."""

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.rows import Row, Section, alternate, duration, spread

_EMPTY = '''\
import typer

app = typer.Typer()


@app.command()
def main() -> None:
    """Do nothing."""


app()
'''


def program() -> str:
    """The installed `circuitscope`, next to this Python."""
    path = Path(sys.executable).with_name("circuitscope")
    if not path.exists():
        raise RuntimeError("there is no circuitscope program next to this Python; install the project first")
    return str(path)


def seconds(command: list[str], folder: str | Path, runs: Path) -> float:
    """How long a command takes, with its runs in a folder of their own."""
    began = time.perf_counter()
    subprocess.run(
        command,
        check=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        cwd=folder,
        env=os.environ | {"CIRCUITSCOPE_RUNS": str(runs)},
    )
    return time.perf_counter() - began


def measure(quick: bool) -> Section:
    with tempfile.TemporaryDirectory() as folder:
        empty = Path(folder) / "empty.py"
        empty.write_text(_EMPTY)
        sides = [
            _call(program(), "--help"),
            _call(program(), "train", "--help"),
            _call(sys.executable, str(empty), "--help"),
        ]
        top, train, nothing = alternate(sides, 1 if quick else 15)
    return Section([_row("circuitscope --help", top, nothing), _row("circuitscope train --help", train, nothing)])


def _call(*command: str) -> Callable[[], object]:
    return lambda: subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def _row(name: str, ours: list[float], other: list[float]) -> Row:
    more = [a - b for a, b in zip(ours, other, strict=True)]
    return Row(
        name,
        duration(ours),
        duration(other),
        spread(more, "{:+.3f}", " s"),
        "at most +0.1 s",
        statistics.median(more) <= 0.1,
        "real processes; the other side is an empty Typer program's --help; the ratio column holds the difference",
    )
