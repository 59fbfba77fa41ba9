"""The error rates of docs/phases.md, measured again on drawn curves.

A rate over n curves has a standard error of √(p(1 - p)/n): 1.2 points for 5% of the 320 curves of a kind without a
transition, 2.4 points for 95% of the 80 curves of a cell with one. The random numbers are fixed.
"""

import re
from functools import lru_cache
from pathlib import Path

import numpy as np
import pytest

from circuitscope.analysis.phases import simulation
from circuitscope.analysis.phases.detection import critical, transitions
from circuitscope.analysis.phases.evidence import Grid

DOCS = Path(__file__).parents[3] / "docs" / "phases.md"
false_alarms = lru_cache(simulation.false_alarms)
found = lru_cache(simulation.found)
whole = lru_cache(simulation.whole)


def narrow(size):
    return {row: rates[size] for row, rates in found().items() if not row.wide}


@pytest.mark.slow
def test_false_alarms_stay_within_five_percent_on_every_kind_of_smooth_curve():
    assert {kind: rate for kind, rate in false_alarms().items() if rate > 0.05} == {}


@pytest.mark.slow
def test_narrow_transitions_of_20_sigma_are_found_in_place_at_least_95_times_in_100():
    assert {row: rate for row, rate in narrow(20).items() if rate < 0.95} == {}


@pytest.mark.slow
def test_narrow_transitions_of_12_sigma_are_found_in_place_nine_times_in_ten():
    assert {row: rate for row, rate in narrow(12).items() if rate < 0.9} == {}


@pytest.mark.slow
def test_wide_transitions_of_20_sigma_are_found_in_place_nine_times_in_ten():
    assert {row: rates[20] for row, rates in found().items() if row.wide and rates[20] < 0.9} == {}


@pytest.mark.slow
def test_transitions_of_5_sigma_are_found_in_dense_curves_with_independent_noise():
    dense = {row: rate for row, rate in narrow(5).items() if row.points == simulation.DENSE and row.rho == 0}
    assert len(dense) == 2
    assert min(dense.values()) > 0.8


@pytest.mark.slow
@pytest.mark.xfail(
    strict=True, reason="the aim is 95% at 5 sigma; no test reaches it on every row: studies/transition_power"
)
def test_narrow_transitions_of_5_sigma_are_found_in_place_at_least_95_times_in_100():
    assert min(narrow(5).values()) >= 0.95


@pytest.mark.slow
def test_one_transition_is_not_split_and_two_are_told_apart():
    assert whole().more <= 0.05
    assert whole().both >= 0.9


@pytest.mark.slow
def test_the_interval_holds_the_midpoint_about_as_often_as_it_says():
    assert whole().coverage >= 0.88


@pytest.mark.slow
def test_the_docs_hold_the_rates_that_are_measured():
    def numbers(line):
        return [float(x) / 100 for x in re.findall(r"([\d.]+)% \|", line)]

    held = {
        re.sub(r"[\d.]+% \|", "% |", line): numbers(line) for line in DOCS.read_text().splitlines() if "% |" in line
    }
    measured = simulation.tables(false_alarms(), found(), whole()).splitlines()
    for line in measured:
        if "% |" in line:
            key = re.sub(r"[\d.]+% \|", "% |", line)
            assert key in held, line
            assert held[key] == pytest.approx(numbers(line), abs=0.03), line


@pytest.mark.slow
def test_what_the_simulation_counts_is_what_transitions_finds():
    grid = Grid(simulation.evaluations(24, "even"))
    rng = np.random.default_rng(0)
    stepped = simulation.stepped(grid.steps, 9, False, "exponential", 0.5, 12, rng).values
    smooth = simulation.without(("constant", "rho 0.8"), grid.steps, 12, rng)
    values = np.concatenate([stepped, smooth], axis=1)
    counted = [len(shapes) for shapes in simulation._all(grid, values)]
    assert counted == [len(transitions(grid.steps, y, draws=5)) for y in values.T]
    assert 0 < sum(map(bool, counted)) < len(counted)


def test_scanning_curves_together_or_alone_is_the_same():
    grid = Grid(simulation.evaluations(20, "log"))
    values = simulation.without(("exponential", "rho 0.5"), grid.steps, 40, np.random.default_rng(0))
    together = grid.scan(values).evidence
    alone = [grid.scan(values[:, [i]]).evidence[0] for i in range(40)]
    assert alone == pytest.approx(together, abs=1e-3)
    assert together.max() < 3 * critical(20)


def test_drawn_noise_has_the_spread_and_correlation_it_is_asked_for():
    noise = simulation.correlated(60, 4000, 0.8, np.random.default_rng(0))
    assert noise.std() == pytest.approx(1, abs=0.02)
    assert np.corrcoef(noise[30], noise[31])[0, 1] == pytest.approx(0.8, abs=0.03)
