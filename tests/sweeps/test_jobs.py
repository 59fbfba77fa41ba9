"""A job waits for a process that is about to end, tells how far it is, and keeps what is done when it is stopped."""

import fcntl
import os
import signal
import threading

import pandas as pd
import pytest

from circuitscope.errors import Stopped
from circuitscope.progress import Silent
from circuitscope.sweeps.executor import Job, Telling, run_job
from circuitscope.sweeps.grid import Trial
from circuitscope.sweeps.trial import run_trial
from circuitscope.training.trainer import train
from tiny_run import SignalAt, tiny


@pytest.fixture
def run(tmp_path):
    return train(tiny(), root=tmp_path, name="tiny")


def test_a_job_waits_for_a_process_that_still_writes_the_run(tmp_path):
    trial = Trial(tiny(), {"train.seed": 0})
    with pytest.raises(Stopped):
        run_trial(trial, tmp_path, progress=SignalAt(6))
    job = Job(trial.digest, trial.config.dump(), trial.values, str(tmp_path))
    held = os.open(tmp_path / trial.digest / ".lock", os.O_RDWR | os.O_CREAT)
    fcntl.flock(held, fcntl.LOCK_EX)
    row = run_job(job)
    assert row["state"] == "failed"
    assert "is being written by" in row["message"]
    threading.Timer(0.5, os.close, [held]).start()
    assert run_job(job, patience=30)["state"] == "finished"


def test_an_analysis_tells_which_checkpoint_it_is_at(run):
    moves = []
    job = Job.analysis(run, ["scores"], None, 8)
    assert run_job(job, Telling(job, moves.append, seconds=0)) == {"digest": str(run.path), "state": "finished"}
    assert [(move.step, move.steps, move.metric) for move in moves] == [(n, 5, "scores") for n in range(6)]


def test_an_analysis_that_is_terminated_keeps_the_checkpoints_it_has_read(run):
    class Terminates(Silent):
        def advance(self, step, loss=None, saved=None):
            if step == 6:
                os.kill(os.getpid(), signal.SIGTERM)

    job = Job.analysis(run, ["scores"], None, 8)
    with pytest.raises(Stopped, match="what is done is kept"):
        run_job(job, Terminates())
    kept = pd.read_parquet(run.path / "analysis" / "scores-8.parquet")
    assert {0, 3, 6} <= set(kept.step) < {0, 3, 6, 9, 12}
    assert run_job(job)["state"] == "finished"
