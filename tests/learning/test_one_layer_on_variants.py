"""What one layer of attention does on each recall variant, seen by short training on small vocabularies.

Without a shift it cannot bind, so it recalls only where key and value share a position. Elsewhere it answers with any
value, or with what positions alone tell. Accuracy is on 256 held-out sequences of three or more queries each.
"""

import pytest

import circuitscope as cs

pytestmark = [pytest.mark.slow, pytest.mark.learning]

SMALL = {"vocab_size": 64, "examples": None, "filler": "zero", "weight_decay": 0.1}


def accuracy(tmp_path, task, steps, **options):
    """Validation accuracy at the end of a run of one layer of attention, and the task's chance level."""
    run = cs.train(
        model="attention",
        task=task,
        n_layers=1,
        steps=steps,
        eval_batches=4,
        eval_every=50,
        save_every=steps,
        resume_every=steps,
        threads=1,
        root=tmp_path,
        **{"lr": 3e-3, **options},
    )
    held = run.metrics.query("split == 'validation'")
    return held.accuracy.iloc[-1], run.config.task.chance


def test_it_solves_stacked_recall(tmp_path):
    assert accuracy(tmp_path, "stacked_mqar", 600, length=12, early_stop=0.95)[0] >= 0.95


@pytest.mark.parametrize(
    ("task", "options"),
    [
        ("compound_recall", {"length": 24, "vocab_size": 60}),
        ("two_hop", {"length": 24, "vocab_size": 60}),
        ("mqar", {"passes": 2, "length": 24, **SMALL}),
        ("mqar", {"noise": 8, "length": 24, **SMALL}),
    ],
    ids=["compound", "two hops", "two passes", "noise"],
)
def test_it_answers_with_any_value_where_it_would_have_to_bind(tmp_path, task, options):
    reached, chance = accuracy(tmp_path, task, 200, **options)
    assert reached == pytest.approx(chance, abs=0.1)


def test_it_does_not_tell_which_value_of_forgetting_recall_belongs_to_a_key(tmp_path):
    """Later bindings count more often than earlier ones, so positions alone give more than any value does."""
    reached, chance = accuracy(tmp_path, "mqar", 200, updates=2, length=20, **SMALL)
    assert chance - 0.05 < reached < 0.45


@pytest.mark.parametrize("task", ["fuzzy_recall", "selective_copy"])
def test_positions_and_tokens_of_the_answer_take_it_part_of_the_way(tmp_path, task):
    """In fuzzy recall the tokens of a value that were given rule others out; in copying, the first come first."""
    reached, chance = accuracy(tmp_path, task, 250, length=36 if task == "fuzzy_recall" else 32)
    assert chance + 0.05 < reached < 0.75
