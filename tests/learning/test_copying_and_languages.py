"""Copying, fuzzy recall and languages are learned, seen by short training at reduced sizes.

Training stops where the mark is passed. Accuracy and legality are on 256 held-out sequences.
"""

import pytest

import circuitscope as cs

pytestmark = [pytest.mark.slow, pytest.mark.learning]


def learned(tmp_path, model, task, steps, stop_at, **options):
    """The run, and the value of its task's metric on held-out sequences at the end."""
    run = cs.train(
        model=model,
        task=task,
        steps=steps,
        early_stop=stop_at,
        eval_batches=4,
        eval_every=25,
        save_every=steps,
        resume_every=steps,
        threads=1,
        root=tmp_path,
        **options,
    )
    held = run.metrics.query("split == 'validation'")
    return run, held[run.config.task.metric].iloc[-1]


def best_baseline(run, names):
    """The highest score that one of the named rules has on held-out sequences."""
    task = run.config.task
    batch = task.batch(0, split="validation", size=100)
    return max(task.baselines[name](batch).mean().item() for name in names)


def test_two_layers_of_attention_copy_strings(tmp_path):
    options = {"shortest": 4, "longest": 8, "vocab_size": 14, "lr": 3e-3}
    assert learned(tmp_path, "attention", "copy", 800, 0.96, **options)[1] >= 0.95


def test_two_layers_of_attention_copy_selectively(tmp_path):
    options = {"length": 16, "copied": 3, "vocab_size": 12, "lr": 3e-3}
    assert learned(tmp_path, "attention", "selective_copy", 1200, 0.96, **options)[1] >= 0.95


def test_two_layers_of_attention_recall_motifs(tmp_path):
    options = {"length": 24, "pairs": 2, "vocab_size": 20, "motif": 2, "lr": 3e-3}
    assert learned(tmp_path, "attention_rope", "fuzzy_recall", 800, 0.96, **options)[1] >= 0.95


def test_attention_with_short_convs_uses_what_it_has_seen_of_a_language(tmp_path):
    """Far more often legal than the most frequent symbol of the prompt, which needs no order."""
    options = {"states": (4, 6), "strings": (6, 8), "lengths": (5, 15), "lr": 3e-3, "n_layers": 1, "batch_size": 16}
    run, legality = learned(tmp_path, "attention_conv_qkv", "regbench", 400, 0.8, **options)
    assert legality > best_baseline(run, ["1-gram with back-off, in context"]) + 0.2


def test_an_lstm_predicts_documents_better_than_bigrams(tmp_path):
    options = {"length": 64, "values": 4, "slots": 5, "hmms": 2, "vocab_size": 20, "lr": 5e-3, "n_layers": 1}
    run, accuracy = learned(tmp_path, "lstm", "ginc", 400, 0.9, **options, batch_size=32)
    task = run.config.task
    rules = [name for name in task.baselines if "posterior" not in name]
    assert accuracy > best_baseline(run, rules) + 0.05
