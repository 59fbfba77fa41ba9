"""The results of a sweep: one row per trial and one table of curves, as CSV small enough to commit, and as parquet.

A row that stands in results.csv counts as done, with or without its run: a fresh clone with the table trains only what
is missing. Every row carries a check sum, so that a table that was edited by hand is noticed before anything is built
on it. Tables are written whole or not at all, and rows are only added or replaced, never dropped: a trial that is no
longer in the grid keeps its row.
"""

import csv
import hashlib
import io
import json
import math
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from circuitscope.errors import UserError
from circuitscope.runs.store import write_text, write_whole

if TYPE_CHECKING:
    import pandas as pd

Row = dict[str, Any]

DONE = ("finished", "diverged")  # a trial in another state is tried again
_DIGEST, _CHECK = "digest", "check"
_CURVE_KEYS = (_DIGEST, "step")
_REST = 20  # times as long as writing the tables took, they are not written again


class ResultsTable:
    """The rows of a sweep in FOLDER/results.csv, and the curves of its trials in FOLDER/curves.csv."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.path, self.curves_path = folder / "results.csv", folder / "curves.csv"
        self._due, self._unwritten = 0.0, False
        self.read()

    def read(self) -> None:
        """Reads the tables as they are on disk now."""
        self.rows: dict[str, Row] = {}
        for row in _read(self.path):
            if row[_DIGEST] in self.rows:
                raise UserError(f"{self.path}: two rows of the trial {row[_DIGEST]}; keep the one that is right")
            self.rows[row[_DIGEST]] = row
        self.curves: dict[str, list[Row]] = {}
        for row in _read(self.curves_path):
            curve = self.curves.setdefault(row[_DIGEST], [])
            if curve and row["step"] <= curve[-1]["step"]:
                after = f"step {row['step']} after step {curve[-1]['step']}"
                raise UserError(f"{self.curves_path}: the curve of {row[_DIGEST]} has {after}; expected steps in order")
            curve.append(row)

    def done(self, digest: str, measure: Iterable[str] = ()) -> bool:
        """Whether a trial has a row of a run that came to its end, with everything measured that is asked for."""
        row = self.rows.get(digest)
        if row is None or row.get("state") not in DONE:
            return False
        measured = set(str(row.get("measured") or "").split())
        return row["state"] == "diverged" or set(measure) <= measured

    def add(self, row: Row, curves: Iterable[Row], write: bool = True) -> None:
        """Adds a trial's row and curves, or replaces those it had, and writes the tables, or leaves that for later.

        A row of a run that came to its end is not replaced by one that says that something failed.
        """
        digest = row[_DIGEST]
        if row.get("state") not in DONE and self.rows.get(digest, {}).get("state") in DONE:
            return
        self.rows[digest] = _as_read(row)
        self.curves[digest] = [_as_read({_DIGEST: digest, **point}) for point in curves]
        self._unwritten = True
        if write:
            self.write()

    def frame(self) -> "pd.DataFrame":
        """The rows as a table."""
        import pandas as pd

        return pd.DataFrame(list(self.rows.values()), columns=_columns(self.rows.values()))

    def curve_frame(self) -> "pd.DataFrame":
        """The curves as a table: digest, step, and a column for each quantity."""
        import pandas as pd

        every = [point for points in self.curves.values() for point in points]
        return pd.DataFrame(every, columns=_columns(every))

    def write_changes(self, now: bool = True) -> None:
        """Writes the tables if rows were added since; unless `now` is set, not if they were written a moment ago.

        A moment is a multiple of the time that writing took, so that thousands of rows do not cost thousands of
        tables. A row that is not yet written stands in its run, where the next sweep finds it.
        """
        if self._unwritten and (now or time.monotonic() >= self._due):
            self.write()

    def write(self) -> None:
        """Writes results.csv, results.parquet and curves.csv, each whole or not at all."""
        began = time.monotonic()
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            write_text(self.path, _as_csv(self.rows.values()))
            write_text(self.curves_path, _as_csv(p for points in self.curves.values() for p in points))
            data = _uniform(self.frame()).to_parquet(index=False)
            write_whole(self.folder / "results.parquet", lambda file: file.write(data))
        except OSError as error:
            raise UserError(f"cannot write {self.path}: {error.strerror}") from None
        self._due, self._unwritten = time.monotonic() + _REST * (time.monotonic() - began), False


def _uniform(frame: "pd.DataFrame") -> "pd.DataFrame":
    """The same table with text in every column that mixes text and numbers, as parquet wants it."""
    mixed = [name for name in frame if len({type(value) for value in frame[name].dropna()} - {int, float}) > 0]
    return frame.astype({name: "string" for name in mixed if frame[name].dtype == object})


def _columns(rows: Iterable[Row]) -> list[str]:
    """All columns in the order of their first appearance; the check sum is not one of them."""
    return [name for name in dict.fromkeys(name for row in rows for name in row) if name != _CHECK]


def _as_csv(rows: Iterable[Row]) -> str:
    rows = list(rows)
    names = [*(_columns(rows) or [_DIGEST]), _CHECK]
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(names)
    for row in rows:
        cells = {name: _cell(row.get(name)) for name in names[:-1]}
        writer.writerow([*cells.values(), _check_sum(cells)])
    return out.getvalue()


def _read(path: Path) -> Iterator[Row]:
    """The rows of a table of ours; a table that is not as it was written is refused in one line."""
    if not path.exists():
        return
    try:
        reader = csv.DictReader(io.StringIO(path.read_text(encoding="utf-8")))
        lines = list(reader)
        names = reader.fieldnames or []
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"cannot read {path}: {error}") from None
    if _DIGEST not in names or _CHECK not in names:
        raise UserError(f"{path} is no table of a sweep: expected the columns {_DIGEST} and {_CHECK}")
    for number, line in enumerate(lines, start=2):
        check = line.pop(_CHECK)
        if None in line or None in line.values() or check != _check_sum(line):
            raise UserError(
                f"{path}, line {number}: the row is not as circuitscope wrote it; restore the table,"
                " or delete the row to train its trial again"
            )
        yield {name: _value(name, text) for name, text in line.items() if text != ""}


def _check_sum(cells: Mapping[str, str]) -> str:
    """Eight digits over the cells that are not empty, so that a column that is added later changes none of them."""
    text = json.dumps(sorted((name, cell) for name, cell in cells.items() if cell != ""))
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def _cell(value: Any) -> str:
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return ""
    if isinstance(value, float) and not value.is_integer():
        return f"{value:.6g}"
    if isinstance(value, float) and abs(value) < 2**53:
        return f"{value:.0f}.0"
    return str(value)


def _value(name: str, text: str) -> Any:
    """A cell as the value it stands for; a digest stays text, even if it looks like a number."""
    if name == _DIGEST or "_" in text:
        return text
    if text in ("True", "False"):
        return text == "True"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def _as_read(row: Row) -> Row:
    """A row as it will be read again, so that a table is the same before and after it was on disk."""
    return {name: _value(name, cell) for name, value in row.items() if (cell := _cell(value)) != ""}
