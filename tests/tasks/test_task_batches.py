"""What holds for every task: a batch is a pure function of its arguments; finite sets; versions."""

import random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import circuitscope as cs

TASKS = {
    "mqar": {"length": 32, "pairs": 3},
    "ar": {"length": 32, "pairs": 3, "vocab_size": 500},
    "induction": {"block": 6, "repeats": 3},
    "stacked_mqar": {},
    "compound_recall": {},
    "two_hop": {},
    "fuzzy_recall": {},
    "selective_copy": {},
    "copy": {},
    "regbench": {"strings": (3, 5), "lengths": (4, 9)},
    "ginc": {"length": 40},
}
names = pytest.mark.parametrize("name", list(TASKS))


def small(name: str, **options):
    return cs.task(name, **TASKS[name] | options)


def same(a, b) -> bool:
    layouts = [(x.layout.roles, x.layout.query_pos, x.layout.query_pair) for x in (a, b)]
    return (
        torch.equal(a.tokens, b.tokens)
        and torch.equal(a.labels, b.labels)
        and all((x is None and y is None) or torch.equal(x, y) for x, y in zip(*layouts, strict=True))
    )


def rows(batch) -> list[tuple[int, ...]]:
    return [tuple(r) for r in batch.tokens.tolist()]


def test_every_named_task_is_tested_here():
    """Those on vectors are tested in test_in_context.py."""
    on_tokens = {name for name, task in cs.tasks.TASKS.items() if task.inputs == "tokens"}
    assert on_tokens == set(TASKS)


@names
@pytest.mark.parametrize("examples", [None, 37])
def test_batch_7_is_batch_7_in_a_fresh_object_whatever_was_asked_before(name, examples):
    first = small(name, examples=examples)
    for step in (3, 9, 0):
        first.batch(step)
        first.batch(step, split="test", size=5)
    assert same(first.batch(7), small(name, examples=examples).batch(7))


@names
def test_batches_neither_read_nor_move_global_random_state(name, without_type_checks):
    """Types are not checked, because a check of a list draws one of its items."""

    def states():
        return torch.random.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist()  # noqa: NPY002

    torch.manual_seed(1)
    before = states()
    one = small(name).batch(3)
    assert states() == before
    torch.manual_seed(2)
    assert same(one, small(name).batch(3))


@names
def test_splits_seeds_and_steps_give_different_examples(name):
    task = small(name)
    batches = [
        task.batch(0),
        task.batch(1),
        task.batch(0, seed=1),
        task.batch(0, seed=-1),
        task.batch(0, split="validation"),
        task.batch(0, split="test"),
    ]
    everything = [row for b in batches for row in rows(b)]
    assert len(set(everything)) == len(everything)


@names
def test_seed_zero_and_64_examples_are_the_defaults(name):
    task = small(name)
    assert same(task.batch(2), task.batch(2, seed=0, size=64, split="train"))
    assert len(task.batch(2)) == 64


@given(
    name=st.sampled_from(list(TASKS)),
    examples=st.none() | st.integers(1, 30),
    size=st.integers(1, 12),
    parts=st.integers(1, 5),
    step=st.integers(0, 6),
)
def test_batch_size_only_regroups_the_examples(name, examples, size, parts, step):
    task = small(name, examples=examples)
    large = task.batch(step, size=size * parts)
    pieces = [task.batch(step * parts + p, size=size) for p in range(parts)]
    assert torch.equal(large.tokens, torch.cat([p.tokens for p in pieces]))
    assert torch.equal(large.labels, torch.cat([p.labels for p in pieces]))


@names
@given(examples=st.integers(2, 40), size=st.integers(1, 50))
def test_each_epoch_of_a_finite_set_visits_each_example_once(name, examples, size):
    task = small(name, examples=examples)
    epochs = 3
    steps = -(-epochs * examples // size)
    seen = [row for s in range(steps) for row in rows(task.batch(s, size=size))]
    per_epoch = [seen[e * examples : (e + 1) * examples] for e in range(epochs)]
    assert len(set(per_epoch[0])) == examples
    assert all(sorted(epoch) == sorted(per_epoch[0]) for epoch in per_epoch)


@names
def test_epochs_come_in_different_orders(name):
    task = small(name, examples=50)
    epochs = [tuple(rows(task.batch(e, size=50))) for e in range(4)]
    assert len(set(epochs)) == 4


@names
def test_held_out_splits_do_not_repeat_and_share_nothing_with_a_finite_training_set(name):
    task = small(name, examples=20)
    train = set(rows(task.batch(0, size=20)))
    held_out = rows(task.batch(0, split="validation", size=200))
    assert len(set(held_out)) == 200
    assert not train & set(held_out)


@names
def test_a_finite_set_is_the_same_examples_for_every_size_of_batch_and_another_for_another_seed(name):
    task = small(name, examples=20)
    assert set(rows(task.batch(0, size=20))) == {r for s in range(20) for r in rows(task.batch(s, size=1))}
    assert not set(rows(task.batch(0, size=20))) & set(rows(task.batch(0, size=20, seed=5)))


@names
def test_tokens_labels_and_roles_have_one_shape_within_the_tasks_length_and_vocabulary(name):
    task = small(name)
    batch = task.batch(0, size=9)
    assert batch.tokens.shape == batch.labels.shape == batch.layout.roles.shape == (9, task.max_length)
    assert batch.tokens.dtype == batch.labels.dtype == torch.int64
    assert ((batch.tokens >= 0) & (batch.tokens < task.vocab_size)).all()
    assert ((batch.labels < task.vocab_size) & ((batch.labels >= 0) | (batch.labels == -100))).all()


@names
@pytest.mark.parametrize("arguments", [{"step": -1}, {"step": 0, "size": 0}, {"step": 0, "size": -4}])
def test_negative_steps_and_empty_batches_are_refused(name, arguments):
    with pytest.raises(cs.UserError, match="got step"):
        small(name).batch(**arguments)


@pytest.mark.usefixtures("without_type_checks")
def test_unknown_splits_and_names_come_with_the_nearest_valid_one():
    with pytest.raises(cs.UserError, match="did you mean 'validation'"):
        cs.task("mqar").batch(0, split="validatoin")
    with pytest.raises(cs.UserError, match="did you mean 'mqar'"):
        cs.task("mqra")
    with pytest.raises(cs.UserError, match=r"did you mean 'task\.pairs'"):
        cs.task("mqar", pair=3)


@names
def test_a_version_this_release_does_not_make_is_refused(name):
    assert small(name).describe()["version"] == 1
    assert same(small(name, version=1).batch(0), small(name).batch(0))
    with pytest.raises(cs.UserError, match="version 2"):
        small(name, version=2)


@names
def test_a_task_comes_back_from_its_own_description(name):
    task = small(name, examples=11)
    description = task.describe()
    again = cs.task(description.pop("name"), **description)
    assert again == task
    assert same(again.batch(4), task.batch(4))


def test_a_task_cannot_be_changed_after_it_is_made():
    with pytest.raises(Exception, match="frozen"):
        cs.task("mqar").pairs = 8


@names
def test_a_task_or_its_fields_may_stand_for_its_name(name):
    task = small(name)
    assert cs.task(task) == cs.task(task.describe()) == task
    assert cs.task(task, vocab_size=600) == small(name, vocab_size=600)
    assert cs.task(task.describe(), examples=7).examples == 7


@pytest.mark.parametrize("given", [3, None, ["mqar"]], ids=str)
def test_what_is_no_task_is_refused_in_one_line(given):
    with pytest.raises(cs.UserError, match=r"^task: expected a name or a mapping, got .*; names: ar, .*, mqar, .*$"):
        cs.task(given)


def test_a_batch_moves_to_another_device_and_its_layout_stays():
    batch = small("mqar").batch(0, size=2)
    moved = batch.to("meta")
    assert (moved.tokens.device.type, moved.labels.device.type) == ("meta", "meta")
    assert moved.layout is batch.layout


@pytest.mark.usefixtures("without_type_checks")
def test_a_split_in_the_place_of_the_step_is_refused_in_one_line():
    task = small("mqar")
    assert same(task.batch(size=3), task.batch(0, size=3))
    assert same(task.batch(np.int64(2), size=3), task.batch(2, size=3))
    for arguments in (("test",), (0.5,)):
        with pytest.raises(cs.UserError, match=r"^batch: step is a whole number, got .*; give the split as split=…$"):
            task.batch(*arguments)


@names
def test_a_batch_and_its_layout_show_themselves_in_one_line(name):
    batch = small(name).batch(0, size=5)
    n, length = batch.tokens.shape
    assert repr(batch.layout).startswith(f"Layout({n} sequences of {length} positions")
    labels = int((batch.labels >= 0).sum())
    assert repr(batch) == f"Batch(tokens [{n}, {length}], {labels} labels, {batch.layout!r})"
    assert len(repr(batch)) < 160
    assert "\n" not in repr(batch)
