"""A lock keeps a second process from writing a run that one is writing already."""

import pytest
from kills import FLAGS, checkpoint, differing, last_files, rows, saved, start, status, wait_for

pytestmark = pytest.mark.slow


def test_the_second_trainer_is_refused_and_the_first_goes_on_unharmed(unbroken, tmp_path):
    run, logs = tmp_path / "run", tmp_path / "logs"
    first = start("train", *FLAGS, "--runs", tmp_path, "--name", "run", logs=logs)
    wait_for(lambda: checkpoint(run, 0).exists(), "the first checkpoint")
    resumed = start("train", "--resume", run, logs=logs)
    named = start("train", *FLAGS, "--runs", tmp_path, "--name", "run", logs=logs)
    codes = resumed.wait(), named.wait()
    assert first.process.exitcode is None, "the first trainer was done before the second ones were refused"
    assert codes == (2, 2)
    assert resumed.err == f"circuitscope: {run} is being written by process {first.pid}\n"
    assert len(named.err.splitlines()) == 1
    assert "exists already" in named.err

    assert first.wait() == 0, first.err
    assert status(run)["state"] == "finished"
    assert differing(run, unbroken.saved) == []
    assert last_files(saved(run)) == last_files(unbroken.saved)
    assert rows(run) == unbroken.rows


def test_of_several_that_resume_one_run_at_once_exactly_one_does(unbroken, tmp_path):
    run, logs = tmp_path / "run", tmp_path / "logs"
    first = start("train", *FLAGS, "--runs", tmp_path, "--name", "run", logs=logs)
    wait_for(lambda: (run / "resume/step-00000030.safetensors").exists(), "the first resume point")
    first.process.kill()
    assert first.wait() == -9
    crowd = [start("train", "--resume", run, logs=logs) for _ in range(4)]
    assert sorted(p.wait() for p in crowd) == [0, 2, 2, 2], [p.err for p in crowd]
    assert differing(run, unbroken.saved) == []
    assert last_files(saved(run)) == last_files(unbroken.saved)
    assert rows(run) == unbroken.rows
