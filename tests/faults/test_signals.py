"""SIGTERM and Ctrl-C save and exit with a message, in every phase of a run."""

import os
import shlex
import signal

import pytest
from kills import (
    FLAGS,
    PATIENCE,
    SIZES,
    checkpoint,
    differing,
    flags,
    last_files,
    rows,
    saved,
    start,
    start_command,
    status,
    wait_for,
)

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_the_installed_command_saves_says_how_to_go_on_and_goes_on_to_the_same_bits(unbroken, tmp_path, signum, code):
    run = tmp_path / "run"
    process = start_command("train", *FLAGS, "--runs", tmp_path, "--name", "run", logs=tmp_path)
    wait_for(lambda: checkpoint(run, 20).exists() or process.poll() is not None, "step 20")
    process.send_signal(signum)
    _, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == code, err
    assert len(err.splitlines()) == 1
    assert err.startswith(f"circuitscope: stopped by {signum.name} at step ")
    step = status(run)["step"]
    assert status(run)["state"] == "stopped"
    assert (run / f"resume/step-{step:08d}.safetensors").exists()
    assert not checkpoint(run, 160).exists()

    command = shlex.split(err.partition("continue with: ")[2])
    assert command[0] == "circuitscope"
    again = start(*command[1:], logs=tmp_path / "logs")
    assert again.wait() == 0, again.err
    assert f"resuming {run} from step {step}" in again.out
    names = last_files(saved(run))
    assert names == last_files(unbroken.saved)
    (run / f"resume/step-{step:08d}.safetensors").unlink(missing_ok=True)  # the unbroken run has none to compare
    assert differing(run, unbroken.saved) == []
    assert rows(run) == unbroken.rows


def test_a_second_ctrl_c_ends_a_run_that_cannot_save_at_once(tmp_path):
    """Two at once: the first is noted, the second need not wait for the step."""
    run = tmp_path / "run"
    process = start("train", *FLAGS, "--runs", tmp_path, "--name", "run", logs=tmp_path / "logs")
    wait_for(lambda: checkpoint(run, 20).exists(), "step 20")
    process.send(signal.SIGINT)
    process.send(signal.SIGINT)
    assert process.wait() == 130
    assert "Traceback" not in process.err


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_before_the_first_update_also_ends_with_a_message(tmp_path, signum, code):
    """A long first evaluation, where nothing but the initial weights is saved yet."""
    run = tmp_path / "run"
    slow = flags(**SIZES, eval_batches=100000)
    process = start("train", *slow, "--runs", tmp_path, "--name", "run", logs=tmp_path / "logs")
    wait_for(lambda: checkpoint(run, 0).exists(), "the first checkpoint")
    process.send(signum)
    assert process.wait() == code
    assert len(process.err.splitlines()) == 1
    assert "--resume" in process.err
    assert status(run)["state"] == "stopped"


def test_a_closed_output_is_not_blamed_on_the_disk(tmp_path):
    """`circuitscope train | head -1`."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    process = start("train", *FLAGS, "--runs", tmp_path, "--name", "run", logs=tmp_path / "logs", out=pipe)
    with open(pipe) as reader:
        reader.readline()
    assert process.wait() != 0
    assert "Traceback" not in process.err
    assert "cannot write to" not in process.err
    assert status(tmp_path / "run")["state"] in ("stopped", "failed")
