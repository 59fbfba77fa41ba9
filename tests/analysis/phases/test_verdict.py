"""The verdict on a loss bump, read against the accuracy of answering with any value."""

import numpy as np
import pytest

from circuitscope.analysis.phases.mixture import sigmoid
from circuitscope.analysis.phases.verdict import verdict
from circuitscope.errors import UserError

STEPS = np.linspace(0, 1500, 31)


def rise(steps, midpoint, width=0.15):
    return sigmoid(np.log(steps + steps[1]), np.log([midpoint + steps[1]]), np.array([width]))[0]


def noise(points, sigma, seed=0):
    return sigma * np.random.default_rng(seed).standard_normal(points)


def recall_curves(ceiling):
    loss = 9 - 3 * rise(STEPS, 700) - 2 * (1 - np.exp(-STEPS / 600)) + noise(31, 0.03)
    accuracy = np.clip(ceiling * rise(STEPS, 700) + noise(31, 0.004, 1), 0, 1)
    return loss, accuracy


@pytest.mark.parametrize(("ceiling", "kind"), [(0.24, "bump without accuracy"), (0.95, "bump with accuracy")])
def test_a_bump_is_read_against_chance(ceiling, kind):
    result = verdict(STEPS, *recall_curves(ceiling), chance=0.25)
    assert result.kind == kind
    assert result.sentence.startswith(kind)
    assert result.after == pytest.approx(ceiling, abs=0.02)


def test_the_level_beside_the_accuracy_is_called_what_it_is_and_left_out_where_the_context_offers_no_value():
    curves = recall_curves(0.95)
    assert verdict(STEPS, *curves, chance=0.25).sentence.endswith(" after; any value of the context gives 25.0%")
    assert verdict(STEPS, *curves, chance=0.0).sentence.endswith("% after")


def test_one_lucky_evaluation_does_not_make_accuracy():
    loss, accuracy = recall_curves(0.24)
    accuracy[25] = 0.6
    assert verdict(STEPS, loss, accuracy, chance=0.25).kind == "bump without accuracy"


def test_a_rise_of_the_loss_or_a_smooth_fall_is_no_bump():
    accuracy = np.linspace(0, 0.9, 31)
    assert verdict(STEPS, 3 * rise(STEPS, 700) + noise(31, 0.03), accuracy, 0.25).kind == "smooth"
    assert verdict(STEPS, 9 * np.exp(-STEPS / 400) + noise(31, 0.03), accuracy, 0.25).kind == "smooth"


def test_chance_outside_zero_to_one_is_refused():
    with pytest.raises(UserError, match="chance"):
        verdict(STEPS, STEPS, STEPS, chance=25)


def test_a_loss_that_is_not_judged_gives_no_verdict():
    assert verdict(STEPS[:4], np.arange(4), np.zeros(4), 0.25).kind == "not judged"
    early = verdict(STEPS, 9 * np.exp(-STEPS / 20), np.linspace(0, 0.9, 31), 0.25)
    assert early.kind == "not judged"
    assert "evaluate more often" in early.sentence


def test_a_fall_to_the_context_free_level_is_no_bump_and_a_later_one_is():
    """With shuffled labels a model learns which tokens are values, suddenly, and nothing else."""
    first = 4.85 - 0.69 * rise(STEPS, 300, 0.1) + noise(31, 0.01)
    low = np.full(31, 0.02)
    alone = verdict(STEPS, first, low, 0.25, context_free=np.log(64))
    assert alone.kind == "context-free"
    assert alone.drop is None
    assert alone.sentence.startswith("context-free: the loss falls by 0.")
    assert alone.sentence.endswith("it learns which tokens are answers, which needs no circuit")
    assert verdict(STEPS, first, low, 0.25).kind == "bump without accuracy"  # the level is not known
    later = verdict(STEPS, first - 0.5 * rise(STEPS, 1000, 0.1), low, 0.25, context_free=np.log(64))
    assert later.kind == "bump without accuracy"
    assert later.drop.midpoint == pytest.approx(1000, rel=0.05)
