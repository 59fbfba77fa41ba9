"""Examples of a task as one Parquet file, for use elsewhere, with a digest by which the file can be checked.

The table has one row per example, with the lists `tokens`, `labels` (−100 where there is none) and `roles` (by name).
The digest is the SHA-256 of all tokens, row by row, followed by all labels, both as 64-bit little-endian integers. It
stands in the file's metadata under `circuitscope`, beside the task's fields, the split and the seed.
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


def digest(tokens: Any, labels: Any) -> str:
    """The SHA-256 of tokens and labels, [example, pos] each."""
    found = hashlib.sha256()
    for numbers in (tokens, labels):
        found.update(np.ascontiguousarray(numbers, dtype="<i8").tobytes())
    return found.hexdigest()


def export(task: Task, path: str | Path, *, examples: int, split: Split = "test", seed: int = 0) -> str:
    """Writes the first examples of a split to a Parquet file; gives their digest."""
    import pyarrow.parquet as pq

    if task.inputs != "tokens":
        raise UserError(f"export writes tokens, and {task.name} has {task.inputs}")
    path = Path(os.path.expanduser(path))
    if not path.parent.is_dir():
        raise UserError(f"cannot write {path}: there is no folder {path.parent}")
    batch = task.batch(0, split=split, size=examples, seed=seed)
    about = {
        "task": task.describe(),
        "split": split,
        "seed": seed,
        "digest": digest(batch.tokens.numpy(), batch.labels.numpy()),
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
        tokens, labels = (np.array(table[name].to_pylist(), dtype=np.int64) for name in ("tokens", "labels"))
        claimed, name = about["digest"], about["task"]["name"]
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or 'it is no Parquet file'}") from None
    except (KeyError, TypeError, ValueError, pa.ArrowException):
        raise UserError(f"{path} is no file that `circuitscope tasks export` has written") from None
    found = digest(tokens, labels)
    if found != claimed:
        raise UserError(f"{path} was changed: its digest is {found}, and it says {shown(claimed)}")
    return {
        "task": name,
        "split": about.get("split"),
        "seed": about.get("seed"),
        "digest": found,
        "examples": len(tokens),
    }


def _table(batch: Batch) -> "pa.Table":
    import pyarrow as pa

    names = [role.name for role in Role]
    length = batch.tokens.shape[1]
    roles = pa.DictionaryArray.from_arrays(pa.array(batch.layout.roles.numpy().ravel()), pa.array(names))
    columns = {
        "tokens": pa.array(batch.tokens.numpy().ravel()),
        "labels": pa.array(batch.labels.numpy().ravel()),
        "roles": roles.cast(pa.string()),
    }
    return pa.table({name: pa.FixedSizeListArray.from_arrays(values, length) for name, values in columns.items()})
