"""Transitions of single curves, the verdict on a loss bump, the order of events. Rates: test_phase_error_rates."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from circuitscope.analysis.phases.detection import FEWEST, Transitions, order, transitions, verdict
from circuitscope.analysis.phases.evidence import WIDEST, axis, sigmoid
from circuitscope.analysis.phases.simulation import correlated, evaluations
from circuitscope.errors import UserError

STEPS = evaluations(31, "even")


def rise(steps, midpoint, width=0.15):
    u, s0 = axis(steps)
    return sigmoid(u, np.log([midpoint + s0]), np.array([width]))[0]


def noise(points, sigma, seed=0, rho=0.0):
    return sigma * correlated(points, 1, rho, np.random.default_rng(seed))[:, 0]


@pytest.mark.parametrize("size", [-3.0, 0.8])
@pytest.mark.parametrize("spacing", ["even", "log"])
def test_a_transition_is_found_where_it_is_and_as_large_as_it_is(size, spacing):
    steps = evaluations(31, spacing)
    found = transitions(steps, 5 + size * rise(steps, 700) + noise(31, 0.02 * abs(size)))
    assert len(found) == 1
    assert found[0].size == pytest.approx(size, rel=0.1)
    assert found[0].midpoint == pytest.approx(700, rel=0.05)
    assert found[0].onset < found[0].midpoint < found[0].end <= np.exp(WIDEST) * (found[0].onset + 50)
    assert found[0].low <= found[0].midpoint <= found[0].high


def test_a_transition_without_noise_is_found_exactly():
    found = transitions(STEPS, 9 - 4 * rise(STEPS, 700, 0.3))
    u = np.log(found[0].end + 50) - np.log(found[0].onset + 50)
    assert len(found) == 1
    assert found[0].midpoint == pytest.approx(700, rel=0.01)
    assert u == pytest.approx(0.3, rel=0.1)


@pytest.mark.parametrize(
    "values",
    [
        9 * np.exp(-STEPS / 300),
        9 * np.exp(-STEPS / 40),
        (1 + STEPS / 20) ** -0.5,
        (1 + STEPS / 7) ** -1.3,
        9 - STEPS / 200,
        np.log(STEPS + 50),
        np.full(31, 2.5),
    ],
    ids=["exponential", "fast exponential", "power law", "steep power law", "linear", "log-linear", "constant"],
)
def test_smooth_curves_without_noise_have_no_transition(values):
    assert len(transitions(STEPS, values)) == 0


@settings(max_examples=10)
@given(
    factor=st.floats(1e-3, 1e3) | st.floats(-1e3, -1e-3),
    offset=st.floats(-10, 10),
    seed=st.integers(0, 3),
)
def test_units_and_sign_of_the_values_do_not_matter(factor, offset, seed):
    plain = 2 * rise(STEPS, 500) + np.exp(-STEPS / 500) + noise(31, 0.05, seed)
    a = transitions(STEPS, plain, draws=20)
    b = transitions(STEPS, factor * (plain + offset), draws=20)
    assert [x.midpoint for x in b] == pytest.approx([x.midpoint for x in a], rel=1e-6)
    assert [x.size for x in b] == pytest.approx([factor * x.size for x in a], rel=1e-6)


def test_two_transitions_come_in_order_of_step_and_the_larger_is_the_main_one():
    found = transitions(STEPS, 9 - 2 * rise(STEPS, 300, 0.1) - 4 * rise(STEPS, 1000, 0.1) + noise(31, 0.05))
    assert [x.midpoint for x in found] == pytest.approx([300, 1000], rel=0.05)
    assert found.main is found[1]


def test_few_points_are_not_judged():
    found = transitions(STEPS[: FEWEST - 1], rise(STEPS, 150)[: FEWEST - 1])
    assert not found.judged
    assert "too few points to judge" in found.note
    assert verdict(STEPS[:4], np.arange(4), np.zeros(4), 0.25).kind == "not judged"


def test_values_that_are_missing_are_left_out():
    values = rise(STEPS, 700) + noise(31, 0.02)
    gone = [3, 20, 30]
    holed = values.copy()
    holed[gone] = [np.nan, np.inf, np.nan]
    a, b = transitions(STEPS, holed), transitions(np.delete(STEPS, gone), np.delete(values, gone))
    assert a == b
    assert not transitions(STEPS, np.full(31, np.nan)).judged


@pytest.mark.parametrize(
    ("steps", "values", "words"),
    [
        ([0, 2, 1], [1, 2, 3], "steps must increase"),
        ([0, 1, 1], [1, 2, 3], "steps must increase"),
        ([0, 1], [1, 2, 3], "one value per step"),
        ([-1, 0, 1], [1, 2, 3], "not negative"),
        ([0, np.nan, 1], [1, 2, 3], "finite"),
    ],
)
def test_bad_curves_are_refused_in_one_line(steps, values, words):
    with pytest.raises(UserError, match=words) as error:
        transitions(steps, values)
    assert "\n" not in str(error.value)


def test_repeats_of_the_wrong_shape_are_refused():
    with pytest.raises(UserError, match="repeats"):
        transitions(STEPS, STEPS, repeats=np.zeros((5, 8)))


def test_repeats_that_disagree_widen_the_interval():
    rng = np.random.default_rng(0)
    together = np.stack([rise(STEPS, 700) + noise(31, 0.01, s) for s in range(8)], axis=1)
    apart = np.stack([rise(STEPS, m) for m in rng.uniform(550, 850, 8)], axis=1)
    curve = together.mean(axis=1)
    alone, close, far = (transitions(STEPS, curve, repeats=r)[0] for r in (None, together, apart))
    assert far.high - far.low > 2 * (alone.high - alone.low)
    assert close.high - close.low < 2 * (alone.high - alone.low)


def test_accuracy_that_saturates_with_vanishing_noise_is_not_a_transition_but_a_jump_to_one_is():
    rng = np.random.default_rng(1)
    slow = rng.binomial(512, 1 - np.exp(-STEPS / 250)) / 512
    jump = rng.binomial(512, 0.05 + 0.95 * rise(STEPS, 700)) / 512
    assert len(transitions(STEPS, slow)) == 0
    assert transitions(STEPS, jump).main.midpoint == pytest.approx(700, rel=0.03)


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
