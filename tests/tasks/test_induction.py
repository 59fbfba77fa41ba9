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
    task = Induction(block=block, repeats=repeats, vocab_size=max(4, block + extra))
    tokens = task.batch(0, size=3).tokens
    assert tokens.shape == (3, 1 + block * repeats)
    assert (tokens[:, 0] == 0).all()
    assert (tokens[:, 1:] != 0).all()
    repeated = tokens[:, 1:].reshape(3, repeats, block)
    assert (repeated == repeated[:, :1]).all()
    assert all(len(set(row)) == block for row in repeated[:, 0].tolist())


@given(**sizes)
def test_the_label_is_the_next_token_wherever_an_earlier_repeat_tells_it(block, repeats, extra):
    batch = Induction(block=block, repeats=repeats, vocab_size=max(4, block + extra)).batch(0, size=3)
    for tokens, labels in zip(batch.tokens.tolist(), batch.labels.tolist(), strict=True):
        for at, label in enumerate(labels):
            seen_before = tokens[at] in tokens[1:at]
            assert (label != NO_LABEL) == (seen_before and at + 1 < len(tokens))
            if label != NO_LABEL:
                earlier = tokens.index(tokens[at])
                assert label == tokens[at + 1] == tokens[earlier + 1]


def test_roles_and_period_say_where_the_blocks_are():
    batch = Induction(block=5, repeats=3, vocab_size=20).batch(0, size=2)
    layout = batch.layout
    assert (layout.roles[:, 0] == Role.START).all()
    assert (layout.roles[:, 1:] == Role.BLOCK).all()
    assert torch.equal(batch.tokens[:, 1 : -layout.period], batch.tokens[:, 1 + layout.period :])
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
