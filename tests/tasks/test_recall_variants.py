"""The recall variants: each label is what the context binds, by a reading of the tokens alone."""

from collections import Counter
from math import isqrt

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import circuitscope as cs
from circuitscope.analysis import named_edges
from circuitscope.analysis.causal.patching import exchange_values
from circuitscope.analysis.probes.targets import TARGETS
from circuitscope.analysis.scores.held_out import check_scores
from circuitscope.errors import UserError
from circuitscope.tasks import MQAR, NO_LABEL, Role, any_value


def examples(task, size=40):
    """Tokens and labels of some examples, row by row."""
    batch = task.batch(0, size=size)
    return zip(batch.tokens.tolist(), batch.labels.tolist(), batch.layout.roles.tolist(), strict=True)


def labelled(tokens, labels):
    return [(at, token, label) for at, (token, label) in enumerate(zip(tokens, labels, strict=True)) if label >= 0]


@given(passes=st.integers(1, 3), pairs=st.integers(1, 5), noise=st.integers(0, 7), extra=st.integers(0, 8))
def test_mqar_binds_each_key_to_one_value_in_every_pass_and_asks_for_it(passes, pairs, noise, extra):
    task = MQAR(
        passes=passes, pairs=pairs, noise=noise, vocab_size=64, length=2 * pairs * (passes + 1) + 2 * (noise + extra)
    )
    for tokens, labels, roles in examples(task, 4):
        at = [i for i, role in enumerate(roles) if role == Role.KEY]
        bound = Counter((tokens[i], tokens[i + 1]) for i in at)
        assert set(bound.values()) == {passes}
        assert len(dict(bound)) == len({key for key, _ in bound}) == len({value for _, value in bound}) == pairs
        assert sorted((token, label) for _, token, label in labelled(tokens, labels)) == sorted(bound)
        between = [tokens[i] for i in range(task.context_length(pairs)) if roles[i] == Role.FILLER]
        assert len(between) == noise
        assert all(token >= 56 for token in between)  # the last eighth, which holds neither keys nor values
        assert not noise or all(token < 56 for pair in bound for token in pair)


def test_passes_come_in_different_orders_and_recall_reads_all_of_them():
    batch = MQAR(passes=3, pairs=4, length=32, vocab_size=64).batch(0, size=50)
    orders = batch.tokens[:, :24].reshape(50, 3, 4, 2)[..., 0]
    assert (orders[:, 0] != orders[:, 1]).any(dim=1).float().mean() > 0.8
    edges = named_edges("recall", batch.layout)
    assert len(edges.src) == 50 * 4 * 3
    assert torch.equal(batch.tokens[edges.sequence, edges.src], batch.labels[edges.sequence, edges.dest])


def test_exchanged_values_are_exchanged_in_every_pass():
    batch = MQAR(passes=3, pairs=4, length=32, vocab_size=64).batch(0, size=50)
    twins = exchange_values(batch)
    assert ((twins.clean != twins.exchanged).sum(dim=1) == 6).all()
    for tokens in twins.exchanged[:, :24].tolist():
        assert set(Counter(zip(tokens[::2], tokens[1::2], strict=True)).values()) == {3}
    assert torch.equal(twins.right != twins.other, twins.asked)


@given(pairs=st.integers(1, 6), data=st.data())
def test_the_last_binding_of_an_updated_key_counts(pairs, data):
    updates = data.draw(st.integers(0, pairs))
    task = MQAR(pairs=pairs, updates=updates, vocab_size=64, length=4 * pairs + 2 * updates)
    for tokens, labels, _ in examples(task, 4):
        context = tokens[: 2 * (pairs + updates)]
        bound = dict(zip(context[::2], context[1::2], strict=True))  # a later binding replaces an earlier one
        assert len(bound) == pairs
        assert len(set(context[1::2])) == pairs + updates
        assert Counter(Counter(context[::2]).values()) == Counter({1: pairs - updates, 2: updates})
        assert {token: label for _, token, label in labelled(tokens, labels)} == bound


class FirstBinding(torch.nn.Module):
    """Answers with the first value that stands behind the key it reads, and never notices an update."""

    W_U = torch.eye(64)

    def hidden(self, tokens, at=None):
        length = tokens.shape[1]
        answers = []
        for flat in at.tolist():
            row, pos = tokens[flat // length].tolist(), flat % length
            answers.append(row[row.index(row[pos]) + 1])
        return torch.eye(64)[answers]


def test_with_updates_any_value_is_right_less_often():
    task = MQAR(pairs=4, updates=2, vocab_size=64, length=20)
    assert any_value(task.batch(0, size=30)).mean() == pytest.approx(task.chance) == pytest.approx(1 / 6)


def test_accuracy_on_updated_and_on_untouched_keys_stand_apart():
    task = MQAR(pairs=4, updates=1, vocab_size=64, length=20, filler="zero")
    found = task.measures(FirstBinding(), task.batch(0, size=30))
    assert found["accuracy"].mean() == pytest.approx(0.75)
    assert found["accuracy on updated keys"].mean() == 0
    assert found["accuracy on untouched keys"].mean() == 1
    assert found["accuracy on updated keys"].count.sum() == 30
    assert "accuracy on updated keys" not in MQAR(vocab_size=64).measures(FirstBinding(), MQAR(vocab_size=64).batch(0))


def test_stacked_tokens_are_a_key_and_its_value():
    task = cs.task("stacked_mqar")
    s = isqrt(task.vocab_size) - 1
    for tokens, labels, roles in examples(task):
        pairs = [divmod(token - 2 * s - 1, s) for token, role in zip(tokens, roles, strict=True) if role == Role.PAIR]
        assert len(dict(pairs)) == task.pairs
        bound = {1 + key: s + 1 + value for key, value in pairs}
        assert {token: label for _, token, label in labelled(tokens, labels)} == bound


def test_neither_part_of_a_compound_key_names_the_value():
    task = cs.task("compound_recall", pairs=9, length=60)
    for tokens, labels, _ in examples(task):
        context = [tuple(tokens[i : i + 3]) for i in range(0, 27, 3)]
        bound = {(a, b): value for a, b, value in context}
        assert (
            Counter(Counter(a for a, _ in bound).values()) == Counter(Counter(b for _, b in bound).values()) == {3: 3}
        )
        assert {(tokens[at - 1], token): label for at, token, label in labelled(tokens, labels)} == bound


def test_two_hops_ask_for_the_value_of_the_value():
    task = cs.task("two_hop")
    for tokens, labels, _ in examples(task):
        context = tokens[: 4 * task.pairs]
        bound = dict(zip(context[::2], context[1::2], strict=True))
        assert len(bound) == 2 * task.pairs
        asked = labelled(tokens, labels)
        assert len(asked) == task.pairs
        assert all(label == bound[bound[token]] for _, token, label in asked)


def test_direct_queries_ask_with_the_middle_of_a_chain_and_are_counted_apart():
    task = cs.task("two_hop", direct=0.5)
    near = far = 0
    for tokens, labels, _ in examples(task):
        context = tokens[: 4 * task.pairs]
        bound = dict(zip(context[::2], context[1::2], strict=True))
        for _, token, label in labelled(tokens, labels):
            one_step = token >= task.vocab_size // 3
            assert label == (bound[token] if one_step else bound[bound[token]])
            near, far = near + one_step, far + (not one_step)
    assert abs(near - far) < 4 * (near + far) ** 0.5
    batch = task.batch(0, size=20)
    where, target = batch.labelled()
    knows_one_step = torch.where(batch.tokens.flatten()[where] >= 64, target, 0)
    found = task.outcomes(batch, torch.nn.functional.one_hot(knows_one_step, task.vocab_size).float())
    assert found["accuracy on one step"].nanmean() == 1
    assert found["accuracy on two steps"].nanmean() == 0
    assert set(cs.task("two_hop").outcomes(cs.task("two_hop").batch(0), torch.zeros(256, 192))) == {"accuracy"}


def test_a_chain_can_be_asked_for_its_middle_and_then_for_its_end():
    task = cs.task("two_hop", middle=True)
    for tokens, labels, _ in examples(task):
        context = tokens[: 4 * task.pairs]
        bound = dict(zip(context[::2], context[1::2], strict=True))
        asked = labelled(tokens, labels)
        assert len(asked) == 2 * task.pairs
        for (at, token, middle), (after, behind, end) in zip(asked[::2], asked[1::2], strict=True):
            assert (after, behind) == (at + 1, 0)
            assert (middle, end) == (bound[token], bound[bound[token]])
    batch = task.batch(0, size=20)
    where, target = batch.labelled()
    layout = batch.layout
    assert torch.equal(batch.values().gather(1, layout.query_pair), batch.labels.gather(1, layout.query_pos))
    knows_one_step = torch.where(batch.tokens.flatten()[where] > 0, target, 0)
    found = task.outcomes(batch, torch.nn.functional.one_hot(knows_one_step, task.vocab_size).float())
    assert found["accuracy on one step"].nanmean() == 1
    assert found["accuracy on two steps"].nanmean() == 0
    assert task.baselines["any end of a chain"](batch).mean() == pytest.approx(1 / task.pairs)
    with pytest.raises(UserError, match=r"expected direct 0, got 0\.5"):
        cs.task("two_hop", middle=True, direct=0.5)


@pytest.mark.parametrize("motif", [1, 2, 3])
def test_fuzzy_queries_are_answered_token_by_token_by_the_motif_behind_the_same_key(motif):
    task = cs.task("fuzzy_recall", motif=motif, pairs=4)
    half, seen = task.vocab_size // 2, Counter()
    for tokens, labels, roles in examples(task):
        context, bound, motifs = tokens[: task.context_length(4)], {}, []
        for i, token in enumerate(context):
            if token < half and (i == 0 or context[i - 1] >= half):
                motifs.append(([], []))
            motifs[-1][token >= half].append(token)
        bound = {tuple(key): value for key, value in motifs}
        assert len(bound) == 4
        asked, at = {}, task.context_length(4)
        while at < len(tokens):
            if tokens[at] == 0:
                at += 1
                continue
            end = tokens.index(0, at)
            query = tokens[at:end]
            key = [t for t in query if t < half]
            asked[tuple(key)] = labels[at + len(key) - 1 : end]
            assert labels[at : at + len(key) - 1] == [NO_LABEL] * (len(key) - 1)
            assert query[len(key) :] == asked[tuple(key)][:-1]
            assert set(roles[at:end]) == {Role.QUERY}
            at = end
        assert asked == bound
        seen.update(len(part) for key in bound for part in (key, bound[key]))
    assert set(seen) == set(range(1, motif + 1))


def test_selective_copying_asks_for_the_tokens_in_their_order():
    task = cs.task("selective_copy")
    for tokens, labels, _ in examples(task):
        assert [label for _, _, label in labelled(tokens, labels)] == [t for t in tokens if t > 1]
        assert tokens[-task.copied :] == [1] * task.copied


def test_every_place_of_selective_copying_is_used_alike():
    task = cs.task("selective_copy", length=24, copied=4)
    used = torch.bincount(task.batch(0, size=5000).layout.value_pos.flatten(), minlength=20).numpy()
    assert ((used - 1000) ** 2 / 1000).sum() < 19 + 5 * np.sqrt(2 * 19)


RECALL = ["compound_recall", "fuzzy_recall", "stacked_mqar", "two_hop", "selective_copy"]


@pytest.mark.parametrize("name", RECALL)
def test_layouts_say_where_each_label_comes_from(name):
    batch = cs.task(name).batch(0, size=20)
    answers = batch.values().gather(1, batch.layout.query_pair)
    assert torch.equal(answers, batch.labels.gather(1, batch.layout.query_pos))
    assert (batch.labels != NO_LABEL).sum() == batch.layout.query_pos.numel()
    recall = named_edges("recall", batch.layout)
    assert len(recall.src) == batch.layout.query_pos.numel()
    if name != "stacked_mqar":
        assert torch.equal(batch.tokens[recall.sequence, recall.src], batch.labels[recall.sequence, recall.dest])
    labels = TARGETS["bound-value"].labels_of(batch)
    assert torch.equal(torch.from_numpy(labels).gather(1, batch.layout.query_pos), answers)
    assert 0 < any_value(batch).mean() <= 1 / 4


@pytest.mark.parametrize("name", ["stacked_mqar", "selective_copy", "copy"])
def test_what_needs_keys_of_their_own_is_refused_in_one_line(name):
    task = cs.task(name)
    batch = task.batch(0, size=4)
    assert "binding" not in check_scores(None, task)
    assert {"recall", "value", "previous_token"} <= set(check_scores(None, task))
    for refused in (
        lambda: check_scores("binding", task),
        lambda: named_edges("binding", batch.layout),
        lambda: exchange_values(batch),
        lambda: TARGETS["bound-key"].labels_of(batch),
    ):
        with pytest.raises(cs.UserError, match="needs") as error:
            refused()
        assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("name", "options", "expected"),
    [
        ("mqar", {"updates": 5}, "updates must be at most pairs = 4, got 5"),
        ("mqar", {"updates": 1, "passes": 2}, "expected passes 1 or updates 0, got 2 and 1"),
        ("mqar", {"passes": 8}, r"pairs must be at most 3 at length 64, got 4; 4 need a length of at least 72"),
        ("mqar", {"vocab_size": 16, "noise": 2, "pairs": 7}, "noise and updates leave = 6 at vocab_size 16, got 7"),
        ("compound_recall", {"pairs": 5}, "a square number, got 5; try 4 or 9"),
        ("compound_recall", {"pairs": 9}, "pairs must be at most 5 at length 32"),
        ("stacked_mqar", {"vocab_size": 16}, "pairs must be at most √vocab_size - 1 = 3 at vocab_size 16, got 4"),
        ("two_hop", {"vocab_size": 12}, "vocab_size / 3 - 1 = 3 at vocab_size 12, got 4"),
        ("fuzzy_recall", {"queries": 2}, "asks for every key: expected queries = pairs = 3"),
        ("fuzzy_recall", {"vocab_size": 8}, "= 2 at vocab_size 8, got 3"),
        ("selective_copy", {"copied": 33, "vocab_size": 64}, "copied must be at most length / 2 = 32, got 33"),
        ("selective_copy", {"copied": 31}, "copied must be at most vocab_size - 2 = 30, got 31"),
        ("copy", {"shortest": 20}, "shortest must be at most longest = 19, got 20"),
        ("copy", {"form": "prefix", "ngram": 5}, r"ngram \+ answer must be at most shortest = 5, got 5 \+ 1"),
        ("copy", {"form": "suffix", "ngram": 1}, r"2 · longest = 38, got 26"),
    ],
)
def test_an_impossible_size_is_refused_with_the_inequality_it_breaks(name, options, expected):
    with pytest.raises(cs.UserError, match=expected) as error:
        cs.task(name, **options)
    assert "\n" not in str(error.value)
