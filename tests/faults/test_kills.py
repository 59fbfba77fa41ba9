"""A run killed at any instant resumes to the bits of an unbroken one, and nothing it saved is lost."""

import signal

import pytest
import torch
from kills import (
    FLAGS,
    Tally,
    checkpoint,
    differing,
    kill_and_resume,
    last_files,
    rows,
    same_bits,
    saved,
    start,
    start_command,
    wait_for,
)

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def tally(tmp_path_factory) -> Tally:
    return kill_and_resume(tmp_path_factory.mktemp("kills"), kills=16, seed=1)


def test_there_were_kills_enough_and_some_in_the_middle_of_a_write(tally):
    assert tally.kills == 16
    assert tally.in_a_write >= 1
    assert tally.resumes >= 5


def test_no_kill_leaves_an_unreadable_checkpoint_or_resume_point(tally):
    assert tally.unreadable == []


def test_killed_runs_end_in_the_same_bits_and_were_on_the_way_there_all_along(tally):
    assert tally.other_bits == []


def test_killed_runs_end_with_the_same_metrics(tally):
    assert tally.other_rows == []


def test_killed_runs_leave_no_temporary_files_once_finished(tally):
    assert tally.leftovers == []


def test_the_installed_command_is_killed_and_resumed_to_the_same_bits(unbroken, tmp_path):
    run = tmp_path / "run"
    process = start_command("train", *FLAGS, "--runs", tmp_path, "--name", "run", logs=tmp_path)
    wait_for(lambda: checkpoint(run, 60).exists() or process.poll() is not None, "step 60")
    process.kill()
    _, err = process.communicate()
    assert process.returncode == -signal.SIGKILL, err
    assert differing(run, unbroken.saved) == []
    assert not checkpoint(run, 160).exists()

    again = start("train", "--resume", run, logs=tmp_path / "logs")
    assert again.wait() == 0, again.err
    kept = saved(run)
    assert differing(run, unbroken.saved) == []
    assert last_files(kept) == last_files(unbroken.saved)
    assert rows(run) == unbroken.rows


def test_the_comparison_would_notice_one_bit(unbroken):
    """Guards the tests above."""
    name = last_files(unbroken.saved)[0]
    whole = unbroken.saved[name]
    other = {n: t.clone() for n, t in whole.items()}
    next(iter(other.values())).view(-1).view(dtype=torch.int32)[0] ^= 1
    assert same_bits(whole, {n: t.clone() for n, t in whole.items()})
    assert not same_bits(whole, other)
