"""metrics.jsonl: one JSON object per line, appended during training.

Fields of a row:
    step      number of updates so far
    split     "train" (the batch of that step) or "validation" (held-out examples)
    loss      mean cross-entropy at labelled positions
    accuracy  share of labelled positions answered correctly
    lr        learning rate of the last update
    tokens    tokens trained on so far
    seconds   time spent training so far
Validation rows also have `loss_per_batch` and `accuracy_per_batch`, so that one run gives an interval.
A line {"resumed_from": s} says that training went back to step s: earlier rows with a larger step are void.
"""

import json
from pathlib import Path
from typing import IO, Any

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


def read_metrics(run: Path) -> list[dict[str, Any]]:
    """The rows of a run in order of step, without those that a resume made void and without an incomplete last line."""
    path = run / "metrics.jsonl"
    rows: list[dict[str, Any]] = []
    if not path.exists():
        return rows
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            continue  # the process was killed while it wrote this line
        if not isinstance(row, dict):
            continue
        if "resumed_from" in row:
            rows = [r for r in rows if r["step"] <= row["resumed_from"]]
        elif "step" in row:
            rows.append(row)
    return rows


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
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if isinstance(row, dict) and isinstance(step := row.get("step", row.get("resumed_from")), int):
            return max(0, step)
    return None


def _ends_in_mid_line(path: Path) -> bool:
    if not path.exists() or path.stat().st_size == 0:
        return False
    with open(path, "rb") as file:
        file.seek(-1, 2)
        return file.read(1) != b"\n"
