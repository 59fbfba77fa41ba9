"""MQAR and AR: what an example is, how its queries are placed, and what leaks."""

import tracemalloc

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import circuitscope as cs
from circuitscope.tasks import MQAR, NO_LABEL, Role


@st.composite
def mqar_tasks(draw) -> MQAR:
    pairs = draw(st.integers(1, 8))
    return MQAR(
        pairs=pairs,
        length=4 * pairs + 2 * draw(st.integers(0, 20)),
        vocab_size=draw(st.integers(max(4, 2 * pairs + 2), 2 * pairs + 60)),
        queries=draw(st.none() | st.integers(1, pairs)),
        filler=draw(st.sampled_from(["clean", "random", "zero"])),
        shared_vocabulary=draw(st.booleans()),
        power=draw(st.sampled_from([0.01, 0.5, 1.0, 2.0])),
        slots_in_draw_order=draw(st.booleans()),
        examples=draw(st.none() | st.integers(1, 40)),
    )


some_batch = {"task": mqar_tasks(), "step": st.integers(0, 50), "size": st.integers(1, 6)}


@given(**some_batch)
def test_context_alternates_distinct_keys_and_distinct_values(task, step, size):
    context = task.batch(step, size=size).tokens[:, : 2 * task.pairs]
    keys, values = context[:, 0::2], context[:, 1::2]
    if task.shared_vocabulary:
        assert all(len(set(row)) == 2 * task.pairs for row in context.tolist())
        assert ((context >= 1) & (context < task.vocab_size)).all()
    else:
        half = task.vocab_size // 2
        assert all(len(set(row)) == task.pairs for part in (keys, values) for row in part.tolist())
        assert ((keys >= 1) & (keys < half)).all()
        assert ((values >= half) & (values < task.vocab_size)).all()


@given(**some_batch)
def test_query_holds_the_key_of_its_pair_and_its_label_is_the_value(task, step, size):
    batch = task.batch(step, size=size)
    at = batch.layout
    asked = batch.tokens.gather(1, at.query_pos)
    assert torch.equal(asked, batch.tokens.gather(1, at.key_pos.gather(1, at.query_pair)))
    answers = batch.tokens.gather(1, at.answer_pos())
    assert torch.equal(batch.labels.gather(1, at.query_pos), answers)
    context = [
        dict(zip(row[0 : 2 * task.pairs : 2], row[1 : 2 * task.pairs : 2], strict=True))
        for row in batch.tokens.tolist()
    ]
    assert answers.tolist() == [[bound[k] for k in keys] for bound, keys in zip(context, asked.tolist(), strict=True)]


@given(**some_batch)
def test_queries_ask_for_different_pairs_at_different_even_offsets_after_the_context(task, step, size):
    at = task.batch(step, size=size).layout
    offset = at.query_pos - 2 * task.pairs
    assert at.query_pos.shape == (size, task.queries or task.pairs)
    assert (offset >= 0).all()
    assert (offset % 2 == 0).all()
    assert (at.query_pos < task.length).all()
    for rows in (at.query_pos, at.query_pair):
        assert all(len(set(row)) == len(row) for row in rows.tolist())
    assert ((at.query_pair >= 0) & (at.query_pair < task.pairs)).all()


@given(**some_batch)
def test_labels_stand_at_queries_and_nowhere_else(task, step, size):
    batch = task.batch(step, size=size)
    expected = torch.zeros_like(batch.labels, dtype=torch.bool).scatter(1, batch.layout.query_pos, True)
    assert torch.equal(batch.labels != NO_LABEL, expected)
    where, labels = batch.labelled()
    assert torch.equal(batch.labels.reshape(-1)[where], labels)
    assert len(where) == size * (task.queries or task.pairs)


@given(**some_batch)
def test_roles_agree_with_the_positions(task, step, size):
    batch = task.batch(step, size=size)
    at = batch.layout
    expected = torch.full(batch.tokens.shape, Role.FILLER, dtype=torch.int8)
    for positions, role in ((at.key_pos, Role.KEY), (at.value_pos, Role.VALUE), (at.query_pos, Role.QUERY)):
        expected.scatter_(1, positions, int(role))
    assert torch.equal(at.roles, expected)


@given(**some_batch)
def test_filler_is_what_its_name_says(task, step, size):
    batch = task.batch(step, size=size)
    keys = batch.tokens.gather(1, batch.layout.key_pos)
    for row, roles, bound in zip(batch.tokens, batch.layout.roles, keys, strict=True):
        filler = row[roles == Role.FILLER]
        assert ((filler >= 0) & (filler < task.vocab_size)).all()
        if task.filler == "zero":
            assert (filler == 0).all()
        if task.filler == "clean":
            assert not torch.isin(filler, bound).any()


def test_clean_filler_is_uniform_over_the_tokens_that_are_not_keys():
    batch = MQAR(length=64, pairs=2, vocab_size=8, filler="clean").batch(0, size=20_000)
    keys = np.sort(batch.tokens[:, [0, 2]].numpy(), axis=1)
    filler = batch.layout.roles.numpy() == Role.FILLER
    for bound in ([1, 2], [1, 3], [2, 3]):
        chosen = (keys == bound).all(axis=1)
        tokens = batch.tokens.numpy()[chosen][filler[chosen]]
        counts = np.bincount(tokens, minlength=8)
        free = [t for t in range(8) if t not in bound]
        assert counts[bound].sum() == 0
        share = counts[free] / len(tokens)
        assert abs(share - 1 / 6).max() < 5 * np.sqrt(5 / 36 / len(tokens))


def test_random_filler_makes_a_false_binding_in_one_of_forty_examples():
    batch = MQAR(filler="random", examples=None).batch(0, size=100_000)
    keys = batch.tokens[:, 0:8:2]
    filler = batch.layout.roles == Role.FILLER
    collisions = sum(int(((batch.tokens == keys[:, p : p + 1]) & filler).sum()) for p in range(4))
    expected = 52 * 4 / 8192  # 0.0254; the count is Poisson, one standard deviation is 50
    assert abs(collisions / 100_000 - expected) < 0.0025


@pytest.mark.parametrize("power", [0.01, 0.5, 1.0])
def test_the_first_slot_follows_the_power_law(power):
    n, slots = 40_000, 28
    batch = MQAR(length=64, pairs=4, power=power, slots_in_draw_order=True, examples=None).batch(0, size=n)
    first = (batch.layout.query_pos[:, 0].numpy() - 8) // 2
    p = np.arange(1, slots + 1) ** (power - 1.0)
    expected = n * p / p.sum()
    statistic = ((np.bincount(first, minlength=slots) - expected) ** 2 / expected).sum()
    freedom = slots - 1
    assert statistic < freedom + 5 * np.sqrt(2 * freedom)


@pytest.mark.parametrize("in_draw_order", [False, True])
def test_slots_are_used_as_often_as_numpy_draws_them_without_replacement(in_draw_order):
    n, slots, pairs = 10_000, 12, 4
    task = MQAR(length=2 * (slots + pairs), pairs=pairs, slots_in_draw_order=in_draw_order)
    ours = (task.batch(0, size=n).layout.query_pos.numpy() - 2 * pairs) // 2
    p = np.arange(1, slots + 1) ** (0.01 - 1)
    rng = np.random.default_rng(0)
    numpys = np.stack([rng.choice(slots, pairs, replace=False, p=p / p.sum()) for _ in range(n)])
    used, expected = (np.bincount(s.ravel(), minlength=slots) / n for s in (ours, numpys))
    spread = np.sqrt(2 * expected * (1 - expected) / n)
    assert (abs(used - expected) < 5 * spread + 1e-9).all()


def accuracy_of_guessing_by_position(task: MQAR, n: int = 60_000) -> float:
    """Learns the likeliest pair of each position on n examples and guesses it on n others."""
    learn, score = (task.batch(step, size=n).layout for step in (0, 1))
    table = np.zeros((task.length, task.pairs))
    np.add.at(table, (learn.query_pos.numpy(), learn.query_pair.numpy()), 1)
    return float((table.argmax(axis=1)[score.query_pos.numpy()] == score.query_pair.numpy()).mean())


def test_slots_in_draw_order_leak_the_key_and_shuffled_ones_do_not():
    # One standard deviation of each measured share is below 0.001.
    assert accuracy_of_guessing_by_position(MQAR(slots_in_draw_order=True, examples=None)) == pytest.approx(
        0.288, abs=0.005
    )
    assert accuracy_of_guessing_by_position(MQAR(examples=None)) == pytest.approx(0.25, abs=0.005)


def test_keys_and_values_are_uniform_and_independent_of_each_other():
    n = 40_000
    tokens = MQAR(length=16, pairs=2, vocab_size=12, examples=None).batch(0, size=n).tokens.numpy()
    joint = np.zeros((5, 6))
    np.add.at(joint, (tokens[:, 0] - 1, tokens[:, 1] - 6), 1)
    statistic = ((joint - n / 30) ** 2 / (n / 30)).sum()
    assert statistic < 29 + 5 * np.sqrt(2 * 29)


@given(pairs=st.integers(1, 10), step=st.integers(0, 20), queries=st.sampled_from([1, None]))
def test_associative_recall_asks_exactly_one_query(pairs, step, queries):
    try:
        task = cs.task("ar", pairs=pairs, length=4 * pairs + 4, queries=queries)
    except cs.UserError:
        assert queries is None
        return
    batch = task.batch(step, size=5)
    assert ((batch.labels != NO_LABEL).sum(1) == 1).all()
    assert batch.layout.query_pos.shape == (5, 1)


def test_associative_recall_has_the_small_vocabulary_and_asks_for_every_pair_in_turn():
    task = cs.task("ar")
    assert task.vocab_size == 50
    asked = task.batch(0, size=4000).layout.query_pair.flatten()
    share = torch.bincount(asked, minlength=4) / 4000
    assert (abs(share - 0.25) < 5 * np.sqrt(3 / 16 / 4000)).all()
    with pytest.raises(cs.UserError, match="queries"):
        cs.task("ar", queries=2)


@pytest.mark.parametrize(
    ("options", "numbers"),
    [
        ({"length": 63}, ["63", "64"]),
        ({"length": 64, "pairs": 17}, ["16", "64", "17"]),
        ({"vocab_size": 8, "pairs": 4}, ["3", "8", "4"]),
        ({"pairs": 4, "queries": 5}, ["4", "5"]),
        ({"pairs": 0}, ["pairs", "0"]),
        ({"pairs": -3}, ["pairs", "-3"]),
        ({"length": 2}, ["length", "2"]),
        ({"vocab_size": 2**31}, ["vocab_size", str(2**31)]),
        ({"power": 0}, ["power", "0"]),
        ({"examples": 0}, ["examples", "0"]),
        ({"filler": "none"}, ["filler", "clean", "random", "zero", "none"]),
    ],
)
def test_an_impossible_size_is_refused_with_the_numbers(options, numbers):
    with pytest.raises(cs.UserError) as error:
        cs.task("mqar", **options)
    assert "\n" not in str(error.value)
    assert all(number in str(error.value) for number in numbers)


@given(task=mqar_tasks())
def test_the_largest_possible_sizes_are_accepted_and_one_more_is_not(task):
    most = min(task.length // 4, task.vocab_size // 2 - 1)
    fits = MQAR(length=task.length, vocab_size=task.vocab_size, pairs=most)
    assert len(set(fits.batch(0, size=1).tokens[0, : 2 * most].tolist())) == 2 * most
    with pytest.raises(cs.UserError, match=str(most)):
        MQAR(length=task.length, vocab_size=task.vocab_size, pairs=most + 1)


def test_a_hundred_thousand_examples_need_less_than_200_mb():
    task = MQAR(examples=None)
    task.batch(0, size=8)
    tracemalloc.start()
    try:
        batch = task.batch(0, size=100_000)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert batch.tokens.shape == (100_000, 64)
    assert batch.tokens.nbytes <= peak < 200e6  # numpy reports to tracemalloc, and the tokens are numpy's


def test_a_request_larger_than_the_working_memory_is_the_same_as_small_ones():
    task = MQAR(length=16, pairs=2, vocab_size=20)
    whole = task.batch(0, size=10_000)
    parts = [task.batch(s, size=100) for s in range(100)]
    assert torch.equal(whole.tokens, torch.cat([p.tokens for p in parts]))
    assert torch.equal(whole.labels, torch.cat([p.labels for p in parts]))
    assert torch.equal(whole.layout.roles, torch.cat([p.layout.roles for p in parts]))
    assert torch.equal(whole.layout.query_pair, torch.cat([p.layout.query_pair for p in parts]))
