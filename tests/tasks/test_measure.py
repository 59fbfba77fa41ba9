"""Measures: means over labels or parts of them, and intervals that hold the truth as often as they say."""

import numpy as np
import pytest
import torch

import circuitscope as cs
from circuitscope.tasks import Measure


def test_labels_that_are_nan_do_not_count():
    batch = cs.task("mqar", pairs=2, length=8, vocab_size=16).batch(0, size=3)
    found = Measure.at_labels(batch, torch.tensor([1.0, 0, torch.nan, 1, torch.nan, torch.nan]))
    assert found.total.tolist() == [1, 1, 0]
    assert found.count.tolist() == [2, 1, 0]
    assert found.mean() == pytest.approx(2 / 3)
    assert Measure.joined([found, found]).mean() == pytest.approx(2 / 3)


def test_an_interval_holds_the_truth_about_95_times_in_100():
    draw, held = np.random.default_rng(0), 0
    for _ in range(200):
        chance = draw.beta(2, 2, size=100)  # sequences differ, so labels of one sequence are alike
        right = torch.from_numpy(draw.binomial(5, chance)).double()
        low, high = Measure(right, torch.full((100,), 5.0, dtype=torch.float64)).interval()
        held += low <= 0.5 <= high
    assert 180 <= held <= 199  # 190 expected, one standard deviation is 3
