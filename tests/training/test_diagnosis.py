"""A run that ended badly says what it looks like, from its curves alone; one that solved its task says nothing."""

import math
import random

import pytest

import circuitscope as cs
from circuitscope.config import RunConfig
from circuitscope.runs.metrics import read_metrics
from circuitscope.training.diagnosis import diagnose

STEPS = 1500


def rows(accuracy, on_train=None, loss=None, held_loss=None, noise=0.01, steps=STEPS) -> list[dict]:
    """Metrics as training writes them: curves are functions of the share of the run, with noise as batches have it."""
    draw = random.Random(0)
    on_train, loss = on_train or accuracy, loss or (lambda t: 9 - 6.5 * min(1, 3 * t))
    held_loss = held_loss or loss
    found = []
    for step in range(0, steps + 1, 10):
        t = step / steps
        if step:
            wrong = loss(t) + draw.gauss(0, 10 * noise)
            found.append({"step": step, "split": "train", "loss": wrong, "accuracy": on_train(t)})
        if step % 50 == 0:
            batches = [min(1.0, max(0.0, accuracy(t) + draw.gauss(0, noise))) for _ in range(8)]
            found.append(
                {
                    "step": step,
                    "split": "validation",
                    "loss": held_loss(t),
                    "accuracy": accuracy(t),
                    "accuracy_per_batch": batches,
                }
            )
    return found


def looks(metrics, **options) -> str:
    found = diagnose(metrics, RunConfig.build(recipe="plain", **options))
    return found.kind if found else ""


def says(metrics, **options) -> str:
    found = diagnose(metrics, RunConfig.build(recipe="plain", **options))
    assert found is not None
    assert "\n" not in found.sentence
    return found.sentence


def turn(t: float) -> float:
    """Rises slowly to a quarter, then suddenly to 99%."""
    return 0.25 * min(1, 2 * t) if t < 0.6 else 0.99


def test_nothing_is_said_of_a_run_that_solved_its_task_or_reached_its_early_stop():
    assert looks(rows(turn)) == ""
    assert looks(rows(lambda t: 0.95 if t == 1 else 0.2, noise=0)) == ""
    assert looks(rows(lambda t: 0.6 * t, noise=0), early_stop=0.6) == ""
    assert looks(rows(lambda t: 0.6 * t, noise=0), early_stop=0.61) == "still rising"


def test_a_run_at_one_over_k_finds_values_but_not_the_match():
    flat = rows(lambda t: 0.247 * min(1, 3 * t))
    assert looks(flat) == "at 1/k"
    assert "not the one that belongs to the key (accuracy 24.7%, any value gives 25.0%)" in says(flat)
    assert "--layers 2" not in says(flat)
    assert says(flat, n_layers=1).endswith("try --layers 2")
    assert "--lr 0.003" in says(flat, model="mamba", n_layers=1)


def test_a_run_that_memorizes_is_far_better_on_its_training_examples():
    found = rows(lambda t: 0.25 * min(1, 3 * t), on_train=lambda t: min(1, 1.5 * t))
    assert looks(found) == "memorizing"
    assert "accuracy 100.0% on training examples and 25.0% on held-out ones; try --examples none" in says(found)


def test_a_run_that_still_rises_needs_more_steps():
    found = rows(lambda t: 0.923 * t**0.5)
    assert looks(found) == "still rising"
    assert "to 92.3% in the last quarter of the run; try --steps 3000" in says(found)
    falls = rows(lambda t: 0.001, loss=lambda t: 9 - 2 * t)
    assert looks(falls) == "still rising"
    assert says(falls).startswith("still learning: the validation loss went from")


def test_a_run_whose_loss_rose_or_jumped_is_unstable():
    rose = rows(lambda t: 0.6 if t < 0.7 else 0.1, loss=lambda t: 9 - 8 * t if t < 0.7 else 6.0)
    assert looks(rose) == "unstable"
    assert "try --lr 0.00033, or a longer --warmup" in says(rose)
    assert says(rose, clip=None).endswith("or --clip 1")
    jumps = rows(lambda t: 0.5, loss=lambda t: 8.0 if round(t * STEPS) % 300 == 0 else 9 - 7 * min(1, 3 * t), noise=0)
    assert "jumped up" in says(jumps)


def test_a_run_that_learned_nothing_is_at_chance():
    assert looks(rows(lambda t: 0.0003, loss=lambda t: 9.0)) == "at chance"
    found = says(rows(lambda t: 0.01, loss=lambda t: 9.0), task="induction")  # the context offers no level to compare
    assert found.startswith("at chance: accuracy 1.0%, and it does not rise")


def test_a_run_between_one_over_k_and_the_solution_is_called_stalled():
    found = rows(lambda t: 0.6 * min(1, 3 * t))
    assert looks(found) == "stalled"
    assert "try --schedule cosine" in says(found)
    assert "--schedule" not in says(found, schedule="cosine")


@pytest.mark.parametrize(
    ("accuracy", "kind"),
    [
        (math.nextafter(0.1875, 0), "at chance"),
        (0.1875, "at 1/k"),
        (0.2875, "at 1/k"),
        (math.nextafter(0.2875, 1), "stalled"),
        (math.nextafter(0.95, 0), "stalled"),
        (0.95, ""),
    ],
)
def test_the_levels_of_noise_free_runs_are_told_apart_where_they_meet(accuracy, kind):
    assert looks(rows(lambda t: accuracy, noise=0)) == kind


@pytest.mark.parametrize(("gap", "kind"), [(0.25, "memorizing"), (0.125, "at 1/k")])
def test_a_small_gap_to_the_training_examples_is_no_memorizing(gap, kind):
    assert looks(rows(lambda t: 0.25, on_train=lambda t: 0.25 + gap, noise=0)) == kind


def test_noise_between_evaluations_is_no_rise():
    metrics = rows(lambda t: 0.25, noise=0.04)
    held = [row for row in metrics if row["split"] == "validation"]
    held[-1]["accuracy"] = 0.28
    assert looks(metrics) == "at 1/k"


def test_with_one_evaluation_or_without_metrics_nothing_is_said():
    assert looks([]) == ""
    assert looks([row for row in rows(lambda t: 0.1) if row["step"] == 0]) == ""


def test_a_real_run_of_one_layer_of_attention_says_that_it_ends_at_one_over_k(tmp_path):
    run = cs.train(
        model="attention",
        n_layers=1,
        d_model=16,
        length=8,
        pairs=2,
        vocab_size=16,
        examples=None,
        recipe="plain",
        steps=200,
        lr=1e-2,
        weight_decay=0.1,
        eval_every=50,
        eval_batches=4,
        eval_batch_size=250,
        save_every=200,
        threads=1,
        root=tmp_path,
    )
    assert run.status["looks"] == "at 1/k", read_metrics(run.path)[-1]
    assert run.status["message"].endswith("try --layers 2")
