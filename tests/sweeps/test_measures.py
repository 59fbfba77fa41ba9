"""A trial measures itself: whether its circuit formed, when, and how far its matrix reaches."""

import pytest

from circuitscope.errors import UserError
from circuitscope.sweeps.grid import make_grid
from circuitscope.sweeps.measures import MEASURES
from circuitscope.sweeps.trial import best_checkpoint, evaluated, run_trial

TRAIN = {"steps": 8, "batch_size": 8, "eval_every": 2, "eval_batches": 2, "eval_batch_size": 8, "save_every": 2}
BASE = {"task": {"length": 16, "pairs": 2, "vocab_size": 64}, "train": TRAIN, "model": {"d_model": 8, "n_layers": 1}}


@pytest.mark.parametrize("preset", ["attention", "mamba", "lstm"])
def test_every_measure_gives_a_row_for_models_with_and_without_phi(preset, tmp_path):
    (trial,) = make_grid("g", {"base": BASE, "axes": {"model.preset": [preset]}}).trials
    row = run_trial(trial, tmp_path, measure=list(MEASURES))
    assert row["state"] == "finished"
    assert row["measured"].split() == list(MEASURES)
    assert row["circuit"] in ("found", "not found") or "no circuit" in row["circuit"]
    if preset == "mamba":
        assert row["time_constant_L0"] > 0
        assert row["binding_place"].startswith("L0")
        assert row["missing"] == "binding and recall"  # after eight steps there is nothing yet


def test_an_unknown_measure_is_refused_before_anything_is_trained(tmp_path):
    (trial,) = make_grid("g", {"base": BASE, "axes": {"train.seed": [1]}}).trials
    with pytest.raises(UserError, match="unknown measure 'circut'; did you mean 'circuit'"):
        run_trial(trial, tmp_path, measure=["circut"])
    assert not list(tmp_path.iterdir())


def test_the_best_checkpoint_is_chosen_on_validation_and_reported_on_test(tmp_path):
    (trial,) = make_grid("g", {"base": BASE, "axes": {"train.seed": [1]}}).trials
    row = run_trial(trial, tmp_path)
    from circuitscope.runs.run import Run

    run = Run(tmp_path / trial.digest)
    held = run.metrics[run.metrics.split == "validation"].set_index("step").accuracy
    assert held[best_checkpoint(run)] == held.max()
    accuracy, loss = evaluated(run, run.steps[-1])
    assert (row["last_test_accuracy"], row["last_test_loss"]) == (accuracy, loss)
