"""A sweep on this machine: real worker processes train, die, stop and go on, and every trial is trained once."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest
import torch
import yaml

from circuitscope.errors import UserError
from circuitscope.runs.run import Run
from circuitscope.sweeps.executor import Job, run_job
from circuitscope.sweeps.local import LocalExecutor
from circuitscope.sweeps.measures import MEASURES, Measure
from circuitscope.sweeps.sweep import Sweep
from circuitscope.sweeps.trial import run_trial
from circuitscope.training import trainer

TRAIN = {
    "steps": 12,
    "batch_size": 8,
    "eval_every": 4,
    "eval_batches": 2,
    "eval_batch_size": 8,
    "save_every": 4,
    "resume_every": 4,
    "log_every": 2,
}
TASK = {"length": 16, "pairs": 2, "vocab_size": 64}


class Quiet:
    """Remembers which trials were started and how far they came."""

    def __init__(self):
        self.starts, self.moves = [], []

    def started(self, digest):
        self.starts.append(digest)

    def moved(self, news):
        self.moves.append(news)


def write_grid(folder: Path, train=None, **parts) -> Path:
    """A grid of tiny trials in a folder of its own."""
    base = {"model": {"d_model": 8, "n_layers": 1}, "task": TASK, "train": {**TRAIN, **(train or {})}}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "grid.yaml").write_text(yaml.safe_dump({"base": base, **parts}))
    return folder


@pytest.fixture
def small(tmp_path) -> Path:
    return write_grid(tmp_path / "small", axes={"train.lr": [1e-3, 1e-2], "train.seed": [5]}, fractions=[0.5])


def weights(run: Run) -> dict[str, torch.Tensor]:
    return run.checkpoints.load(run.steps[-1])


@pytest.mark.slow
def test_trials_run_in_workers_and_equal_runs_of_their_own(small, tmp_path):
    found, watch = Sweep.open(small, tmp_path / "runs"), Quiet()
    rows = list(found.go(LocalExecutor(2), watch))
    assert [row["state"] for row in rows] == ["finished", "finished"]
    assert set(watch.starts) == {trial.digest for trial in found.grid.trials}
    assert {move.digest for move in watch.moves} == set(watch.starts)
    for trial in found.grid.trials:
        alone = trainer.train(trial.config, root=tmp_path / "alone")
        mine, theirs = weights(alone), weights(Run(found.runs / trial.digest))
        assert all(torch.equal(mine[name], theirs[name]) for name in mine)
    row = found.results.rows[found.grid.trials[0].digest]
    assert {"steps", "seconds", "tokens", "flops", "best_test_accuracy", "last_test_loss", "accuracy_at_0.5"} <= set(
        row
    )
    assert row["steps"] == 12
    assert [point["step"] for point in found.results.curves[row["digest"]]] == [0, 4, 8, 12]
    assert not found.missing


def test_what_stands_in_the_table_is_not_trained_again_even_without_runs(small, tmp_path):
    first = Sweep.open(small, tmp_path / "runs")
    for trial in first.grid.trials:
        first._add(run_trial(trial, first.runs))

    def nobody(jobs, watch):
        assert not jobs
        return iter(())

    clone = Sweep.open(small, tmp_path / "nothing here")
    assert list(clone.go(lambda jobs, watch: (_ for _ in nobody(jobs, watch)), Quiet())) == []
    assert clone.missing == []


def test_a_new_value_on_an_axis_adds_trials_and_keeps_rows(small, tmp_path):
    first = Sweep.open(small, tmp_path / "runs")
    for trial in first.grid.trials:
        first._add(run_trial(trial, first.runs))
    write_grid(small, axes={"train.lr": [1e-3, 3e-3], "train.seed": [5]})
    more = Sweep.open(small, tmp_path / "runs")
    assert [trial.values["train.lr"] for trial in more.missing] == [3e-3]
    assert len(more.results.rows) == 2


def test_rows_that_trials_left_behind_are_collected(small, tmp_path):
    first = Sweep.open(small, tmp_path / "runs")
    run_trial(first.grid.trials[0], first.runs)
    again = Sweep.open(small, tmp_path / "runs")
    assert again.collect() == 1
    assert len(again.missing) == 1


def test_a_trial_that_another_sweep_has_finished_is_measured_and_not_trained_again(small, tmp_path, monkeypatch):
    first = Sweep.open(small, tmp_path / "runs")
    done, half = first.grid.trials
    theirs = run_trial(done, first.runs)
    run_trial(half, first.runs)
    (first.runs / half.digest / "trial.json").unlink()  # it has not come to its end there
    other_axes = {"model.n_layers": [1], "train.lr": [1e-3, 1e-2]}
    grid = write_grid(tmp_path / "second", {"seed": 5}, axes=other_axes, measure=["decay"])
    second = Sweep.open(grid, tmp_path / "runs")
    assert [trial.digest for trial in second.grid.trials] == [done.digest, half.digest]

    def train(config, plain=trainer.train, **where):
        trained.append(config.train.lr)
        return plain(config, **where)

    second._borrow()
    assert (second.runs / done.digest).is_dir()
    assert not (second.runs / half.digest).exists()
    assert second.collect() == 0  # the other sweep's row has other axes and measures
    trained: list[float] = []
    monkeypatch.setattr(trainer, "train", train)
    list(second.go(lambda jobs, watch: (run_job(job) for job in jobs), Quiet()))
    assert trained == [half.config.train.lr]
    mine = second.results.rows[done.digest]
    assert mine["measured"] == "decay"
    assert (mine["model.n_layers"], "train.seed" in mine) == (1, False)
    assert mine["best_test_loss"] == pytest.approx(theirs["best_test_loss"])


def test_rows_are_taken_over_from_the_table_of_another_sweep(small, tmp_path):
    first = Sweep.open(small, tmp_path / "runs")
    measured, plain = first.grid.trials
    first._add(run_trial(measured, first.runs, measure=["decay"]))
    first._add(run_trial(plain, first.runs))
    other_axes = {"model.n_layers": [1], "train.lr": [1e-3, 1e-2]}
    grid = write_grid(tmp_path / "second", {"seed": 5}, axes=other_axes, measure=["decay"])
    second = Sweep.open(grid, tmp_path / "no runs")  # a clone has the tables and no runs
    assert second.collect(write=True) == 1
    assert [trial.digest for trial in second.missing] == [plain.digest]  # its row lacks what is measured here
    mine, theirs = (Sweep.open(path).results for path in (grid, small))
    row = mine.rows[measured.digest]
    assert (row["model.n_layers"], row["train.lr"], "train.seed" in row) == (1, measured.config.train.lr, False)
    same = theirs.rows[measured.digest].keys() - {"train.seed"}
    assert {name: row[name] for name in same} == {name: theirs.rows[measured.digest][name] for name in same}
    assert mine.curves[measured.digest] == theirs.curves[measured.digest]
    assert len(mine.curves[measured.digest]) == 4


def test_rows_without_the_shares_that_a_grid_asks_for_are_not_taken_over(small, tmp_path):
    first = Sweep.open(small, tmp_path / "runs")
    for trial, fractions in zip(first.grid.trials, ([0.5, 1], [1]), strict=True):
        first._add(run_trial(trial, first.runs, fractions=fractions))
    axes = {"train.lr": [1e-3, 1e-2], "train.seed": [5]}
    second = Sweep.open(write_grid(tmp_path / "second", axes=axes, fractions=[0.5]), tmp_path / "no runs")
    assert second.collect() == 1
    assert [trial.digest for trial in second.missing] == [first.grid.trials[1].digest]


def test_tables_beside_are_found_from_within_the_folder(small, tmp_path, monkeypatch):
    first = Sweep.open(small, tmp_path / "runs")
    for trial in first.grid.trials:
        first._add(run_trial(trial, first.runs, fractions=[0.5]))
    grid = write_grid(tmp_path / "second", axes={"train.lr": [1e-3, 1e-2], "train.seed": [5]})
    monkeypatch.chdir(grid)
    assert Sweep.open(".", tmp_path / "no runs").collect() == 2
    (small / "curves.csv").unlink()  # a row without its curves would never get them
    assert Sweep.open(".", tmp_path / "no runs").collect() == 0


def test_rows_are_taken_over_from_the_table_of_the_folder_above(small, tmp_path):
    first = Sweep.open(small, tmp_path / "runs")
    for trial in first.grid.trials:
        first._add(run_trial(trial, first.runs, fractions=[0.5]))
    grid = write_grid(small / "longer", axes={"train.lr": [1e-3, 1e-2], "train.seed": [5]})
    assert Sweep.open(grid, tmp_path / "no runs").collect() == 2


def test_a_table_beside_that_cannot_be_read_is_left_alone(small, tmp_path):
    beside = write_grid(tmp_path / "beside", axes={"train.lr": [1e-3, 1e-2], "train.seed": [5]})
    (beside / "results.csv").write_text("edited by hand\n")
    sweep = Sweep.open(small, tmp_path / "runs")
    assert sweep.collect() == 0
    assert len(sweep.missing) == 2


def test_a_run_that_cannot_be_taken_over_is_trained(small, tmp_path):
    first = Sweep.open(small, tmp_path / "runs")
    broken, empty = first.grid.trials
    for trial in (broken, empty):
        run_trial(trial, first.runs)
    (first.runs / broken.digest / "analysis").mkdir()
    (first.runs / broken.digest / "analysis" / "gone").symlink_to("nowhere")  # a file that cannot be copied
    for checkpoint in (first.runs / empty.digest / "checkpoints").iterdir():
        checkpoint.unlink()
    grid = write_grid(tmp_path / "second", axes={"train.lr": [1e-3, 1e-2], "train.seed": [5]})
    second = Sweep.open(grid, tmp_path / "runs")
    rows = list(second.go(lambda jobs, watch: (run_job(job) for job in jobs), Quiet()))
    assert [row["state"] for row in rows] == ["finished", "finished"]
    assert not list(second.runs.glob(".*.copy"))


def test_a_trial_goes_on_from_its_resume_point(small, tmp_path, monkeypatch):
    found = Sweep.open(small, tmp_path / "runs")
    trial = found.grid.trials[0]

    def stop(self, measure=False, plain=trainer.Trainer.update):
        if self.step == 6:
            raise KeyboardInterrupt
        return plain(self, measure)

    with monkeypatch.context() as patched:
        patched.setattr(trainer.Trainer, "update", stop)
        with pytest.raises(trainer.Interrupted):
            run_trial(trial, found.runs)
    assert Run(found.runs / trial.digest).status["state"] == "stopped"
    assert run_trial(trial, found.runs)["state"] == "finished"
    alone = trainer.train(trial.config, root=tmp_path / "alone")
    mine, theirs = weights(alone), weights(Run(found.runs / trial.digest))
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)


def test_a_trial_that_diverges_is_recorded_and_counts_as_done(tmp_path):
    folder = write_grid(tmp_path / "wild", train={"clip": None}, axes={"train.lr": [1e30]})
    found = Sweep.open(folder, tmp_path / "runs")
    row = run_trial(found.grid.trials[0], found.runs)
    assert row["state"] == "diverged"
    assert "diverged" in row["message"]
    found._add(row)
    assert not Sweep.open(folder, tmp_path / "runs").missing


def test_a_trial_that_fails_says_why_and_is_tried_again(small, tmp_path):

    found = Sweep.open(small, tmp_path / "runs")
    (tmp_path / "runs").write_text("in the way")
    row = run_job(Job.of(found.grid.trials[0], found.grid, found.runs))
    assert row["state"] == "failed"
    assert "cannot create a run" in row["message"]
    found.results.add(row, [])
    assert len(Sweep.open(small, tmp_path / "other").missing) == 2


@pytest.mark.slow
def test_a_worker_that_is_killed_is_replaced_and_its_trial_goes_on(tmp_path):
    folder = write_grid(tmp_path / "long", train={"steps": 400}, axes={"train.seed": [0]})
    found, watch = Sweep.open(folder, tmp_path / "runs"), Quiet()
    executor = LocalExecutor(1, pids=found.pids)

    def kill_once():
        while not any(move.step > 40 for move in watch.moves):
            time.sleep(0.05)
        os.kill(json.loads(found.pids.read_text())[0], signal.SIGKILL)

    threading.Thread(target=kill_once, daemon=True).start()
    (row,) = list(found.go(executor, watch))
    assert row["state"] == "finished"
    assert len(watch.starts) == 2
    alone = trainer.train(found.grid.trials[0].config, root=tmp_path / "alone")
    mine, theirs = weights(alone), weights(Run(found.runs / row["digest"]))
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)


@pytest.mark.slow
def test_ctrl_c_stops_the_sweep_within_seconds_and_the_same_command_goes_on(tmp_path):
    folder = write_grid(tmp_path / "long", train={"steps": 300}, axes={"train.seed": [0, 1, 2]})
    command = [sys.executable, "-c", "from circuitscope.cli.main import main; main()", "sweep", str(folder)]
    command += ["--runs", str(tmp_path / "runs"), "--jobs", "1"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    metrics = tmp_path / "runs/long"
    until = time.monotonic() + 120
    while not list(metrics.glob("*/metrics.jsonl")) and time.monotonic() < until:
        time.sleep(0.05)
    workers = json.loads((metrics / ".workers.json").read_text())
    process.send_signal(signal.SIGINT)
    began = time.monotonic()
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 130, said
    assert time.monotonic() - began < 20
    assert not any(psutil.pid_exists(pid) for pid in workers)
    assert "the same command goes on" in said
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "3 of 3 trials done" in done.stdout
    rows = Sweep.open(folder, tmp_path / "runs").results.rows.values()
    assert [row["state"] for row in rows] == ["finished"] * 3


def test_after_the_minutes_given_nothing_new_is_started(small, tmp_path):
    found, watch = Sweep.open(small, tmp_path / "runs"), Quiet()
    assert list(found.go(LocalExecutor(1, minutes=0), watch)) == []
    assert watch.starts == []
    assert len(found.missing) == 2


def test_a_second_sweep_of_the_same_grid_is_refused(small, tmp_path):
    one, two = (Sweep.open(small, tmp_path / "runs") for _ in "ab")
    with one._alone(), pytest.raises(UserError, match="running already"):
        list(two.go(LocalExecutor(1), Quiet()))


def test_pause_holds_a_worker_still_and_nothing_else(small, tmp_path):
    found = Sweep.open(small, tmp_path / "runs")
    found.runs.mkdir(parents=True)
    sleeper = [sys.executable, "-c", "import time; time.sleep(60)", "circuitscope.sweeps.worker"]
    worker, stranger = subprocess.Popen(sleeper), subprocess.Popen(sleeper[:-1])
    try:
        found.pids.write_text(json.dumps([worker.pid, stranger.pid]))
        assert found.hold(still=True) == 1
        time.sleep(0.2)
        assert psutil.Process(worker.pid).status() == psutil.STATUS_STOPPED
        assert psutil.Process(stranger.pid).status() != psutil.STATUS_STOPPED
        assert found.hold(still=False) == 1
        time.sleep(0.2)
        assert psutil.Process(worker.pid).status() != psutil.STATUS_STOPPED
    finally:
        worker.kill()
        stranger.kill()
        worker.wait()
        stranger.wait()


def test_a_run_that_cannot_be_read_stops_neither_the_sweep_nor_its_start(small, tmp_path):
    found = Sweep.open(small, tmp_path / "runs")
    trial = found.grid.trials[0]
    run_trial(trial, found.runs)
    (found.runs / trial.digest / "config.yaml").write_text("model: [")
    again = Sweep.open(small, tmp_path / "runs")
    assert again.collect() == 0
    again._add(run_job(Job.of(trial, again.grid, again.runs)))
    assert again.results.rows[trial.digest]["state"] == "failed"


def test_an_unexpected_error_in_a_measure_is_a_failed_row(small, tmp_path, monkeypatch):
    found = Sweep.open(small, tmp_path / "runs")
    job = Job.of(found.grid.trials[0], found.grid, found.runs)
    monkeypatch.setitem(MEASURES, "broken", Measure("nothing", lambda run: {}[0]))
    row = run_job(dataclasses.replace(job, measure=("broken",)))
    assert row["state"] == "failed"
    assert "KeyError" in row["message"]


def test_rows_of_diverged_trials_are_collected_whatever_is_measured(tmp_path):
    folder = write_grid(tmp_path / "wild", train={"clip": None}, axes={"train.lr": [1e30]}, measure=["circuit"])
    found = Sweep.open(folder, tmp_path / "runs")
    run_trial(found.grid.trials[0], found.runs, measure=["circuit"])
    assert Sweep.open(folder, tmp_path / "runs").collect() == 1
