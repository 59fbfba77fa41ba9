"""A trial measures itself: whether its circuit formed, when, and how far its matrix reaches."""

import json

import pytest
import torch
import torch.nn.functional as F

from circuitscope.analysis.checkpoints.runner import analyze, held_out
from circuitscope.analysis.curvature import adam_scale, sharpness
from circuitscope.analysis.evaluation import MODEL, evaluate
from circuitscope.analysis.scores.curves import curve_at, strongest
from circuitscope.errors import UserError
from circuitscope.models.hooked_lm import HookedLM
from circuitscope.runs.run import Run
from circuitscope.sweeps.grid import make_grid
from circuitscope.sweeps.measures import MEASURES, _answers, _missing
from circuitscope.sweeps.stability import stability_at
from circuitscope.sweeps.trial import best_checkpoint, curves_of, evaluated, numbers_of, run_trial

TRAIN = {
    "steps": 8,
    "batch_size": 8,
    "eval_every": 2,
    "eval_batches": 2,
    "eval_batch_size": 8,
    "save_every": 2,
    "log_every": 4,
}
TASK = {"length": 16, "pairs": 2, "vocab_size": 64}
BASE = {"recipe": "plain", "task": TASK, "train": TRAIN, "model": {"d_model": 8, "n_layers": 1}}


@pytest.mark.parametrize("preset", ["attention", "mamba", "lstm"])
def test_every_measure_gives_a_row_for_models_with_and_without_phi(preset, tmp_path):
    (trial,) = make_grid("g", {"base": BASE, "axes": {"model.preset": [preset]}}).trials
    row = run_trial(trial, tmp_path, measure=list(MEASURES))
    assert row["state"] == "finished"
    assert row["measured"].split() == list(MEASURES)
    assert (row["state_size"] is None) == (preset == "attention")
    assert row["circuit"] in ("found", "not found") or "no circuit" in row["circuit"]
    if preset == "mamba":
        assert row["time_constant_L0"] > 0
        assert row["state_size"] == 16 * 16 + 16 * 3  # of the scan, and of the conv
        assert 0 < row["transition_L0"] < 1
        assert 0 < row["transition_start_L0"] < 1
        assert row["transition_L0"] != row["transition_start_L0"]
        assert row["binding_place"].startswith("L0")
        assert row["missing"] == "values, binding and recall"  # after eight steps there is nothing yet
        assert {"grad_norm/ssm.A_log", "grad_norm/ssm.dt_proj", "grad_norm/in_proj", "grad_norm/conv"} <= set(row)
    if preset == "lstm":
        assert row["missing"] == "values and match"
    assert row["answers"] == "no value"
    assert row["value_share"] < 0.5
    assert row["any_value_accuracy"] == 0.5
    assert 0 <= row["clipped"] <= 1
    assert 0 < row["sharpness"] <= row["sharpness_max"]
    assert row["stability_ratio"] == pytest.approx(row["preconditioned"] / row["stability_threshold"])
    assert row["stability_ratio"] <= row["stability_ratio_max"]
    assert row["stability_threshold"] == pytest.approx(38 / trial.config.train.lr)


def test_a_trial_keeps_what_its_model_does_on_inputs_that_training_never_had(tmp_path):
    task = {"name": "many_outlier", "dims": 2, "points": 5, "outliers": 0.5}
    model = {"preset": "attention", "d_model": 8, "n_layers": 1}
    (trial,) = make_grid("g", {"base": {**BASE, "task": task}, "axes": {"model": {"named": {"a": model}}}}).trials
    row = run_trial(trial, tmp_path, measure=["evaluation"])
    table = evaluate(Run(tmp_path / trial.digest))
    own = table[table["of"] == MODEL].set_index("measure")["value"]
    assert row["evaluated_error_without_outliers"] == own["error without outliers"]
    assert row["evaluated_error"] == own["error"] != row["evaluated_error_without_outliers"]


def test_an_unknown_measure_is_refused_before_anything_is_trained(tmp_path):
    (trial,) = make_grid("g", {"base": BASE, "axes": {"train.seed": [1]}}).trials
    with pytest.raises(UserError, match="unknown measure 'circut'; did you mean 'circuit'"):
        run_trial(trial, tmp_path, measure=["circut"])
    assert not list(tmp_path.iterdir())


def test_the_best_checkpoint_is_chosen_on_validation_and_reported_on_test(tmp_path):
    (trial,) = make_grid("g", {"base": BASE, "axes": {"train.seed": [1]}}).trials
    row = run_trial(trial, tmp_path)
    run = Run(tmp_path / trial.digest)
    held = run.metrics[run.metrics.split == "validation"].set_index("step").accuracy
    assert held[best_checkpoint(run)] == held.max()
    accuracy, loss = evaluated(run, run.steps[-1])
    assert (row["last_test_accuracy"], row["last_test_loss"]) == (accuracy, loss)


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """A tiny trial with every measure of its circuit, its run and its row."""
    folder = tmp_path_factory.mktemp("measured")
    train = {**TRAIN, "log_every": 2, "resume_every": 4, "clip": 0.5, "save_every": 4, "lr_groups": {"embed.*": 0.5}}
    (trial,) = make_grid("g", {"base": {**BASE, "train": train}, "axes": {"train.seed": [1]}}).trials
    row = run_trial(trial, folder, measure=["phases"])
    return Run(folder / trial.digest), row


def test_gradients_in_the_row_are_those_of_the_log(measured):
    run, row = measured
    logged = run.metrics[run.metrics.split == "train"]
    assert len(logged) == 4
    assert row["clipped"] == logged.clipped.mean() > 0
    assert (row["grad_norm"], row["grad_norm_max"]) == (logged.grad_norm.median(), logged.grad_norm.max())
    assert row["grad_norm/embed"] == logged["grad_norm/embed"].median()


def test_a_run_of_an_earlier_release_has_a_row_without_gradients(measured):
    run, _ = measured
    lines = [json.loads(line) for line in (run.path / "metrics.jsonl").read_text().splitlines()]
    new = ("grad_norm", "clipped")
    old = "".join(json.dumps({k: v for k, v in row.items() if not k.startswith(new)}) + "\n" for row in lines)
    before = (run.path / "metrics.jsonl").read_text()
    try:
        (run.path / "metrics.jsonl").write_text(old)
        assert not [name for name in numbers_of(run) if name.startswith(new)]
    finally:
        (run.path / "metrics.jsonl").write_text(before)


def test_curves_hold_the_scores_that_were_measured_by_step(measured):
    run, _ = measured
    points = {point["step"]: point for point in curves_of(run)}
    assert list(points) == [0, 2, 4, 6, 8]
    with_scores = [step for step, point in points.items() if "binding" in point]
    assert with_scores == run.steps == [0, 4, 8]
    assert {"loss", "accuracy", "binding", "recall", "previous_token", "induction"} <= set(points[8])
    table = analyze(run)
    place = strongest(table, "recall")
    wanted = curve_at(table, place).set_index("step").value
    assert [points[step]["recall"] for step in run.steps] == pytest.approx(wanted.tolist(), rel=1e-4)


def test_curves_of_a_run_that_measured_no_scores_have_none(tmp_path):
    (trial,) = make_grid("g", {"base": BASE, "axes": {"train.seed": [1]}}).trials
    run_trial(trial, tmp_path)
    assert {name for point in curves_of(Run(tmp_path / trial.digest)) for name in point} <= {
        *("step", "loss", "accuracy", "train_loss")
    }


def test_stability_is_measured_on_the_first_batch_with_the_moments_and_rates_of_the_resume_point(measured):
    run, _ = measured
    found = stability_at(run, 4)
    point, config = run.checkpoints.load_resume_point(4), run.config
    model = run.empty_model()
    model.load_state_dict(point.weights)
    second = {name: point.moments[f"second.{name}"] for name, _ in model.named_parameters()}
    halved = {name: 0.5 if name.startswith("embed.") else 1.0 for name in second}
    batch = config.task.batch(0, size=8, seed=1)
    scale = adam_scale(second, 4, config.train.beta2, halved)
    assert found.sharpness == sharpness(model, lambda m: config.task.loss(m, batch)[0]).value
    assert found.preconditioned == sharpness(model, lambda m: config.task.loss(m, batch)[0], scale=scale).value


def test_a_run_that_diverged_is_measured_at_its_last_good_point(tmp_path):
    train = {**TRAIN, "steps": 400, "lr": 1e9, "resume_every": 1, "save_every": 1, "clip": None, "eval_every": 1}
    (trial,) = make_grid("g", {"base": {**BASE, "train": train}, "axes": {"train.seed": [1]}}).trials
    row = run_trial(trial, tmp_path, measure=["circuit", "curvature"])
    assert row["state"] == "diverged"
    assert row["measured"] == "circuit curvature"
    assert row["missing"] == "values, binding and recall"
    assert "sharpness" in row or "curvature" in row


@pytest.mark.parametrize(
    ("right", "values", "answers"), [(0.9, 1.0, "the bound value"), (0.5, 0.97, "any value"), (0.1, 0.2, "no value")]
)
def test_answers_say_whether_the_model_finds_the_bound_value_any_value_or_none(
    measured, monkeypatch, right, values, answers
):
    """A model that answers as it is told: right, with another value of the context, or with a token that is none."""
    run, _ = measured
    batch = held_out(run).own
    where, target = batch.labelled()
    in_row = batch.tokens.gather(1, batch.layout.value_pos)[where // batch.tokens.shape[1]]
    other = torch.where(in_row[:, 0] == target, in_row[:, 1], in_row[:, 0])
    n = len(target)
    told = torch.cat([target[: int(n * right)], other[int(n * right) : int(n * values)], other[int(n * values) :] * 0])
    monkeypatch.setattr(HookedLM, "hidden", lambda self, tokens, at, **_: F.one_hot(told, 64).float())
    monkeypatch.setattr(HookedLM, "W_U", torch.eye(64))
    found = _answers(run)
    assert found["answers"] == answers
    assert found["value_share"] == pytest.approx(values, abs=0.01)


@pytest.mark.parametrize(
    ("steps", "answers", "missing"),
    [
        ([], "the bound value", ""),
        (["recall"], "the bound value", "recall"),
        (["binding"], "any value", "binding"),
        (["binding", "recall"], "any value", "binding and recall"),
        (["binding", "recall"], "no value", "values, binding and recall"),
    ],
)
def test_what_is_missing_is_listed_in_the_order_in_which_it_is_learned(steps, answers, missing):
    assert _missing({"answers": answers}, steps) == missing
