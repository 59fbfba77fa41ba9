"""A full disk ends a run with one line, harms nothing saved, and the run goes on once there is space."""

import signal

import pytest
from kills import FLAGS, checkpoint, differing, last_files, rows, saved, start, status, wait_for

pytestmark = pytest.mark.slow


def failed_with_one_line(process, code=1):
    assert process.wait() == code, process.err
    assert len(process.err.splitlines()) == 1, process.err
    assert process.err.startswith("circuitscope: ")
    return process.err


def goes_on_to_the_same_bits(run, unbroken, logs):
    assert differing(run, unbroken.saved) == []
    again = start("train", "--resume", run, logs=logs)
    assert again.wait() == 0, again.err
    assert status(run)["state"] == "finished"
    assert differing(run, unbroken.saved) == []
    assert last_files(saved(run)) == last_files(unbroken.saved)
    assert rows(run) == unbroken.rows


def test_a_quota_on_file_size(unbroken, tmp_path):
    """Checkpoints fit, the first resume point does not."""
    run, logs = tmp_path / "run", tmp_path / "logs"
    process = start("train", *FLAGS, "--runs", tmp_path, "--name", "run", logs=logs, file_limit=20_000)
    line = failed_with_one_line(process)
    assert "File too large" in line
    assert "what was saved before is intact" in line
    assert status(run)["state"] == "failed"
    assert "File too large" in str(status(run)["message"])
    assert checkpoint(run, 20).exists()
    assert not (run / "resume/step-00000030.safetensors").exists()
    goes_on_to_the_same_bits(run, unbroken, logs)


def test_a_disk_that_the_run_itself_fills(unbroken, tmp_path, disk, mount):
    run, logs = disk / "run", tmp_path / "logs"
    mount("-o", "remount,size=200k", disk)
    line = failed_with_one_line(start("train", *FLAGS, "--runs", disk, "--name", "run", logs=logs))
    assert "No space left on device" in line
    assert "last checkpoint: step " in line
    assert status(run)["state"] == "failed"
    assert "No space left on device" in str(status(run)["message"])
    assert checkpoint(run, 20).exists()
    assert list(run.rglob("*.tmp")) == []
    mount("-o", "remount,size=4m", disk)
    goes_on_to_the_same_bits(run, unbroken, logs)


def test_a_disk_that_others_fill_to_the_last_byte(unbroken, tmp_path, disk):
    run, logs = disk / "run", tmp_path / "logs"
    process = start("train", *FLAGS, "--runs", disk, "--name", "run", logs=logs)
    wait_for(lambda: checkpoint(run, 40).exists(), "step 40")
    ballast = [disk / "ballast"]
    while process.process.exitcode is None and len(ballast) < 1000:  # again and again: what the run frees is taken too
        try:
            with open(ballast[-1], "wb", buffering=0) as file:
                while True:
                    file.write(b"\0" * 4096)
        except OSError:
            ballast.append(disk / f"ballast{len(ballast)}")
    line = failed_with_one_line(process)
    assert "No space left on device" in line
    assert checkpoint(run, 40).exists()
    assert differing(run, unbroken.saved) == []

    refused = start("train", "--resume", run, logs=logs)
    assert refused.wait() in (1, 2), refused.err
    assert len(refused.err.splitlines()) == 1
    assert "No space left on device" in refused.err
    new = start("train", *FLAGS, "--runs", disk, "--name", "other", logs=logs)
    assert failed_with_one_line(new, 2).startswith("circuitscope: cannot create a run in ")
    assert not (disk / "other").exists()
    assert list(disk.glob(".new-*")) == []
    for path in ballast:
        path.unlink(missing_ok=True)
    goes_on_to_the_same_bits(run, unbroken, logs)


def test_a_signal_on_a_full_disk_gives_one_line_too(unbroken, tmp_path, disk):
    """The resume point cannot be saved; an earlier one, or the seed, serves."""
    run, logs = disk / "run", tmp_path / "logs"
    rare = ["--save-every", "100000", "--resume-every", "100000", "--steps", "100000"]
    process = start("train", *FLAGS, *rare, "--runs", disk, "--name", "run", logs=logs)
    wait_for(lambda: run.exists() and any(row["step"] == 12 for row in rows(run)), "step 12")
    try:
        with open(disk / "ballast", "wb", buffering=0) as file:
            while True:
                file.write(b"\0" * 4096)
    except OSError:
        process.send(signal.SIGTERM)
    assert process.wait() in (1, 143), process.err
    assert len(process.err.splitlines()) == 1, process.err
    assert "this is a bug" not in process.err
    assert "No space left on device" in process.err
