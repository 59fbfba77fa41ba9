"""What the papers claim of small models, seen by training them: MQAR (64, 4), vocabulary 8,192, clean filler.

Accuracy is on 2,048 held-out queries, whose standard error is at most 1.1 points. Where a model is
expected to pass a mark, training stops there; where it is not, it runs to the end.
"""

import pytest

import circuitscope as cs

pytestmark = [pytest.mark.slow, pytest.mark.learning]

CHANCE = 1 / 4  # of answering with any value of the context


def best_accuracy(tmp_path, model, *, layers, steps, lr, weight_decay, stop_at=None):
    """The highest validation accuracy over the last third of the evaluations, or at the stop."""
    run = cs.train(
        model=model,
        n_layers=layers,
        steps=steps,
        lr=lr,
        weight_decay=weight_decay,
        early_stop=stop_at,
        warmup=0.1,
        filler="clean",
        threads=1,
        save_every=steps,
        resume_every=steps,
        root=tmp_path,
    )
    held = run.metrics.query("split == 'validation'")
    return held.accuracy.iloc[-(len(held) // 3 + 1) :].max()


def test_one_layer_attention_stops_at_one_over_k(tmp_path):
    accuracy = best_accuracy(tmp_path, "attention", layers=1, steps=600, lr=2e-3, weight_decay=0.1)
    assert accuracy == pytest.approx(CHANCE, abs=0.03)


def test_two_layers_of_attention_pass_95_percent(tmp_path):
    """The default recipe; the step at which it turns for five seeds is in studies/default_recipe."""
    accuracy = best_accuracy(tmp_path, "attention", layers=2, steps=1500, lr=1e-3, weight_decay=1.0, stop_at=0.96)
    assert accuracy >= 0.95


def test_a_short_conv_on_the_keys_lets_one_layer_of_attention_pass_95_percent(tmp_path):
    accuracy = best_accuracy(tmp_path, "attention_conv_k", layers=1, steps=600, lr=2e-3, weight_decay=0.1, stop_at=0.96)
    assert accuracy >= 0.95


def test_a_short_conv_on_the_queries_does_not(tmp_path):
    accuracy = best_accuracy(tmp_path, "attention_conv_q", layers=1, steps=600, lr=2e-3, weight_decay=0.1)
    assert accuracy < 0.5


def test_one_layer_of_deltanet_passes_90_percent(tmp_path):
    accuracy = best_accuracy(tmp_path, "deltanet", layers=1, steps=600, lr=3e-3, weight_decay=0.1, stop_at=0.91)
    assert accuracy >= 0.9
