"""A run on vectors works like any other: resume, zoom, analyses, probes, figures, report, sweep, evaluation."""

import pandas as pd
import pytest
import torch

import circuitscope as cs
from circuitscope.analysis.checkpoints.runner import analysis_table
from circuitscope.analysis.registry import ANALYSES, refusal
from circuitscope.sweeps.trial import best_checkpoint, numbers_of
from circuitscope.training import trainer
from circuitscope.training.repeat import repeat
from tiny_run import TINY, Listens

SMALL = {name: value for name, value in TINY.items() if name not in ("length", "pairs", "vocab_size")}
REGRESSION = {**SMALL, "dims": 3, "points": 6, "curriculum": 4}
RECALL = {**SMALL, "dims": 4, "pairs": 3, "queries": 2}


def config(model="mamba", task="linear_regression", **options):
    return cs.RunConfig.build(model, task, **{**(RECALL if task == "vector_mqar" else REGRESSION), **options})


@pytest.fixture(scope="module")
def regression(tmp_path_factory):
    return trainer.train(config(), root=tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="module")
def recall(tmp_path_factory):
    return trainer.train(config("attention", "vector_mqar"), root=tmp_path_factory.mktemp("runs"))


def test_a_run_that_was_stopped_ends_at_the_same_bits(regression, tmp_path):
    """Also across the stages of a curriculum, which follow from the step."""
    with pytest.raises(trainer.Interrupted):
        trainer.train(config(), root=tmp_path, name="stopped", progress=Listens(stop_at=6))
    resumed = cs.resume(tmp_path / "stopped")
    for name, tensor in regression.load().state_dict().items():
        assert torch.equal(tensor, resumed.load().state_dict()[name]), name


def test_a_stretch_repeats_to_the_same_bits(tmp_path):
    run = trainer.train(config(), root=tmp_path)
    done = repeat(run, 3, 9, 1)
    assert done.differs is None
    assert done.equal[-1] == 9
    assert done.added


def test_the_log_has_the_error_and_the_best_step_is_that_of_the_smallest(regression):
    held = regression.metrics.query("split == 'validation'")
    assert held.error.to_list() == held.loss.to_list()
    numbers = numbers_of(regression, fractions=[1.0])
    assert numbers["best_validation_error"] == held.error.min() == numbers["error_at_1"]
    assert numbers["best_step"] == held.step.iloc[int(held.error.argmin())]
    saved = held[held.step.isin(regression.steps)]
    assert best_checkpoint(regression) == saved.step.iloc[int(saved.error.argmin())]


def test_a_run_stops_early_at_an_error_that_is_small_enough(regression, tmp_path):
    errors = regression.metrics.query("split == 'validation' and step > 0")
    level = float(errors.error.iloc[0]) + 1e-3
    said = Listens()
    stopped = trainer.train(config(early_stop=level), root=tmp_path, progress=said)
    assert stopped.steps[-1] == errors.step.iloc[0]
    assert any(line.startswith("validation error") and "reached at step 4" in line for line in said.lines)
    with pytest.raises(cs.UserError, match=r"expected at most 1, got 1\.5"):
        cs.RunConfig.build("attention", "mqar", early_stop=1.5)


@pytest.mark.parametrize("which", ["regression", "recall"])
def test_every_analysis_gives_a_table_or_says_why_not(which, request):
    run = request.getfixturevalue(which)
    for name in ANALYSES:
        if why := refusal(name, run):
            assert which == "regression" or "pairs" not in why
            continue
        table = analysis_table(run, name, steps=str(run.steps[-1]), sequences=16)
        assert isinstance(table, pd.DataFrame)
        assert len(table) or name == "phases"
    assert bool(refusal("circuit", run)) == (which == "regression")
    said = [line for name in ANALYSES for line in ANALYSES[name].leaves_out(run)]
    assert any(line.startswith("induction, duplicate are left out: they need a task with tokens") for line in said)
    assert len(said) == (3 if which == "regression" else 1)  # also what needs pairs: scores and interchange


def test_scores_of_a_task_without_pairs_say_which_it_has(regression):
    with pytest.raises(cs.UserError, match="recall needs a task with keys, values and queries"):
        cs.analyze(regression, scores=["recall"])
    with pytest.raises(cs.UserError, match="induction needs a task with tokens, of which blocks are repeated"):
        cs.analyze(regression, scores=["induction"])
    table = cs.analyze(regression, steps="12", sequences=16)
    assert {"loss", "explained_variance", "loss_at_position"} <= set(table.score)
    assert "accuracy" not in set(table.score)


def test_recall_scores_and_knockouts_work_on_vectors(recall):
    table = cs.analyze(recall, scores=["binding", "recall", "model"], steps="12", sequences=32)
    assert {"binding", "recall", "accuracy", "loss"} <= set(table.score)
    batch = recall.batch(size=16)
    effect = cs.analysis.knock_out(recall.load(), batch, "recall", layer=1)
    assert 0 <= effect.after <= 1
    assert 0 <= effect.before <= 1
    told = cs.analysis.interchange(recall.load(), batch)
    assert len(told)
    assert cs.analysis.find_circuit(recall.load(), batch).sentences()


def test_exchanged_vectors_are_the_values_of_two_pairs(recall):
    from circuitscope.analysis.causal.patching import exchange_values

    batch = recall.batch(size=20)
    twins = exchange_values(batch)
    changed = (twins.clean != twins.exchanged).any(dim=2)
    assert bool((changed.sum(dim=1) == 2).all())
    values = torch.zeros_like(changed).scatter(1, batch.layout.value_pos, True)
    assert bool((changed <= values).all())
    torch.testing.assert_close(twins.clean.sum(dim=1), twins.exchanged.sum(dim=1))


def test_evaluate_puts_the_model_beside_the_rules_of_the_task(regression, tmp_path):
    table = cs.evaluate(regression, sequences=60)
    assert set(table.query("measure == 'error'").of) == {
        "the model",
        "least squares",
        "averaging",
        "3 nearest neighbours",
    }
    assert "perplexity" not in set(table.measure)
    assert bool((table.low <= table.value).all())
    assert bool((table.value <= table.high).all())
    outliers = trainer.train(config("attention", "many_outlier", outliers=0.5, steps=2), root=tmp_path)
    found = cs.evaluate(outliers, sequences=20)
    assert set(found.query("measure == 'error without outliers'").of) == {
        "the model",
        "least squares",
        "averaging",
        "3 nearest neighbours",
    }
    assert cs.task("many_outlier").tested_on == 1280


def test_the_weight_vector_is_probed_and_token_probes_are_refused(regression):
    table = cs.probe(regression, "weight-vector", steps="12", sequences=60)
    assert set(table.role) == {"input", "output"}
    assert set(table.metric) == {"r2"}
    with pytest.raises(cs.UserError, match="vectors and no tokens"):
        cs.probe(regression, "own-token", steps="12", sequences=60)


def test_figures_and_the_report_are_drawn(regression, recall):
    from circuitscope.viz.phi_figure import phi_figure

    for run in (regression, recall):
        assert phi_figure(run, 0).axes
        assert cs.report(run, sequences=16).html.startswith("<!")
