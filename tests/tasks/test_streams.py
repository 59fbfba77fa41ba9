"""Counter-based random numbers: addressable, uniform, distinct."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from circuitscope.tasks.streams import below, distinct, order, stream_key, uniform, words


def chi_square_excess(counts: np.ndarray, expected: np.ndarray) -> float:
    """Standard deviations by which a chi-square statistic is above its mean (variance 2 df)."""
    freedom = len(counts) - 1
    return float((((counts - expected) ** 2 / expected).sum() - freedom) / np.sqrt(2 * freedom))


@given(key=st.integers(0, 2**64 - 1), at=st.integers(0, 2**40), draws=st.integers(1, 9))
def test_the_words_of_an_example_do_not_depend_on_the_others_in_the_request(key, at, draws):
    together = words(key, np.arange(at, at + 5), draws)
    alone = words(key, np.array([at + 3]), draws)
    assert (together[3] == alone[0]).all()


def test_neighbouring_examples_and_other_keys_share_no_words():
    seen = np.concatenate([words(stream_key("a", k), np.arange(500), 16).ravel() for k in range(10)])
    assert len(np.unique(seen)) == len(seen)


def test_every_bit_of_the_words_is_fair():
    w = words(stream_key("bits"), np.arange(20_000), 1)[:, 0]
    ones = np.array([int(((w >> np.uint64(b)) & np.uint64(1)).sum()) for b in range(64)])
    assert (abs(ones - 10_000) < 5 * np.sqrt(20_000) / 2).all()


def test_stream_keys_tell_their_parts_apart():
    parts = [("ab", 1), ("a", "b1"), ("ab", "1"), (("ab", 1),), ("ab", 1, 0)]
    assert len({stream_key(*p) for p in parts}) == len(parts)


def test_uniform_never_reaches_zero_so_its_logarithm_is_finite():
    low, high = uniform(np.array([0, 2**64 - 1], dtype=np.uint64))
    assert 0 < low < high <= 1
    assert np.isfinite(np.log([low, high])).all()


def test_below_is_uniform_and_in_range():
    drawn = below(words(stream_key("below"), np.arange(60_000), 1), 7)[:, 0]
    assert chi_square_excess(np.bincount(drawn, minlength=7), np.full(7, 60_000 / 7)) < 5


@given(n=st.integers(1, 30), k=st.integers(1, 30), key=st.integers(0, 2**64 - 1))
def test_distinct_gives_k_different_numbers_below_n(n, k, key):
    k = min(k, n)
    drawn = distinct(words(key, np.arange(8), 2 * k), n)
    assert drawn.shape == (8, k)
    assert (drawn >= 0).all()
    assert (drawn < n).all()
    assert all(len(set(row)) == k for row in drawn.tolist())


@pytest.mark.parametrize(("n", "k"), [(5, 2), (4, 4), (6, 3)])
def test_distinct_gives_every_ordered_choice_equally_often(n, k):
    rows = 60_000
    drawn = distinct(words(stream_key("distinct", n, k), np.arange(rows), 2 * k), n)
    codes = (drawn * n ** np.arange(k)).sum(axis=1)
    counts = np.unique(codes, return_counts=True)[1]
    choices = np.prod(np.arange(n - k + 1, n + 1))
    assert len(counts) == choices
    assert chi_square_excess(counts, np.full(choices, rows / choices)) < 5


def test_order_gives_every_permutation_equally_often():
    rows = order(words(stream_key("order"), np.arange(60_000), 4))
    counts = np.unique((rows * 4 ** np.arange(4)).sum(axis=1), return_counts=True)[1]
    assert len(counts) == 24
    assert chi_square_excess(counts, np.full(24, 60_000 / 24)) < 5
