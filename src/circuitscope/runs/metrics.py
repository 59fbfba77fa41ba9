"""metrics.jsonl: one JSON object per line, appended during training.

Fields of a row:
    step      number of updates so far
    split     "train" (the batch of that step) or "validation" (held-out examples)
    loss      mean cross-entropy at labelled positions
    accuracy  share of labelled positions answered correctly
    lr        learning rate of the last update
    tokens    tokens trained on so far
    seconds   time spent training so far
Train rows also say how long the gradient is before it is clipped, and how often it is clipped:
    grad_norm        norm of the gradient of this step over all parameters
    grad_norm/GROUP  the same over one group of parameters, such as embed or ssm.A_log, over all layers
    clipped          share of the steps since the train row before whose gradient was clipped
Validation rows also have `loss_per_batch` and `accuracy_per_batch`, so that one run gives an interval.
A line {"resumed_from": s} says that training went back to step s: earlier rows with a larger step are void.
"""

import json
import os
from pathlib import Path
from typing import IO, Any

from circuitscope.runs.damage import DamagedFile, check_regular, warn_once

_END = 1 << 16  # bytes of the file in which to look for the last row


class MetricsLog:
    """Appends rows, and hands each to the operating system at once."""

    def __init__(self, run: Path, resumed_from: int | None = None):
        self.path = run / "metrics.jsonl"
        torn = _ends_in_mid_line(self.path)
        self._file: IO[str] = open(self.path, "a", encoding="utf-8", buffering=1)  # noqa: SIM115
        if torn:
            self._file.write("\n")
        if resumed_from is not None:
            self.write({"resumed_from": resumed_from})

    def write(self, row: dict[str, Any]) -> None:
        self._file.write(json.dumps(row) + "\n")

    def close(self) -> None:
        self._file.close()


def read_metrics(run: Path, metric: str | None = None) -> list[dict[str, Any]]:
    """The rows of a run in order of step, without those that a resume made void.

    Lines that are damaged are left out with a warning. A line that a kill tore, at the end of the file or just before a
    resume, is left out without one.

    Args:
        metric: the task's metric. With it, every row must have what figures and analyses read.
    """
    path = run / "metrics.jsonl"
    rows: list[dict[str, Any]] = []
    try:
        check_regular(path)
        lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    except (DamagedFile, OSError) as error:
        if os.path.lexists(path):
            warn_once(f"{error}; its metrics are not used")
        return rows
    damaged: list[int] = []
    batches: set[int] = set()  # how many an evaluation has
    for number, line in enumerate(lines, 1):
        row = _parsed(line)
        if row is not None and _is_step(row.get("resumed_from"), least=-1):
            rows = [r for r in rows if r["step"] <= row["resumed_from"]]
            damaged = [n for n in damaged if n != number - 1]
        elif row is not None and _is_sound(row, metric) and len(batches | _batches(row)) <= 1:
            batches |= _batches(row)
            rows.append(row)
        elif line.strip():
            damaged.append(number)
    damaged = [n for n in damaged if n != len(lines)]
    if damaged:
        which = f"lines {damaged[0]} and {len(damaged) - 1} more are" if damaged[1:] else f"line {damaged[0]} is"
        warn_once(f"{path}: {which} damaged and left out")
    return rows


def _parsed(line: str) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) else None


def _is_sound(row: dict[str, Any], metric: str | None) -> bool:
    """Whether a row has its fields, each of its type."""
    needs = {"step"} if metric is None else {"step", "split", "loss", metric}
    if metric is not None and row.get("split") == "validation":
        needs |= {"loss_per_batch", f"{metric}_per_batch"}
    known = _is_step(row.get("step")) and row.get("split", "train") in ("train", "validation")
    return known and needs <= row.keys() and all(_is_right(name, value) for name, value in row.items())


def _is_right(name: str, value: Any) -> bool:
    if name.endswith("_per_batch"):
        return isinstance(value, list) and len(value) > 0 and all(map(_is_number, value))
    return name == "split" or _is_number(value)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and not abs(value) > 1e300


def _is_step(value: Any, least: int = 0) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value < 10**9


def _batches(row: dict[str, Any]) -> set[int]:
    return {len(value) for name, value in row.items() if name.endswith("_per_batch")}


def last_step(run: Path) -> int | None:
    """The step of the last row, from the end of the file alone; None where there is no whole row yet."""
    try:
        with open(run / "metrics.jsonl", "rb") as file:
            file.seek(0, 2)
            start = max(0, file.tell() - _END)
            file.seek(start)
            lines = file.read().split(b"\n")[1 if start else 0 : -1]  # an incomplete line may be at either end
    except OSError:
        return None
    for line in reversed(lines):
        row = _parsed(line.decode(errors="replace")) or {}
        step: Any = row.get("step", row.get("resumed_from"))
        if _is_step(step, least=-1):
            return max(0, int(step))
    return None


def _ends_in_mid_line(path: Path) -> bool:
    if not path.exists() or path.stat().st_size == 0:
        return False
    with open(path, "rb") as file:
        file.seek(-1, 2)
        return file.read(1) != b"\n"
