"""The table of a sweep is read as it was written, and what was edited by hand is noticed."""

import pytest

from circuitscope.errors import UserError
from circuitscope.runs.store import write_text
from circuitscope.sweeps import results
from circuitscope.sweeps.results import ResultsTable

ROW = {
    "digest": "0123456789ab",
    "model.preset": "mamba",
    "train.lr": 1e-3,
    "task.pairs": 4,
    "state": "finished",
    "seconds": 12.0,
    "step_99": float("nan"),
    "solved": True,
    "measured": "circuit",
}
CURVES = [{"step": 0, "loss": 9.01, "accuracy": 0.0}, {"step": 50, "loss": 3.5, "accuracy": 0.25}]


def test_rows_and_curves_are_the_same_after_they_were_on_disk(tmp_path):
    table = ResultsTable(tmp_path)
    table.add(ROW, CURVES)
    table.add({**ROW, "digest": "111122223333", "extra": 1.5}, [])
    again = ResultsTable(tmp_path)
    assert again.rows == table.rows
    assert again.curves["0123456789ab"] == table.curves["0123456789ab"]
    assert list(again.rows) == ["0123456789ab", "111122223333"]  # digests stay text
    assert again.rows["0123456789ab"]["train.lr"] == 1e-3
    assert again.rows["0123456789ab"]["solved"] is True
    assert "step_99" not in again.rows["0123456789ab"]
    assert (tmp_path / "results.parquet").exists()


def test_a_row_that_is_written_again_gives_the_same_file(tmp_path):
    ResultsTable(tmp_path).add(ROW, CURVES)
    before = (tmp_path / "results.csv").read_bytes()
    ResultsTable(tmp_path).write()
    assert (tmp_path / "results.csv").read_bytes() == before


def test_done_means_that_the_run_came_to_its_end_with_everything_measured(tmp_path):
    table = ResultsTable(tmp_path)
    assert not table.done("0123456789ab")
    table.add(ROW, [])
    assert table.done("0123456789ab", ["circuit"])
    assert not table.done("0123456789ab", ["circuit", "decay"])
    table.add({**ROW, "digest": "111122223333", "state": "failed"}, [])
    assert not table.done("111122223333")
    table.add({**ROW, "state": "diverged", "measured": None}, [])
    assert table.done("0123456789ab", ["circuit"])


def test_a_table_that_was_edited_by_hand_is_refused_with_its_line(tmp_path):
    ResultsTable(tmp_path).add(ROW, [])
    path = tmp_path / "results.csv"
    text = path.read_text()
    path.write_text(text.replace("mamba", "mamba2"))
    with pytest.raises(UserError, match=r"results.csv, line 2: the row is not as circuitscope wrote it"):
        ResultsTable(tmp_path)
    path.write_text(text.splitlines()[0] + "\n0123456789ab,mamba\n")
    with pytest.raises(UserError, match="line 2"):
        ResultsTable(tmp_path)
    path.write_text("a,b\n1,2\n")
    with pytest.raises(UserError, match="no table of a sweep"):
        ResultsTable(tmp_path)
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(UserError, match="cannot read"):
        ResultsTable(tmp_path)


def test_a_column_that_mixes_text_and_numbers_can_be_kept(tmp_path):
    table = ResultsTable(tmp_path)
    table.add({**ROW, "train.clip": 1.0}, [])
    table.add({**ROW, "digest": "111122223333", "train.clip": "off"}, [])
    assert [row["train.clip"] for row in ResultsTable(tmp_path).rows.values()] == [1.0, "off"]


def test_a_failure_does_not_take_the_place_of_what_was_found(tmp_path):
    table = ResultsTable(tmp_path)
    table.add(ROW, CURVES)
    table.add({"digest": ROW["digest"], "state": "failed", "message": "disk full"}, [])
    assert ResultsTable(tmp_path).rows[ROW["digest"]]["state"] == "finished"
    assert len(ResultsTable(tmp_path).curves[ROW["digest"]]) == 2


def test_a_thousand_rows_do_not_cost_a_thousand_tables(tmp_path, monkeypatch):
    table, written = ResultsTable(tmp_path), []
    monkeypatch.setattr(results, "write_text", lambda path, text: (written.append(path.name), write_text(path, text)))
    for number in range(200):
        table.add({**ROW, "digest": f"{number:012d}"}, CURVES, write=False)
        table.write_changes(now=False)
    assert 1 <= written.count("results.csv") <= 20
    table.write_changes()
    assert len(ResultsTable(tmp_path).rows) == 200
    done = len(written)
    table.write_changes()
    assert len(written) == done  # nothing has changed
