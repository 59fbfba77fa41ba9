"""A run that was broken off continues to the bits of an unbroken one, whatever was damaged meanwhile."""

import json
import os
import shlex
import signal

import pytest

from circuitscope.errors import UserError
from circuitscope.runs.checkpoints import checkpoint_name, write_checkpoint
from circuitscope.runs.run import Run
from circuitscope.runs.store import read_tensors
from circuitscope.training.trainer import Interrupted, resume, train
from tiny_run import Crash, CrashAt, Listens, SignalAt, listing, rows, same_bits, same_run, saved, tiny


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    return train(tiny(), root=tmp_path_factory.mktemp("unbroken"))


def crashed(root, step, **options):
    """A run that lost everything after its last resume point."""
    with pytest.raises(Crash):
        train(tiny(**options), root=root, name="broken", progress=CrashAt(step))
    return Run(root / "broken")


def flip_a_bit(path):
    data = bytearray(path.read_bytes())
    data[-5] ^= 4
    path.write_bytes(data)


@pytest.mark.parametrize("step", [2, 4, 6, 8, 10, 12])
def test_a_crashed_run_resumes_to_the_same_bits(unbroken, tmp_path, step):
    run = crashed(tmp_path, step)
    assert run.status["state"] == "failed"
    assert same_run(resume(run).path, unbroken.path)
    assert run.status["state"] == "finished"


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("step", [2, 6, 12])
def test_a_stopped_run_saves_where_it_is_and_resumes_to_the_same_bits(unbroken, tmp_path, step, signum):
    with pytest.raises(Interrupted) as stop:
        train(tiny(), root=tmp_path, name="broken", progress=SignalAt(step, signum))
    run = Run(tmp_path / "broken")
    assert stop.value.exit_code == 128 + signum
    assert run.status["state"] == "stopped"
    assert run.status["step"] == step
    assert run.checkpoints.resume_steps()[-1] == step
    told = Listens()
    assert same_run(resume(run, progress=told).path, unbroken.path)
    assert f"resuming {run.path} from step {step}" in told.lines
    assert rows(run.path) == rows(unbroken.path)


def test_stopping_again_and_again_changes_no_bit(unbroken, tmp_path):
    with pytest.raises(Interrupted):
        train(tiny(), root=tmp_path, name="broken", progress=SignalAt(2))
    run = Run(tmp_path / "broken")
    for step in (4, 6, 8, 10):
        with pytest.raises(Interrupted):
            resume(run, progress=SignalAt(step))
    assert same_run(resume(run).path, unbroken.path)


def test_signals_are_handled_as_before_once_training_is_over(tmp_path):
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    with pytest.raises(Interrupted):
        train(tiny(), root=tmp_path, progress=SignalAt(2))
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before


def test_the_message_of_a_stopped_run_holds_a_command_a_shell_understands(tmp_path):
    root = tmp_path / "with space"
    with pytest.raises(Interrupted) as stop:
        train(tiny(), root=root, name="broken", progress=SignalAt(2))
    command = str(stop.value).partition("continue with: ")[2]
    assert shlex.split(command) == ["circuitscope", "train", "--resume", str(root / "broken")]


def test_an_early_stop_and_a_signal_at_the_same_step_end_the_run_there(tmp_path):
    """Otherwise a resume would train past the stop."""
    easy = {"early_stop": 0.03, "eval_batches": 8, "eval_batch_size": 32, "lr": 0.03, "steps": 200, "eval_every": 4}
    end = train(tiny(**easy), root=tmp_path, name="unbroken").status["step"]
    try:
        train(tiny(**easy), root=tmp_path, name="broken", progress=SignalAt(end))
    except Interrupted:
        resume(Run(tmp_path / "broken"))
    assert Run(tmp_path / "broken").status["step"] == end


def test_a_finished_run_says_so_and_is_left_alone(unbroken):
    before = listing(unbroken.path)
    told = Listens()
    assert resume(unbroken, progress=told) is unbroken
    assert told.lines == [f"{unbroken.path} is already finished, at step 12"]
    assert listing(unbroken.path) == before


def test_another_thread_count_warns(tmp_path):
    run = crashed(tmp_path, 6)
    path = run.path / "environment.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"threads": 4}))
    told = Listens()
    resume(run, progress=told)
    assert any(line.startswith("warning:") and "4 CPU threads and continues with 1" in line for line in told.lines)


def test_the_same_thread_count_does_not_warn(tmp_path):
    told = Listens()
    resume(crashed(tmp_path, 6), progress=told)
    assert not any("warning" in line for line in told.lines)


@pytest.mark.parametrize("damage", ["flip", "truncate", "empty", "garbage"])
def test_with_a_damaged_newest_resume_point_the_older_one_serves(unbroken, tmp_path, damage):
    run = crashed(tmp_path, 10)
    assert run.checkpoints.resume_steps() == [4, 8]
    newest = run.path / "resume/step-00000008.safetensors"
    if damage == "flip":
        flip_a_bit(newest)
    else:
        newest.write_bytes({"truncate": newest.read_bytes()[:1000], "empty": b"", "garbage": b"\xff" * 999}[damage])
    bad, told = newest.read_bytes(), Listens()
    resume(run, progress=told)
    assert any(line.startswith("warning: resume point 8 cannot be used") for line in told.lines)
    assert f"resuming {run.path} from step 4" in told.lines
    assert same_run(run.path, unbroken.path)
    assert rows(run.path) == rows(unbroken.path)
    assert (run.path / "resume/replaced/step-00000008.1.safetensors").read_bytes() == bad


def test_with_all_resume_points_damaged_it_starts_again_from_the_seed(unbroken, tmp_path):
    run = crashed(tmp_path, 10)
    for path in (run.path / "resume").glob("step-*"):
        flip_a_bit(path)
    told = Listens()
    resume(run, progress=told)
    assert sum(line.startswith("warning: resume point") for line in told.lines) == 2
    assert same_run(run.path, unbroken.path)


def test_a_damaged_checkpoint_met_on_the_way_is_replaced_and_kept_aside(unbroken, tmp_path):
    run = crashed(tmp_path, 10)
    path = run.path / "checkpoints/step-00000009.safetensors"
    flip_a_bit(path)
    bad = path.read_bytes()
    resume(run)
    assert same_run(run.path, unbroken.path)
    assert (run.path / "checkpoints/replaced/step-00000009.1.safetensors").read_bytes() == bad


def test_a_checkpoint_set_aside_twice_is_kept_twice(tmp_path):
    run = crashed(tmp_path, 10)
    path = run.path / "checkpoints/step-00000009.safetensors"
    kept = []
    for _ in range(2):
        flip_a_bit(path)
        kept.append(path.read_bytes())
        with pytest.raises(Crash):
            resume(run, progress=CrashAt(10))
    aside = run.path / "checkpoints/replaced"
    assert [(aside / f"step-00000009.{n}.safetensors").read_bytes() for n in (1, 2)] == kept


def test_checkpoints_that_are_right_are_not_written_again(tmp_path):
    run = crashed(tmp_path, 10)
    before = listing(run.path / "checkpoints")
    resume(run)
    after = listing(run.path / "checkpoints")
    assert {name: after[name] for name in before} == before
    assert not (run.path / "checkpoints/replaced").exists()


def test_leftovers_of_a_killed_process_are_cleared_away(tmp_path):
    run = crashed(tmp_path, 6)
    for name in ("checkpoints/.step-00000006.safetensors.1.tmp", "resume/.step-00000004.safetensors.1.tmp"):
        (run.path / name).write_bytes(b"half")
    (run.path / ".status.json.1.tmp").write_bytes(b"{")
    resume(run)
    assert list(run.path.rglob("*.tmp")) == []


def test_a_lost_status_file_does_not_hinder(unbroken, tmp_path):
    run = crashed(tmp_path, 6)
    (run.path / "status.json").unlink()
    assert same_run(resume(run).path, unbroken.path)


@pytest.mark.parametrize("text", ["", "{", "[]", "null"])
def test_a_damaged_status_file_does_not_hinder(unbroken, tmp_path, text):
    run = crashed(tmp_path, 6)
    (run.path / "status.json").write_text(text)
    assert same_run(resume(run).path, unbroken.path)


def test_lost_metrics_do_not_hinder_and_leave_no_nan(unbroken, tmp_path):
    run = crashed(tmp_path, 6)
    late = [row for row in rows(run.path) if row["step"] == 6]
    (run.path / "metrics.jsonl").write_text("".join(json.dumps({**r, "seconds": 1.0}) + "\n" for r in late))
    assert same_run(resume(run).path, unbroken.path)
    assert "NaN" not in (run.path / "metrics.jsonl").read_text()


def test_a_run_that_is_being_written_is_refused(tmp_path):
    run = crashed(tmp_path, 6)
    lock = run.lock()
    before = listing(run.path)
    try:
        with pytest.raises(UserError, match="is being written by process"):
            resume(run)
    finally:
        lock.release()
    assert listing(run.path) == before
    resume(run)


def test_the_lock_is_free_after_every_end(tmp_path):
    run = crashed(tmp_path, 6)
    run.lock().release()
    with pytest.raises(Interrupted):
        resume(run, progress=SignalAt(8))
    run.lock().release()
    resume(run)
    run.lock().release()


def test_a_moved_run_resumes(unbroken, tmp_path):
    run = crashed(tmp_path, 6)
    os.rename(run.path, tmp_path / "elsewhere")
    moved = resume(Run(tmp_path / "elsewhere"))
    assert same_run(moved.path, unbroken.path)
    assert same_bits(saved(moved.path)[12], dict(moved.load().state_dict()))


def test_clipped_steps_are_counted_exactly_also_across_a_resume_in_the_middle_of_an_interval(tmp_path):
    every = train(tiny(log_every=1), root=tmp_path, name="every")
    norms = [row["grad_norm"] for row in rows(every.path) if row["split"] == "train"]
    clip = sorted(norms)[5]
    options = {"clip": clip, "log_every": 6, "resume_every": 4}
    whole = train(tiny(**options), root=tmp_path, name="whole")
    single = train(tiny(**options | {"log_every": 1}), root=tmp_path, name="single")
    cut = [row["clipped"] for row in rows(single.path) if row["split"] == "train"]
    assert set(cut) == {0.0, 1.0}
    shares = [row["clipped"] for row in rows(whole.path) if row["split"] == "train"]
    assert shares == [sum(cut[:6]) / 6, sum(cut[6:]) / 6]
    run = crashed(tmp_path, 12, **options)  # goes on from step 8, in the middle of steps 7 to 12
    assert same_run(resume(run).path, whole.path)
    assert rows(run.path) == rows(whole.path)


def test_a_resume_point_that_does_not_count_clipped_steps_leaves_one_share_out(tmp_path):
    options = {"clip": 1e-3, "log_every": 6, "resume_every": 4}
    run = crashed(tmp_path, 12, **options)
    path = run.checkpoints.resume_folder / checkpoint_name(8)
    tensors, _ = read_tensors(path)
    del tensors["clipped"]  # as earlier releases wrote it
    write_checkpoint(path, 8, tensors, run.digest)
    (run.checkpoints.resume_folder / checkpoint_name(12)).unlink(missing_ok=True)
    logged = [row for row in rows(resume(run).path) if row["split"] == "train"]
    assert [row.get("clipped") for row in logged] == [1.0, None]
