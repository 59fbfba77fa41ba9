"""Tidy tables of results on disk: one parquet file per analysis, grown checkpoint by checkpoint.

A file is written whole under a temporary name and renamed, so at any instant it is absent or complete. Its metadata
say what it was computed with and, for each step, the digest of the checkpoint behind its rows, and the device where it
was not the CPU. Rows are not used again if the checkpoint has been replaced since, or if they were computed with
something else; those of another device are, because they differ by rounding alone.
"""

import io
import json
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
from filelock import FileLock, Timeout

from circuitscope.errors import Busy, UserError, unknown
from circuitscope.runs.store import write_whole

_KEY = b"circuitscope"
_SECONDS = 5.0  # between writes


class Table:
    """Rows by step in `path`. Use as a context manager: leaving it, even after an error, writes all rows.

    While it is open no other process can open it. Where `holds` says that no rows are missing, `frame` has them without
    that, so a table that is complete can be read from a disk that cannot be written.

    Args:
        columns: names and pandas types, in order; one of them is "step".
        settings: what kind of table this is. A file with other settings is renamed and not used.
        depends_on: what else all rows depend on. Rows that were made with another value are dropped.
        digests: digests of the checkpoints that are asked for, by step. Rows of these steps are dropped if they were
            read from a checkpoint with another digest.
        device: where new rows are computed.
    """

    def __init__(
        self,
        path: Path,
        columns: dict[str, str],
        settings: dict[str, Any],
        depends_on: Any = None,
        digests: Mapping[int, str] | None = None,
        device: str = "cpu",
    ):
        self.path, self.columns, self.digests, self.device = path, columns, dict(digests or {}), device
        self.settings, self.depends_on = _as_json(settings), _as_json(depends_on)
        self._new: list[dict[str, Any]] = []
        self._new_steps: set[int] = set()
        self._written, self._pause = time.monotonic(), _SECONDS
        self._forget()

    def __enter__(self) -> "Table":
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._lock = FileLock(self.path.with_name(f".{self.path.stem}.lock"), timeout=0)
            self._lock.acquire()
        except Timeout:
            raise Busy(f"{self.path} is being written by another analysis of this run; wait until it is done") from None
        except OSError as error:
            raise UserError(f"cannot write to {self.path.parent}: {error.strerror}") from None
        try:
            if why := self._read():
                self._set_aside(why)
        except BaseException:
            self._lock.release()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        try:
            self.write()
        finally:
            self._lock.release()

    def holds(self, steps: Iterable[int]) -> bool:
        """Whether the rows of all these steps are on disk and can be used. It takes no lock and writes nothing."""
        return not self._read() and not self.notes and self.steps.issuperset(steps)

    @property
    def steps(self) -> set[int]:
        """Steps that were read, also those that gave no rows."""
        return {int(s) for s in self._read_from} | {int(s) for s in self._saved["step"].unique()} | self._new_steps

    def add(self, step: int, rows: Iterable[dict[str, Any]]) -> None:
        """Adds the rows of one more checkpoint, maybe none; writes to disk if the last write was some seconds ago."""
        new = list(rows)
        for row in new:
            for name in row.keys() - self.columns.keys():
                raise unknown(f"column of {self.path.stem}", name, self.columns)
        self._new += new
        self._new_steps.add(step)
        if time.monotonic() - self._written > self._pause:
            self.write()

    def write(self) -> None:
        """Writes all rows to disk."""
        if not self._new_steps:
            return
        began = time.monotonic()
        self._saved, self._new = self.frame(), []
        self._read_from |= {str(s): self.digests[s] for s in sorted(self._new_steps) if s in self.digests}
        for step in sorted(self._new_steps):
            self._devices.pop(str(step), None)
            if self.device != "cpu":
                self._devices[str(step)] = self.device
        self._new_steps = set()
        made_with = {"settings": self.settings, "depends_on": self.depends_on, "checkpoints": self._read_from}
        made_with |= {"devices": self._devices} if self._devices else {}
        table = pa.Table.from_pandas(self._saved, preserve_index=False)
        table = table.replace_schema_metadata({**(table.schema.metadata or {}), _KEY: json.dumps(made_with)})
        buffer = io.BytesIO()
        pq.write_table(table, buffer, compression="zstd")
        try:
            write_whole(self.path, lambda file: file.write(buffer.getvalue()))
        except OSError as error:
            raise UserError(f"cannot write {self.path}: {error.strerror}") from None
        self._written = time.monotonic()
        self._pause = max(_SECONDS, 10 * (self._written - began))

    def elsewhere(self, steps: Iterable[int]) -> str:
        """Which devices computed the rows on disk of these steps, in words, if that was another device than this."""
        saved = self.steps - self._new_steps
        found = {self._devices.get(str(step), "cpu") for step in steps if step in saved} - {self.device}
        return f", on another device ({', '.join(sorted(found))}), which differs by rounding" if found else ""

    def frame(self) -> pd.DataFrame:
        """All rows, in order of step."""
        if not self._new:
            return self._saved
        try:
            new = pd.DataFrame(self._new, columns=list(self.columns)).astype(self.columns)
        except (ValueError, TypeError) as error:
            raise UserError(f"{self.path.stem}: rows do not have the types of the columns: {error}") from None
        return pd.concat([self._saved, new], ignore_index=True).sort_values("step", kind="stable", ignore_index=True)

    def _forget(self) -> None:
        self._saved = pd.DataFrame({name: pd.Series(dtype=kind) for name, kind in self.columns.items()})
        self._read_from: dict[str, str] = {}  # digests of the checkpoints behind the saved rows
        self._devices: dict[str, str] = {}  # where the saved rows were computed, if not on the CPU
        self.notes: list[str] = []  # what the user should know about the rows on disk

    def _read(self) -> str:
        """Loads the rows on disk that can be used again, and notes which cannot; says why a whole file cannot be."""
        self._forget()
        if not self.path.exists():
            return ""
        try:
            table = pq.read_table(self.path)
            made_with = json.loads((table.schema.metadata or {}).get(_KEY, b"{}"))
            if made_with.get("settings") != self.settings:
                return "was made by another version or with other settings"
            depends_on, read_from = made_with["depends_on"], dict(made_with["checkpoints"])
            computed_on = {str(step): str(device) for step, device in made_with.get("devices", {}).items()}
            frame: pd.DataFrame = table.to_pandas().astype(self.columns)[list(self.columns)]
        except (OSError, ValueError, KeyError, TypeError, AttributeError, pa.ArrowException):
            return "is damaged"
        if depends_on != self.depends_on:
            how = _difference(depends_on, self.depends_on)
            self.notes.append(f"{self.path.name} {how}; its rows are computed again")
            return ""
        known = {*frame.step, *map(int, read_from)}
        replaced = [s for s, digest in self.digests.items() if s in known and read_from.get(str(s)) != digest]
        if replaced:
            several = len(replaced) > 1
            which = f"{len(replaced)} checkpoints were" if several else f"checkpoint {replaced[0]} was"
            since, whose = ("they were", "their") if several else ("it was", "its")
            self.notes.append(
                f"{self.path.name}: {which} replaced since {since} analyzed; {whose} rows are computed again"
            )
        self._saved = frame[~frame.step.isin(replaced)].reset_index(drop=True)
        self._read_from = {step: digest for step, digest in read_from.items() if int(step) not in replaced}
        self._devices = {step: device for step, device in computed_on.items() if int(step) not in replaced}
        return ""

    def _set_aside(self, why: str) -> None:
        number = 1
        while (aside := self.path.with_name(f"{self.path.stem}.old-{number}.parquet")).exists():
            number += 1
        try:
            self.path.rename(aside)
        except OSError as error:
            raise UserError(f"{self.path} {why} and cannot be moved out of the way: {error.strerror}") from None
        self.notes.append(f"warning: {self.path} {why}; it is kept as {aside.name} and computed again")


def rows_on_disk(path: Path, columns: Mapping[str, str], version: int, digests: Mapping[int, str]) -> pd.DataFrame:
    """The rows of a table that were read from these checkpoints; none if the file is damaged or of another version.

    The file is neither locked nor changed.
    """
    try:
        table = pq.read_table(path)
        made_with = json.loads((table.schema.metadata or {})[_KEY])
        read_from = {int(step): digest for step, digest in made_with["checkpoints"].items()}
        current = {step for step, digest in read_from.items() if digests.get(step) == digest}
        if made_with["settings"]["version"] != version:
            current = set()
        frame: pd.DataFrame = table.to_pandas().astype(dict(columns))[list(columns)]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, pa.ArrowException):
        return pd.DataFrame({name: pd.Series(dtype=kind) for name, kind in columns.items()})
    return frame[frame.step.isin(current)].reset_index(drop=True)


def _as_json(value: Any) -> Any:
    """A value as it comes back from a JSON file."""
    return json.loads(json.dumps(value))


def _difference(before: Any, now: Any) -> str:
    """Says how the value that a table was made with differs from today's."""
    if not (isinstance(before, list) and isinstance(now, list)):
        return "was made with other settings"
    missing, gone = ([str(x) for x in a if x not in b] for a, b in ((now, before), (before, now)))
    parts = [f"without {', '.join(missing)}"] * bool(missing) + [f"with {', '.join(gone)}"] * bool(gone)
    return f"was made {' and '.join(parts)}" if parts else "was made in another order"
