"""Induction sequences: a start token and a repeated block."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import circuitscope as cs
from circuitscope.tasks import NO_LABEL, Induction, Role

sizes = {"block": st.integers(2, 12), "repeats": st.integers(2, 5), "extra": st.integers(1, 50)}


@given(**sizes)
def test_a_start_token_is_followed_by_one_block_of_distinct_tokens_over_and_over(block, repeats, extra):
    task = Induction(block=block, repeats=repeats, vocab_size=max(4, block + extra), varied=False)
    tokens = task.batch(0, size=3).tokens
    assert tokens.shape == (3, 1 + block * repeats)
    assert (tokens[:, 0] == 0).all()
    assert (tokens[:, 1:] != 0).all()
    repeated = tokens[:, 1:].reshape(3, repeats, block)
    assert (repeated == repeated[:, :1]).all()
    assert all(len(set(row)) == block for row in repeated[:, 0].tolist())


@given(**sizes)
def test_lengths_and_beginnings_of_blocks_are_drawn_for_each_sequence(block, repeats, extra):
    task = Induction(block=block, repeats=repeats, vocab_size=max(4, block + extra))
    batch = task.batch(0, size=3)
    layout = batch.layout
    assert batch.tokens.shape == (3, 1 + block * repeats)
    for tokens, roles, period, first in zip(
        batch.tokens.tolist(), layout.roles.tolist(), layout.period.tolist(), layout.first_block.tolist(), strict=True
    ):
        assert max(2, block / 3) <= period <= block
        assert 1 <= first <= 1 + block // 3
        assert roles == [Role.START] + [Role.FILLER] * (first - 1) + [Role.BLOCK] * (len(tokens) - first)
        assert tokens[0] == 0
        assert len(set(tokens)) == first + period  # all distinct but for the repeats
        assert tokens[first:-period] == tokens[first + period :]


def test_every_length_of_block_and_every_beginning_occurs():
    layout = Induction(block=9, repeats=3, vocab_size=50).batch(0, size=500).layout
    assert set(layout.period.tolist()) == set(range(3, 10))
    assert set(layout.first_block.tolist()) == set(range(1, 5))


def test_a_position_alone_does_not_tell_the_answer():
    """The best distance to read back from is right in few sequences, while content always tells."""
    batch = Induction(block=24, repeats=4, vocab_size=500).batch(0, size=200)
    tokens, labels = batch.tokens, batch.labels
    assert max(_share_right(tokens, labels, back) for back in range(1, 60)) < 0.2


def _share_right(tokens, labels, back):
    """How often the token so many positions before the next one is the label."""
    at = torch.arange(tokens.shape[1]) + 1 - back
    known = (labels != NO_LABEL) & (at >= 0)
    return (tokens[:, at.clamp(min=0)] == labels)[known].float().sum() / (labels != NO_LABEL).sum()


@given(**sizes, varied=st.booleans())
def test_the_label_is_the_next_token_wherever_an_earlier_repeat_tells_it(block, repeats, extra, varied):
    task = Induction(block=block, repeats=repeats, vocab_size=max(4, block + extra), varied=varied)
    batch = task.batch(0, size=3)
    for tokens, labels in zip(batch.tokens.tolist(), batch.labels.tolist(), strict=True):
        for at, label in enumerate(labels):
            seen_before = tokens[at] in tokens[1:at]
            assert (label != NO_LABEL) == (seen_before and at + 1 < len(tokens))
            if label != NO_LABEL:
                earlier = tokens.index(tokens[at])
                assert label == tokens[at + 1] == tokens[earlier + 1]


def test_roles_and_period_say_where_the_blocks_are():
    batch = Induction(block=5, repeats=3, vocab_size=20, varied=False).batch(0, size=2)
    layout = batch.layout
    assert (layout.period == 5).all()
    assert (layout.roles[:, 0] == Role.START).all()
    assert (layout.roles[:, 1:] == Role.BLOCK).all()
    assert torch.equal(batch.tokens[:, 1:-5], batch.tokens[:, 6:])
    with pytest.raises(ValueError, match="no key-value pairs"):
        layout.answer_pos()


@given(max_length=st.integers(1, 300), vocab_size=st.integers(4, 100))
def test_the_fitting_sequence_fits_and_is_25_by_4_where_that_fits(max_length, vocab_size):
    if max_length < 9:
        with pytest.raises(cs.UserError, match=str(max_length)):
            Induction.fitting(max_length, vocab_size)
        return
    task = Induction.fitting(max_length, vocab_size)
    assert task.max_length <= max_length
    assert task.batch(0, size=1).tokens.max() < vocab_size
    if max_length >= 101 and vocab_size >= 26:
        assert (task.block, task.repeats) == (25, 4)


def test_a_block_longer_than_the_vocabulary_is_refused_with_the_numbers():
    with pytest.raises(cs.UserError, match=r"19.*20"):
        cs.task("induction", block=20, vocab_size=20)
    assert cs.task("induction", block=19, vocab_size=20).batch(0, size=1).tokens.shape == (1, 77)


def test_any_token_of_the_block_is_right_once_in_a_period():
    task = Induction(block=9, repeats=3, vocab_size=40)
    batch = task.batch(0, size=12)
    periods = batch.layout.period[batch.labelled()[0] // batch.length]
    assert torch.equal(task.baselines["any token of the block"](batch), 1 / periods)
    fixed = Induction(block=5, repeats=3, vocab_size=40, varied=False)
    assert fixed.baselines["any token of the block"](fixed.batch(0, size=3)) == pytest.approx(1 / 5)
