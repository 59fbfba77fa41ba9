"""The Bayes factor for a transition, against integrals done the slow way."""

import numpy as np
import pytest
from scipy.integrate import quad

from circuitscope.analysis.phases.evidence import FLOOR, RHOS, SIZES, Baselines, Grid, baselines
from circuitscope.analysis.phases.simulation import correlated, evaluations


@pytest.fixture(scope="module")
def grid():
    return Grid(evaluations(24, "even"))


def test_every_prior_sums_to_one(grid):
    assert grid.base.prior.sum() == pytest.approx(1)
    assert baselines(grid.steps, fine=True).prior.sum() == pytest.approx(1)
    assert grid.prior.sum() == pytest.approx(1)
    assert sum(grid.noise_prior) == pytest.approx(1)


@pytest.mark.parametrize(("size", "within"), [(2.0, 1.0), (4.0, 0.5), (6.0, 0.3), (15.0, 0.3)])
@pytest.mark.parametrize("rho", [0.0, 0.6])
def test_the_evidence_of_one_shape_is_the_integral_over_size_and_sigma(size, within, rho):
    """One noise, one baseline (constant), one sigmoid: p(y | sigmoid) / p(y), integrated over both unknowns."""
    grid = Grid(evaluations(24, "even"))
    grid.noise, grid.whitening = [(rho, 0.0)], [grid._whitening(rho, 0.0)]
    grid.noise_prior = [1.0]
    grid.base = Baselines(np.zeros((1, 24)), np.zeros((1, 2, 24)), np.ones(1))
    middle = np.argmin(np.abs(grid.midpoint - grid.u[12]))
    for name in ("midpoint", "width", "prior", "sigmoid"):
        setattr(grid, name, getattr(grid, name)[[middle]])
    grid.prior = np.ones(1)
    grid._parts = grid._project(np.ones((24, 1)), [0])
    y = size * grid.sigmoid[0] + correlated(24, 1, rho, np.random.default_rng(3))[:, 0]
    w = grid.whitening[0][0]
    q = np.linalg.qr(w @ np.ones((24, 1)))[0]
    z, s = ((a - q @ (q.T @ a)) for a in (w @ y, w @ grid.sigmoid[0]))
    rest, n = z @ z + 24 * (FLOOR * np.ptp(y)) ** 2, 23
    peak = np.sqrt(n / rest)

    def over_sigma(ratio):  # t = 1 / sigma, prior 1 / sigma; against the same without a sigmoid
        def at(t, r):
            return (n - 1) * np.log(t / peak) - 0.5 * (rest * t**2 - 2 * r * t * (s @ z) + r**2 * (s @ s)) + n / 2

        with_step, without = (quad(lambda t, r=r: np.exp(at(t, r)), 0, 10 * peak, limit=400)[0] for r in (ratio, 0.0))
        return with_step / without

    span = np.log(SIZES[1] / SIZES[0])
    exact = sum(
        quad(lambda v, sign=sign: over_sigma(sign * np.exp(v)) / (2 * span), *np.log([SIZES[0], 60.0]), limit=200)[0]
        for sign in (1, -1)
    )
    assert grid.scan(y[:, None]).evidence[0] == pytest.approx(np.log(exact), abs=within)


def test_a_step_has_evidence_where_it_is_and_noise_has_none(grid):
    rng = np.random.default_rng(0)
    rises = np.stack([8 * (grid.u > grid.u[i]) for i in (6, 10, 14)], axis=1) + rng.standard_normal((24, 3))
    scan = grid.scan(rises)
    assert (scan.evidence > 2).all()
    assert scan.midpoint == pytest.approx((grid.u[[6, 10, 14]] + grid.u[[7, 11, 15]]) / 2, abs=0.05 * grid.range)
    assert (grid.scan(rng.standard_normal((24, 20))).evidence < 0).all()


def test_the_noise_that_is_there_is_the_noise_that_is_chosen():
    grid = Grid(evaluations(100, "even"))
    rng = np.random.default_rng(1)
    step = 20 * (grid.u > grid.u[50])[:, None]
    chosen = [
        np.mean([RHOS[k % len(RHOS)] for k in grid.scan(step + correlated(100, 20, r, rng)).noise]) for r in (0, 0.8)
    ]
    assert chosen[0] < 0.2 < 0.6 < chosen[1]


def test_a_step_that_is_taken_already_is_not_found_again(grid):
    y = 10 * (grid.u > grid.u[12]) + np.random.default_rng(2).standard_normal(24)
    first = grid.scan(y[:, None])
    m, w = float(first.midpoint[0]), float(first.width[0])
    again = grid.scan(y[:, None], (grid.u > grid.u[12])[:, None].astype(float), [(m, w)])
    assert first.evidence[0] > 3
    assert again.evidence[0] < 0
    assert abs(again.midpoint[0] - m) > w / 2


def test_with_no_room_for_a_transition_there_is_no_evidence():
    grid = Grid(evaluations(8, "even"))
    scan = grid.scan(np.random.default_rng(0).standard_normal((8, 2)), taken=[(grid.u[3], grid.u[4] - grid.u[3])])
    assert (scan.evidence == -np.inf).all()
