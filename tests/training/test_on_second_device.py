"""Training on a device that is not the CPU: the same losses, no step that waits, and no weights that are not finite."""

import json

import pytest
import torch

from circuitscope.errors import Diverged
from circuitscope.models.hooked_lm import HookedLM
from circuitscope.progress import Silent
from circuitscope.runs.metrics import read_metrics
from circuitscope.runs.run import Run, create_run
from circuitscope.training import trainer as trainers
from circuitscope.training.trainer import Trainer, resume, train
from second_device import DEVICE, second_device
from tiny_run import Crash, CrashAt, saved, tiny


@pytest.fixture
def crossed(monkeypatch):
    """Runs train on the second device, which has no float64, whatever their config says."""
    monkeypatch.setattr(trainers, "check_feasible", lambda config: DEVICE)
    monkeypatch.setattr(trainers, "choose_device", lambda name: DEVICE)
    with second_device(float64=False) as counted:
        yield counted


def losses(run):
    return [row["loss"] for row in read_metrics(run.path)]


def test_a_run_has_the_losses_and_weights_of_one_on_the_cpu(tmp_path, crossed, monkeypatch):
    there = train(tiny(), root=tmp_path, name="there")
    assert json.loads((there.path / "environment.json").read_text())["device"] == "second"
    monkeypatch.undo()
    here = train(tiny(), root=tmp_path, name="here")
    assert losses(there) == pytest.approx(losses(here), rel=1e-4)
    ours, theirs = saved(there.path), saved(here.path)
    assert ours.keys() == theirs.keys()
    for name, weight in theirs[12].items():
        torch.testing.assert_close(ours[12][name], weight, rtol=1e-3, atol=1e-4)


def test_a_crashed_run_resumes_there_to_the_same_bits(tmp_path, crossed):
    whole = train(tiny(), root=tmp_path, name="whole")
    with pytest.raises(Crash):
        train(tiny(), root=tmp_path, name="broken", progress=CrashAt(6))
    broken = resume(Run(tmp_path / "broken"))
    assert all(torch.equal(weight, saved(whole.path)[12][name]) for name, weight in saved(broken.path)[12].items())


def test_a_step_waits_for_nothing_and_a_logged_one_for_one_transfer(tmp_path, crossed):
    config = tiny(clip=0.5)
    trainer = Trainer(create_run(config, root=tmp_path), config, DEVICE, Silent())
    trainer.build()
    assert isinstance(trainer.model, HookedLM)
    for _ in range(5):
        crossed.reset()
        trainer.update()
        trainer.step += 1
        assert crossed.total == 0
    loss, metric = trainer.update(measure=True)
    assert crossed.total == 0
    row = trainer._measured(loss, metric)
    assert (crossed.to_cpu, crossed.waits.total()) == (1, 0)
    assert row["loss"] > 0
    assert 0 <= row["clipped"] * config.train.log_every <= 6


def test_a_run_that_diverges_says_at_which_step_and_saves_nothing_that_is_not_finite(tmp_path, crossed):
    with pytest.raises(Diverged, match=r"not finite at step \d+|is nan at step"):
        train(tiny(lr=1e30, clip=None), root=tmp_path, name="wild")
    run = Run(tmp_path / "wild")
    assert run.status["state"] == "diverged"
    assert all(t.isfinite().all() for tensors in saved(run.path).values() for t in tensors.values())


def test_weights_that_overflow_in_the_last_update_are_not_saved_there_either(tmp_path, crossed):
    options = {"lr": 3e38, "beta1": 0.0, "warmup": 0, "steps": 1, "save_every": 1, "weight_decay": 10.0}
    with pytest.raises(Diverged, match="at step 1: the run diverged"):
        train(tiny(**options), root=tmp_path, name="wild")
    assert Run(tmp_path / "wild").steps == [0]
