"""Vectors are exported as they are, with a digest that notices a change."""

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import circuitscope as cs
from circuitscope.tasks.export import check, digest, export


@pytest.mark.parametrize("name", ["linear_regression", "chain_of_thought", "vector_mqar"])
def test_an_exported_file_holds_the_vectors_of_the_batch(name, tmp_path):
    task = cs.task(name, **cs.tasks.TASKS[name].small)
    batch = task.batch(0, split="test", size=7)
    found = export(task, tmp_path / "out.parquet", examples=7)
    table = pq.read_table(tmp_path / "out.parquet")
    assert table.column_names == ["vectors", "labels", "roles"]
    assert np.array_equal(np.array(table["vectors"].to_pylist(), dtype=np.float32), batch.inputs.numpy())
    labels = np.array(table["labels"].to_pylist(), dtype=np.float32)
    assert np.array_equal(labels, batch.labels.numpy(), equal_nan=True)
    assert check(tmp_path / "out.parquet")["digest"] == found == digest(batch.inputs.numpy(), batch.labels.numpy())


def test_a_changed_file_is_refused(tmp_path):
    task = cs.task("linear_regression", dims=2, points=3)
    export(task, tmp_path / "out.parquet", examples=4)
    table = pq.read_table(tmp_path / "out.parquet")
    vectors = np.array(table["vectors"].to_pylist(), dtype=np.float32)
    vectors[2, 1, 0] += 1
    cells = pa.FixedSizeListArray.from_arrays(pa.array(vectors.ravel()), 2)
    changed = table.set_column(0, "vectors", pa.FixedSizeListArray.from_arrays(cells, 6))
    pq.write_table(changed, tmp_path / "out.parquet")
    with pytest.raises(cs.UserError, match="was changed: its digest is"):
        check(tmp_path / "out.parquet")
