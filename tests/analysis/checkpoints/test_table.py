"""Rows on disk are used again only with the checkpoint and the scores they were made with, by one process at a time."""

import errno
import json
import subprocess
import sys

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import circuitscope as cs
from circuitscope.analysis.checkpoints import runner, table
from circuitscope.analysis.checkpoints.runner import analysis_results, analysis_table, analyze
from circuitscope.analysis.checkpoints.table import Table
from circuitscope.analysis.scores.edges import previous_token
from circuitscope.analysis.scores.registry import SCORES, edge_score
from circuitscope.errors import UserError
from circuitscope.runs.checkpoints import checkpoint_name, write_checkpoint
from circuitscope.training.trainer import train
from registered import added_to
from tiny_run import Listens, listing, tiny


@pytest.fixture
def run(tmp_path):
    return train(tiny(), root=tmp_path, name="tiny")


def replace(run, step, by):
    """The checkpoint of a step now holds the weights of another."""
    write_checkpoint(run.checkpoints.folder / checkpoint_name(step), step, run.checkpoints.load(by), run.digest)


def of_step(frame, step):
    return frame[frame.step == step].drop(columns="step").reset_index(drop=True)


def test_rows_of_a_replaced_checkpoint_are_computed_again_and_it_is_said(run):
    before = analyze(run)
    replace(run, 3, by=12)
    told = Listens()
    after = analyze(run, progress=told)
    assert told.steps == [3]
    assert told.lines[0] == (
        "scores.parquet: checkpoint 3 was replaced since it was analyzed; its rows are computed again"
    )
    pd.testing.assert_frame_equal(of_step(after, 3), of_step(before, 12))
    pd.testing.assert_frame_equal(of_step(after, 6), of_step(before, 6))
    assert after.step.is_monotonic_increasing
    again = Listens()
    pd.testing.assert_frame_equal(analyze(run, progress=again), after)
    assert again.steps == []
    assert again.lines == ["scores: 5 of 5 checkpoints were analyzed before"]


def test_several_replaced_checkpoints_are_said_in_one_line_and_only_those_asked_for_are_read(run):
    analyze(run)
    for step in (3, 6, 9):
        replace(run, step, by=12)
    told = Listens()
    analyze(run, steps="3,6", progress=told)
    assert told.steps == [3, 6]
    assert told.lines[0].startswith("scores.parquet: 2 checkpoints were replaced since they were analyzed")
    later = Listens()
    analyze(run, progress=later)
    assert later.steps == [9]


def test_a_table_made_before_a_score_existed_is_computed_again_and_it_is_said(run):
    analyze(run)
    with added_to(SCORES):
        edge_score("one_back", "on the position before, once more")(previous_token)
        told = Listens()
        frame = analyze(run, progress=told)
        assert told.steps == run.steps
        assert told.lines == ["scores.parquet was made without one_back; its rows are computed again"]
        assert set(frame.step) == set(run.steps)
        pd.testing.assert_series_equal(
            frame[frame.score == "one_back"].value.reset_index(drop=True),
            frame[frame.score == "previous_token"].value.reset_index(drop=True),
        )
    told = Listens()
    assert "one_back" not in set(analyze(run, progress=told).score)
    assert told.lines == ["scores.parquet was made with one_back; its rows are computed again"]


def test_a_table_of_the_first_version_is_set_aside_in_one_line(run):
    frame = analyze(run)
    path = run.path / "analysis" / "scores.parquet"
    old = pa.Table.from_pandas(frame.drop(columns="unit"), preserve_index=False)
    settings = json.dumps({"version": 1, "sequences": 256})
    pq.write_table(old.replace_schema_metadata({b"circuitscope": settings}), path)
    told = Listens()
    pd.testing.assert_frame_equal(analyze(run, progress=told), frame)
    assert told.lines == [
        f"warning: {path} was made by another version or with other settings;"
        " it is kept as scores.old-1.parquet and computed again"
    ]


def test_a_file_that_is_no_table_of_ours_is_set_aside(run):
    frame = analyze(run, steps=0)
    path = run.path / "analysis" / "scores.parquet"
    for number, content in enumerate([b"", b"nonsense"], 1):
        path.write_bytes(content)
        pd.testing.assert_frame_equal(analyze(run, steps=0), frame)
        assert path.with_name(f"scores.old-{number}.parquet").read_bytes() == content


def test_a_checkpoint_whose_header_is_torn_keeps_the_rows_that_were_read_from_it(run):
    before = analyze(run)
    (run.checkpoints.folder / checkpoint_name(3)).write_bytes(b"torn")
    pd.testing.assert_frame_equal(analyze(run), before)


def test_a_table_in_use_is_neither_read_nor_moved_by_another_process(run):
    path = run.path / "analysis" / "scores.parquet"
    path.parent.mkdir()
    path.write_bytes(b"damaged")
    with Table(path, {"step": "int64"}, {}) as open_table:
        assert open_table.notes  # set aside while it was held
        path.write_bytes(b"written meanwhile")
        with pytest.raises(UserError, match="being written by another analysis of this run; wait until it is done"):
            analyze(run)
        assert path.read_bytes() == b"written meanwhile"
    assert [p.name for p in sorted(path.parent.glob("*.parquet"))] == ["scores.old-1.parquet", "scores.parquet"]


def test_a_run_whose_rows_are_all_there_is_read_without_a_lock_and_without_writing(run, monkeypatch):
    analyzed = analysis_results(run, ["phases", "circuit"], sequences=16)
    for lock in run.path.rglob("*.lock"):
        lock.unlink()
    before = listing(run.path)

    def read_only(*_args, **_options):
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(table, "FileLock", read_only)
    monkeypatch.setattr(table, "write_whole", read_only)
    monkeypatch.setattr(runner, "write_whole", read_only)
    again = analysis_results(run, ["phases", "circuit"], sequences=16)
    for name, frame in analyzed.tables.items():
        pd.testing.assert_frame_equal(again[name], frame)
    cs.report(run, sequences=16, examples=1).save(run.path.parent / "elsewhere.html")
    assert listing(run.path) == before
    with pytest.raises(UserError, match=r"cannot write to .*: Read-only file system"):
        analyze(run, sequences=17)


_PROGRAM = """
import sys
from circuitscope.analysis.checkpoints.runner import analyze
from circuitscope.errors import UserError
print("ready", flush=True)
sys.stdin.readline()
try:
    analyze(sys.argv[1])
except UserError as error:
    sys.exit(str(error))
"""


@pytest.mark.slow
def test_two_analyses_at_the_same_time_end_with_one_whole_table(run):
    expected = analyze(run)
    path = run.path / "analysis" / "scores.parquet"
    path.write_bytes(path.read_bytes()[:-100])  # both find a damaged table, which one of them moves
    both = [
        subprocess.Popen(
            [sys.executable, "-c", _PROGRAM, str(run.path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    for process in both:
        assert process.stdout.readline() == "ready\n"
    for process in both:
        process.stdin.write("go\n")
        process.stdin.flush()
    told = [process.communicate(timeout=120)[1] for process in both]
    codes = [process.returncode for process in both]
    assert 0 in codes
    for code, text in zip(codes, told, strict=True):
        assert code == 0 or "is being written by another analysis of this run" in text, text
    assert len(list(path.parent.glob("scores.old-*.parquet"))) == 1
    again = Listens()
    pd.testing.assert_frame_equal(analyze(run, progress=again), expected, atol=1e-6, rtol=0)
    assert again.steps == []


def test_phases_are_a_table_of_the_run_without_steps(run):
    frame = analysis_table(run, "phases", sequences=16)
    assert list(frame.columns)[:3] == ["run", "curve", "onset"]
    saved = pd.read_parquet(run.path / "analysis" / "phases-16.parquet")
    assert len(saved) == len(frame)
    assert (run.path / "analysis" / "scores-16.parquet").exists()


def test_phases_of_some_checkpoints_do_not_take_the_place_of_those_of_all(run):
    path = run.path / "analysis" / "phases-16.parquet"
    path.unlink(missing_ok=True)
    analysis_table(run, "phases", steps=run.steps[:2], sequences=16)
    assert not path.exists()
    analysis_table(run, "phases", sequences=16)
    before = path.read_bytes()
    analysis_table(run, "phases", steps=run.steps[:2], sequences=16)
    assert path.read_bytes() == before
