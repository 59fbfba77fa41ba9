"""Tidy tables of results on disk: one parquet file per kind of analysis, grown checkpoint by checkpoint.

A file is written whole under a temporary name and renamed, so at any instant it is absent or complete;
what it was computed with stands in its metadata, and results of other settings go to another file.
"""

import io
import json
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
from filelock import FileLock, Timeout

from circuitscope.errors import UserError
from circuitscope.runs.store import write_whole

_KEY = b"circuitscope"
_SECONDS = 5.0  # between writes


class Table:
    """Rows by step in `path`. Use as a context manager: leaving it, by an error too, writes what is done.

    Args:
        columns: names and pandas types, in order; "step" among them.
        settings: what the rows depend on besides the checkpoint.
    """

    def __init__(self, path: Path, columns: dict[str, str], settings: dict[str, Any]):
        self.path, self.columns, self.settings = path, columns, settings
        self.warning = ""
        self._new: list[dict[str, Any]] = []
        self._written, self._pause = time.monotonic(), _SECONDS
        self._saved = self._read()

    def _read(self) -> pd.DataFrame:
        empty = pd.DataFrame({name: pd.Series(dtype=kind) for name, kind in self.columns.items()})
        if not self.path.exists():
            return empty
        try:
            table = pq.read_table(self.path)
            settings = json.loads((table.schema.metadata or {}).get(_KEY, b"{}"))
            frame: pd.DataFrame = table.to_pandas().astype(self.columns)[list(self.columns)]
        except (OSError, ValueError, KeyError, TypeError, pa.ArrowException):
            self._set_aside("damaged, or of another version")
            return empty
        if settings != self.settings:
            self._set_aside("computed with other settings")
            return empty
        return frame

    def _set_aside(self, why: str) -> None:
        number = 1
        while (aside := self.path.with_name(f"{self.path.stem}.old-{number}.parquet")).exists():
            number += 1
        try:
            self.path.rename(aside)
        except OSError as error:
            raise UserError(f"cannot move {self.path} ({why}) out of the way: {error.strerror}") from None
        self.warning = f"warning: {self.path} is {why}; it is kept as {aside.name} and computed again"

    def __enter__(self) -> "Table":
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._lock = FileLock(self.path.with_name(f".{self.path.stem}.lock"), timeout=0)
            self._lock.acquire()
        except Timeout:
            raise UserError(f"{self.path} is being written by another process; wait for it") from None
        except OSError as error:
            raise UserError(f"cannot write to {self.path.parent}: {error.strerror}") from None
        return self

    def __exit__(self, *error: object) -> None:
        try:
            self.write()
        finally:
            self._lock.release()

    @property
    def steps(self) -> set[int]:
        """Steps that have rows."""
        return {int(s) for s in self._saved["step"].unique()} | {row["step"] for row in self._new}

    def add(self, rows: Iterable[dict[str, Any]]) -> None:
        """Rows of one more checkpoint; on disk within some seconds."""
        self._new.extend(rows)
        if time.monotonic() - self._written > self._pause:
            self.write()

    def write(self) -> None:
        """Brings all rows to the disk."""
        if not self._new:
            return
        began = time.monotonic()
        self._saved, self._new = self.frame(), []
        table = pa.Table.from_pandas(self._saved, preserve_index=False)
        table = table.replace_schema_metadata({**(table.schema.metadata or {}), _KEY: json.dumps(self.settings)})
        buffer = io.BytesIO()
        pq.write_table(table, buffer, compression="zstd")
        try:
            write_whole(self.path, lambda file: file.write(buffer.getvalue()))
        except OSError as error:
            raise UserError(f"cannot write {self.path}: {error.strerror}") from None
        self._written = time.monotonic()
        self._pause = max(_SECONDS, 10 * (self._written - began))

    def frame(self) -> pd.DataFrame:
        """All rows, in order of step."""
        if not self._new:
            return self._saved
        new = pd.DataFrame(self._new, columns=list(self.columns)).astype(self.columns)
        return pd.concat([self._saved, new], ignore_index=True).sort_values("step", kind="stable", ignore_index=True)
