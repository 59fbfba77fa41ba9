"""Transitions of single curves: found where they are, none in smooth curves, and nothing judged that cannot be."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from circuitscope.analysis.phases.detection import FEWEST, Level, transitions
from circuitscope.analysis.phases.mixture import WIDEST, sigmoid
from circuitscope.errors import UserError

STEPS = np.linspace(0, 1500, 31)
DENSE = np.linspace(0, 1500, 61)


def rise(steps, midpoint, width=0.15):
    return sigmoid(np.log(steps + steps[1]), np.log([midpoint + steps[1]]), np.array([width]))[0]


def noise(points, sigma, seed=0, rho=0.0):
    drawn = np.random.default_rng(seed).standard_normal(points)
    for i in range(1, points):
        drawn[i] = rho * drawn[i - 1] + np.sqrt(1 - rho**2) * drawn[i]
    return sigma * drawn


@pytest.mark.parametrize("size", [-3.0, 0.8])
@pytest.mark.parametrize("steps", [STEPS, np.geomspace(10, 1510, 31) - 10], ids=["even", "log"])
def test_a_transition_is_found_where_it_is_and_as_large_as_it_is(size, steps):
    found = transitions(steps, 5 + size * rise(steps, 700) + noise(31, 0.02 * abs(size)))
    assert len(found) == 1
    assert found[0].size == pytest.approx(size, rel=0.1)
    assert found[0].midpoint == pytest.approx(700, rel=0.05)
    assert found[0].onset < found[0].midpoint < found[0].end <= np.exp(WIDEST) * (found[0].onset + steps[1])
    assert found[0].low <= 700 <= found[0].high


def test_a_transition_of_another_shape_than_a_sigmoid_is_crossed_where_its_values_say():
    """A jump to one half at step 600, then a slow straight climb to 1 at step 1,000: half is done at step 600."""
    values = np.interp(DENSE, [0, 575, 600, 1000, 1500], [0, 0, 0.5, 1, 1]) + noise(61, 0.01)
    found = transitions(DENSE, values)
    assert found.main.low <= 600 <= found.main.high + 25
    assert found.main.onset < 610


SMOOTH = {
    "exponential": 9 * np.exp(-STEPS / 300),
    "fast exponential": 9 * np.exp(-STEPS / 40),
    "two exponentials": 4 * np.exp(-STEPS / 30) + 3 * np.exp(-STEPS / 600),
    "three exponentials": 4 * np.exp(-STEPS / 20) + 2 * np.exp(-STEPS / 150) + np.exp(-STEPS / 900),
    "power law": (1 + STEPS / 20) ** -0.5,
    "steep power law": (1 + STEPS / 7) ** -1.3,
    "stretched exponential": np.exp(-((STEPS / 100) ** 0.5)),
    "linear": 9 - STEPS / 200,
    "logarithm": np.log(STEPS + 50),
    "constant": np.full(31, 2.5),
}


@pytest.mark.parametrize("name", SMOOTH)
@pytest.mark.parametrize("sigma", [0.0, 0.01])
def test_smooth_curves_have_no_transition_whether_they_fall_or_rise(name, sigma):
    values = SMOOTH[name] + noise(31, sigma * (np.ptp(SMOOTH[name]) or 1.0))
    assert len(transitions(STEPS, values)) == 0
    assert len(transitions(STEPS, -values)) == 0


@pytest.mark.parametrize("seed", range(6))
def test_a_smooth_fall_is_never_a_rise(seed):
    """Seen on a real run: a fall from 6.24 to 2.09 reported as "rises by 4.00"."""
    rng = np.random.default_rng(seed)
    shape = 0.6 * np.exp(-DENSE / rng.uniform(20, 100)) + 0.4 * np.exp(-DENSE / rng.uniform(200, 900))
    assert len(transitions(DENSE, 2.09 + 4.15 * shape + noise(61, 0.03, seed))) == 0


def test_what_is_reported_goes_the_way_of_the_curve_and_is_no_larger_than_it():
    """Seen on real runs: "falls by 11.74" in a curve of 5.6, and a sign opposite to what the curve does."""
    for seed in range(4):
        values = 5.6 - 2.5 * rise(DENSE, 500, 1.0) - 3.1 * (1 - np.exp(-DENSE / 400)) + noise(61, 0.05, seed, 0.6)
        for t in transitions(DENSE, values, draws=20):
            assert -np.ptp(values) <= t.size < 0


@pytest.mark.parametrize("schedule", ["warmup", "cosine"])
def test_a_schedule_is_no_transition_when_time_is_the_sum_of_the_rates(schedule):
    rate = np.minimum(np.arange(1, 1501) / 300, 1.0)
    if schedule == "cosine":
        rate = rate * 0.5 * (1 + np.cos(np.pi * np.arange(1500) / 1500))
    clock = np.concatenate([[0], np.cumsum(rate)])[DENSE.astype(int)]
    values = 6 * np.exp(-clock / 150) + noise(61, 0.02)
    assert len(transitions(DENSE, values, clock=clock)) == 0
    assert len(transitions(DENSE, values - 1.5 * rise(DENSE, 600), clock=clock)) == 1


@pytest.mark.parametrize("at", [150, 300])
def test_a_step_under_a_long_warmup_is_found_where_it_is(at):
    clock = np.minimum(DENSE, 500) ** 2 / 1000 + np.maximum(DENSE - 500, 0)
    found = transitions(DENSE, 3 * np.exp(-clock / 800) - rise(DENSE, at, width=0.7) + noise(61, 0.02), clock=clock)
    assert len(found) == 1
    assert found[0].midpoint == pytest.approx(at, rel=0.1)


def test_the_interval_reaches_to_the_values_on_either_side():
    """Seen on real runs: "210 (210 to 210)", and a score known every 100 steps placed to ±5."""
    coarse = np.arange(0, 3001, 100.0)
    found = transitions(coarse, np.where(coarse > 1250, 1.0, 0.0)).main
    assert found.low <= 1200
    assert found.high >= 1300


def test_a_jump_in_the_first_two_evaluations_is_not_judged():
    """Seen on real runs: accuracy from 0 to 99% within two evaluations called smooth."""
    values = np.full(31, 0.99) + noise(31, 0.002)
    values[:2] = [0.0, 0.6]
    found = transitions(STEPS, values)
    assert not found.judged
    assert "too early to judge; evaluate more often" in found.note


def test_a_turn_at_the_very_end_is_not_judged():
    values = noise(31, 0.01)
    values[-2:] += [0.7, 0.99]
    found = transitions(STEPS, values)
    assert not found.judged
    assert "train longer" in found.note


def test_few_points_are_not_judged():
    found = transitions(STEPS[: FEWEST - 1], rise(STEPS, 150)[: FEWEST - 1])
    assert not found.judged
    assert "too few points to judge" in found.note


@settings(max_examples=10)
@given(factor=st.floats(1e-3, 1e3) | st.floats(-1e3, -1e-3), offset=st.floats(-10, 10), seed=st.integers(0, 3))
def test_units_and_sign_of_the_values_do_not_matter(factor, offset, seed):
    plain = 2 * rise(STEPS, 500) + (1 - np.exp(-STEPS / 500)) + noise(31, 0.05, seed)
    a = transitions(STEPS, plain, draws=20)
    b = transitions(STEPS, factor * (plain + offset), draws=20)
    assert [x.midpoint for x in b] == pytest.approx([x.midpoint for x in a], rel=1e-3)
    assert [x.size for x in b] == pytest.approx([factor * x.size for x in a], rel=1e-3)


def test_two_transitions_come_in_order_of_step_and_the_larger_is_the_main_one():
    found = transitions(STEPS, 9 - 2 * rise(STEPS, 300, 0.1) - 4 * rise(STEPS, 1000, 0.1) + noise(31, 0.05))
    assert [x.midpoint for x in found] == pytest.approx([300, 1000], rel=0.05)
    assert found.main is found[1]


def test_a_larger_but_slower_fall_is_not_the_main_one():
    """Seen on real runs: the loss goes on falling slowly, by more, after the step in which recall forms."""
    values = 9 - 2 * rise(DENSE, 300, 0.1) - 4 * rise(DENSE, 900, 0.6) + noise(61, 0.03)
    found = transitions(DENSE, values)
    assert [x.midpoint for x in found] == pytest.approx([300, 900], rel=0.1)
    assert abs(found[0].size) < abs(found[1].size)
    assert found.main is found[0]


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


def test_a_clock_that_runs_backwards_and_repeats_of_the_wrong_shape_are_refused():
    with pytest.raises(UserError, match="never falling"):
        transitions(STEPS, STEPS, clock=-STEPS)
    with pytest.raises(UserError, match="repeats"):
        transitions(STEPS, STEPS, repeats=np.zeros((5, 8)))


def test_a_clock_that_stands_still_at_the_end_is_no_error():
    clock = np.minimum(STEPS, 1200)
    assert len(transitions(STEPS, -3 * rise(STEPS, 700) + noise(31, 0.03), clock=clock)) == 1


def test_repeats_that_disagree_widen_the_interval():
    rng = np.random.default_rng(0)
    apart = np.stack([rise(STEPS, m) for m in rng.uniform(550, 850, 8)], axis=1)
    curve = rise(STEPS, 700) + noise(31, 0.003)
    alone, far = (transitions(STEPS, curve, repeats=r)[0] for r in (None, apart))
    assert far.high - far.low > alone.high - alone.low


def test_accuracy_that_saturates_with_vanishing_noise_is_not_a_transition_but_a_jump_to_one_is():
    rng = np.random.default_rng(1)
    slow = rng.binomial(512, 1 - np.exp(-STEPS / 250)) / 512
    jump = rng.binomial(512, 0.05 + 0.95 * rise(STEPS, 700)) / 512
    assert len(transitions(STEPS, slow)) == 0
    assert transitions(STEPS, jump).main.midpoint == pytest.approx(700, rel=0.03)


LEVELS = {"at": 4.16, "on the way": 4.0, "far above": 3.0}


@pytest.mark.parametrize("level", LEVELS.values(), ids=LEVELS)
def test_a_fall_that_goes_no_further_than_its_level_is_marked_and_is_not_the_main_one(level):
    """Seen on real runs: 14 of 16 losses with shuffled labels fall in a step, from ln V to ln(number of values)."""
    values = 4.85 - 0.69 * rise(STEPS, 700) + noise(31, 0.01)
    found = transitions(STEPS, values, level=Level("context-free", level, slack_share=0.1))
    assert [t.ends_at for t in found] == ["context-free"]
    assert found.beyond == ()
    assert found.main is None
    assert found[0].after == pytest.approx(4.16, abs=0.05)


@pytest.mark.parametrize(("end", "marked"), [(4.12, True), (3.9, False), (0.3, False)])
def test_a_fall_that_runs_through_its_level_counts(end, marked):
    """Up to a tenth of a fall may lie below: its end is where nine tenths are done."""
    values = 4.85 - (4.85 - end) * rise(STEPS, 700) + noise(31, 0.004)
    found = transitions(STEPS, values, level=Level("context-free", 4.16, slack_share=0.1))
    assert [bool(t.ends_at) for t in found] == [marked]


def test_of_two_falls_the_one_to_the_level_is_marked_and_the_other_is_the_main_one():
    values = 4.85 - 0.69 * rise(STEPS, 300, 0.1) - 0.6 * rise(STEPS, 1000, 0.1) + noise(31, 0.01)
    found = transitions(STEPS, values, level=Level("context-free", 4.16, slack_share=0.1))
    assert [t.ends_at for t in found] == ["context-free", ""]
    assert found.main is found[1]


@pytest.mark.parametrize(("top", "marked"), [(0.2, True), (0.26, True), (0.35, False), (0.95, False)])
def test_a_rise_is_read_against_its_level_from_below(top, marked):
    values = top * rise(STEPS, 700) + noise(31, 0.004)
    found = transitions(STEPS, values, level=Level("any value", 0.25, slack=0.02))
    assert [bool(t.ends_at) for t in found] == [marked]
