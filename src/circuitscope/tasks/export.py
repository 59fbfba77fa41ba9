"""Examples of a task as one Parquet file, for use elsewhere, with a digest by which the file can be checked.

The table has one row per example, with the lists `tokens`, `labels` (−100 where there is none) and `roles` (by name).
Vectors are lists of numbers in the lists `vectors` and `labels` (nan where there is none). The digest is the SHA-256 of
all tokens, row by row, followed by all labels, both as 64-bit little-endian integers; of vectors and their labels as
32-bit little-endian floats. It stands in the file's metadata under `circuitscope`, beside the task's fields, the split
and the seed.
"""

import hashlib
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from circuitscope.errors import UserError, shown
from circuitscope.tasks.base import Split, Task
from circuitscope.tasks.batch import Batch
from circuitscope.tasks.roles import Role

if TYPE_CHECKING:
    import pyarrow as pa

_KEY = b"circuitscope"


def digest(inputs: Any, labels: Any) -> str:
    """The SHA-256 of tokens and labels, [example, pos] each, or of vectors, [example, pos, channel]."""
    found = hashlib.sha256()
    for numbers in (np.asarray(inputs), np.asarray(labels)):
        kind = "<f4" if np.issubdtype(numbers.dtype, np.floating) else "<i8"
        found.update(np.ascontiguousarray(numbers, dtype=kind).tobytes())
    return found.hexdigest()


def export(task: Task, path: str | Path, *, examples: int, split: Split = "test", seed: int = 0) -> str:
    """Writes the first examples of a split to a Parquet file; gives their digest."""
    import pyarrow.parquet as pq

    path = Path(os.path.expanduser(path))
    if not path.parent.is_dir():
        raise UserError(f"cannot write {path}: there is no folder {path.parent}")
    batch = task.batch(0, split=split, size=examples, seed=seed)
    about = {
        "task": task.describe(),
        "split": split,
        "seed": seed,
        "digest": digest(batch.inputs.numpy(), batch.labels.numpy()),
    }
    table = _table(batch).replace_schema_metadata({_KEY: json.dumps(about).encode()})
    unfinished = path.with_name(path.name + ".unfinished")
    try:
        pq.write_table(table, unfinished)
        os.replace(unfinished, path)
    except OSError as error:
        unfinished.unlink(missing_ok=True)
        raise UserError(f"cannot write {path}: {error.strerror or error}") from None
    return str(about["digest"])


def check(path: str | Path) -> dict[str, Any]:
    """The name of an exported file's task, its split, seed, digest and examples. A file that was changed is refused."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        table = pq.read_table(os.path.expanduser(path))
        about = json.loads((table.schema.metadata or {})[_KEY])
        vectors = "vectors" in table.column_names
        names, kind = ("vectors" if vectors else "tokens", "labels"), np.float32 if vectors else np.int64
        inputs, labels = (np.array(table[name].to_pylist(), dtype=kind) for name in names)
        claimed, name = about["digest"], about["task"]["name"]
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or 'it is no Parquet file'}") from None
    except (KeyError, TypeError, ValueError, pa.ArrowException):
        raise UserError(f"{path} is no file that `circuitscope tasks export` has written") from None
    found = digest(inputs, labels)
    if found != claimed:
        raise UserError(f"{path} was changed: its digest is {found}, and it says {shown(claimed)}")
    return {
        "task": name,
        "split": about.get("split"),
        "seed": about.get("seed"),
        "digest": found,
        "examples": len(inputs),
    }


def _table(batch: Batch) -> "pa.Table":
    import pyarrow as pa

    names = [role.name for role in Role]
    roles = pa.DictionaryArray.from_arrays(pa.array(batch.layout.roles.numpy().ravel()), pa.array(names))
    columns = {
        "vectors" if batch.inputs.is_floating_point() else "tokens": _cells(batch.inputs.numpy()),
        "labels": _cells(batch.labels.numpy()),
        "roles": roles.cast(pa.string()),
    }
    return pa.table({name: pa.FixedSizeListArray.from_arrays(values, batch.length) for name, values in columns.items()})


def _cells(numbers: Any) -> "pa.Array":
    """What stands at each position: a number, or a list of them."""
    import pyarrow as pa

    flat = pa.array(numbers.ravel())
    return flat if numbers.ndim == 2 else pa.FixedSizeListArray.from_arrays(flat, numbers.shape[2])
