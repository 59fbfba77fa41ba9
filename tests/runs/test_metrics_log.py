"""metrics.jsonl: documented rows, also after a crash."""

import json
import os
import shutil

import pytest

from circuitscope.config.rate import learning_rate
from circuitscope.runs.damage import RecordWarning
from circuitscope.runs.metrics import MetricsLog, read_metrics
from circuitscope.runs.run import Run
from circuitscope.training.optimizer import parameter_groups
from circuitscope.training.trainer import resume, train
from tiny_run import Crash, CrashAt, rows, tiny

FIELDS = {"step", "split", "loss", "accuracy", "lr", "tokens", "seconds"}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return train(tiny(), root=tmp_path_factory.mktemp("runs"))


def test_every_row_has_the_documented_fields_and_no_other(run):
    for row in read_metrics(run.path):
        validation = {"loss_per_batch", "accuracy_per_batch"}
        train = {"grad_norm", "clipped", *(f"grad_norm/{group}" for group in parameter_groups(run.empty_model()))}
        assert set(row) == FIELDS | (validation if row["split"] == "validation" else train)


def test_rows_come_at_the_configured_steps(run):
    logged = [(r["split"], r["step"]) for r in read_metrics(run.path)]
    assert [step for split, step in logged if split == "train"] == [2, 4, 6, 8, 10, 12]
    assert [step for split, step in logged if split == "validation"] == [0, 4, 8, 12]


def test_an_evaluation_row_is_the_mean_of_its_batches(run):
    for row in read_metrics(run.path):
        if row["split"] == "validation":
            assert len(row["loss_per_batch"]) == len(row["accuracy_per_batch"]) == 2
            assert row["loss"] == pytest.approx(sum(row["loss_per_batch"]) / 2, abs=1e-6)
            assert row["accuracy"] == pytest.approx(sum(row["accuracy_per_batch"]) / 2, abs=1e-6)
            assert row["loss_per_batch"][0] != row["loss_per_batch"][1]


def test_rows_carry_the_rate_of_the_last_update_and_the_tokens_so_far(run):
    seconds = 0.0
    for row in read_metrics(run.path):
        assert row["tokens"] == row["step"] * 8 * 16
        assert row["lr"] == learning_rate(max(0, row["step"] - 1), run.config.train)
        assert row["seconds"] >= seconds
        seconds = row["seconds"]


def test_the_file_is_strict_json_line_by_line(run):
    def refuse(constant):
        raise ValueError(constant)

    for line in (run.path / "metrics.jsonl").read_text().splitlines():
        json.loads(line, parse_constant=refuse)


def test_a_torn_last_line_is_left_out_and_the_next_row_starts_a_new_one(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "loss": 1.0}\n{"step": 2, "lo')
    assert read_metrics(tmp_path) == [{"step": 1, "loss": 1.0}]
    log = MetricsLog(tmp_path, resumed_from=1)
    log.write({"step": 2, "loss": 0.5})
    log.close()
    assert read_metrics(tmp_path) == [{"step": 1, "loss": 1.0}, {"step": 2, "loss": 0.5}]


@pytest.mark.parametrize("cut", range(1, 24))
def test_a_last_line_torn_anywhere_is_left_out(tmp_path, cut):
    whole = '{"step": 1, "loss": 1.0}'
    (tmp_path / "metrics.jsonl").write_text(whole + "\n" + whole[:cut])
    assert read_metrics(tmp_path) == [json.loads(whole)]


WHOLE = {"step": 4, "split": "validation", "loss": 1.0, "accuracy": 0.5}
WHOLE |= {"loss_per_batch": [1.0, 1.0], "accuracy_per_batch": [0.5, 0.5], "seconds": 1.0}
WRONG = [
    {"step": "4"},
    {"step": True},
    {"step": -1},
    {"split": "test"},
    {"split": ["train"]},
    {"loss": None},
    {"accuracy": "high"},
    {"seconds": [1]},
    {"loss": 10**400},
    {"loss_per_batch": 1.0},
    {"loss_per_batch": []},
    {"loss_per_batch": [1.0, 1.0, 1.0]},
    {"accuracy_per_batch": [None, 0.5]},
]


@pytest.mark.parametrize(
    "line",
    [
        *("nonsense", "[" * 100_000, "[]", "{}", '{"resumed_from": "4"}'),
        *(json.dumps({k: v for k, v in WHOLE.items() if k != gone}) for gone in WHOLE if gone != "seconds"),
        *(json.dumps(WHOLE | change) for change in WRONG),
    ],
    ids=lambda line: line[:60],
)
def test_a_damaged_line_is_reported_and_the_others_are_read(run, tmp_path, line):
    copy = Run(shutil.copytree(run.path, tmp_path / "copy"))
    whole = run.metrics
    lines = (copy.path / "metrics.jsonl").read_text().splitlines()
    (copy.path / "metrics.jsonl").write_text("\n".join([*lines[:3], line, *lines[3:]]) + "\n")
    with pytest.warns(RecordWarning, match=r"copy/metrics\.jsonl: line 4 is damaged and left out$") as told:
        found = [copy.metrics for _ in range(2)]
    assert len(told) == 1
    assert found[0].equals(whole)
    assert found[1].equals(whole)


def test_a_line_that_a_kill_tore_is_not_reported(tmp_path, recwarn):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"ste\n{"resumed_from": 1}\n{"step": 2}\n{"step"')
    assert read_metrics(tmp_path) == [{"step": 1}, {"step": 2}]
    assert not [w for w in recwarn if w.category is RecordWarning]


def test_metrics_that_are_a_pipe_are_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "metrics.jsonl")
    with pytest.warns(RecordWarning, match=r"metrics\.jsonl is not a regular file"):
        assert read_metrics(tmp_path) == []


def test_rows_that_a_resume_makes_again_are_dropped(tmp_path):
    first = MetricsLog(tmp_path)
    for step in (1, 2, 3):
        first.write({"step": step, "life": 1})
    first.close()
    second = MetricsLog(tmp_path, resumed_from=1)
    second.write({"step": 2, "life": 2})
    second.close()
    assert read_metrics(tmp_path) == [{"step": 1, "life": 1}, {"step": 2, "life": 2}]


def test_a_run_without_metrics_has_no_rows(tmp_path):
    assert read_metrics(tmp_path) == []


@pytest.mark.parametrize("crash", [2, 6, 10, 12])
def test_after_a_crash_and_a_resume_the_rows_are_those_of_an_unbroken_run(run, tmp_path, crash):
    """A crash at 2 comes before the first resume point: that run starts again from step 0."""
    with pytest.raises(Crash):
        train(tiny(), root=tmp_path, name="broken", progress=CrashAt(crash))
    broken = resume(Run(tmp_path / "broken"))
    assert rows(broken.path) == rows(run.path)


def test_time_goes_on_counting_after_a_resume(run, tmp_path):
    with pytest.raises(Crash):
        train(tiny(), root=tmp_path, name="broken", progress=CrashAt(6))
    path = tmp_path / "broken" / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps({**row, "seconds": row["seconds"] + 1000}) + "\n" for row in lines))
    resumed = resume(Run(tmp_path / "broken"))
    assert all(r["seconds"] >= 1000 for r in read_metrics(resumed.path))
