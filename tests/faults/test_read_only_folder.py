"""A folder that cannot be written gives one line: at the start as bad input, later as a failed run."""

import time

import pytest
from kills import FLAGS, checkpoint, differing, last_files, rows, saved, start, status, wait_for

pytestmark = pytest.mark.slow


def test_a_read_only_folder_is_bad_input(tmp_path, disk, mount):
    mount("-o", "remount,ro", disk)
    for runs in (disk, disk / "new" / "runs"):
        process = start("train", *FLAGS, "--runs", runs, logs=tmp_path / "logs")
        assert process.wait() == 2, process.err
        assert process.err == f"circuitscope: cannot create a run in {runs}: Read-only file system\n"
    assert list(disk.iterdir()) == []


def test_resuming_on_a_read_only_disk_is_bad_input_and_changes_nothing(tmp_path, unbroken, disk, mount):
    run, logs = disk / "run", tmp_path / "logs"
    process = start("train", *FLAGS, "--runs", disk, "--name", "run", logs=logs)
    wait_for(lambda: (run / "resume/step-00000030.safetensors").exists(), "a resume point")
    process.process.kill()
    process.wait()
    mount("-o", "remount,ro", disk)
    before = {p: p.read_bytes() for p in run.rglob("*") if p.is_file()}
    refused = start("train", "--resume", run, logs=logs)
    assert refused.wait() == 2, refused.err
    assert refused.err == f"circuitscope: cannot write to {run}: Read-only file system\n"
    assert {p: p.read_bytes() for p in run.rglob("*") if p.is_file()} == before
    mount("-o", "remount,rw", disk)
    again = start("train", "--resume", run, logs=logs)
    assert again.wait() == 0, again.err
    assert differing(run, unbroken.saved) == []


@pytest.mark.parametrize("folder", ["checkpoints", "resume", "."])
def test_a_folder_that_becomes_read_only_fails_the_run_with_one_line(unbroken, tmp_path, mount, folder):
    """A bind mount of the folder onto itself is read-only from the moment it is there, with files still open below."""
    run, logs = tmp_path / "run", tmp_path / "logs"
    process = start("train", *FLAGS, "--runs", tmp_path, "--name", "run", logs=logs)
    wait_for(lambda: checkpoint(run, 20).exists(), "step 20")
    mount("--bind", run / folder, run / folder)
    for _ in range(1000):
        try:
            mount("-o", "remount,bind,ro", run / folder)
            break
        except OSError:  # busy: a checkpoint is being written through the new mount this very moment
            time.sleep(0.001)
    assert process.wait() == 1, process.err
    assert len(process.err.splitlines()) == 1, process.err
    assert "Read-only file system" in process.err
    assert differing(run, unbroken.saved) == []
    assert checkpoint(run, 20).exists()
    if folder != ".":
        assert status(run)["state"] == "failed"
        assert "Read-only file system" in str(status(run)["message"])

    mount("-o", "remount,bind,rw", run / folder)
    again = start("train", "--resume", run, logs=logs)
    assert again.wait() == 0, again.err
    assert differing(run, unbroken.saved) == []
    assert last_files(saved(run)) == last_files(unbroken.saved)
    assert rows(run) == unbroken.rows
