"""What came first, and how much later the next thing did."""

import numpy as np
import pytest

from circuitscope.analysis.phases.detection import Transitions, transitions
from circuitscope.analysis.phases.mixture import sigmoid
from circuitscope.analysis.phases.order import order
from circuitscope.errors import UserError

STEPS = np.linspace(0, 1500, 31)


def rise(steps, midpoint, width=0.15):
    return sigmoid(np.log(steps + steps[1]), np.log([midpoint + steps[1]]), np.array([width]))[0]


def noise(points, sigma, seed=0):
    return sigma * np.random.default_rng(seed).standard_normal(points)


def found_at(midpoint, seed) -> Transitions:
    return transitions(STEPS, rise(STEPS, midpoint) + noise(31, 0.02, seed))


def test_events_come_in_order_with_lags_and_those_too_close_are_not_told_apart():
    result = order(
        {
            "accuracy": found_at(1000, 0),
            "binding": found_at(400, 1),
            "loss": found_at(1000, 2),
            "flat": transitions(STEPS, noise(31, 1.0, 3)),
        },
        at="midpoint",
    )
    assert result.events[0].name == "binding"
    assert result.absent == ("flat",)
    lags = {frozenset((lag.first, lag.second)): lag for lag in result.lags}
    late = lags[frozenset(("binding", "loss"))]
    assert late.distinguishable
    assert late.low < 600 < late.high
    assert str(lags[frozenset(("accuracy", "loss"))]).endswith("not distinguishable")
    assert "flat: no transition" in str(result)


@pytest.mark.usefixtures("without_type_checks")
def test_an_unknown_point_of_a_transition_is_refused():
    with pytest.raises(UserError, match="onset"):
        order({}, at="start")
