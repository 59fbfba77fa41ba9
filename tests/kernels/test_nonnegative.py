"""Non-negative least squares with one more column: the same sums of squares as scipy's solver from scratch."""

import numpy as np
import pytest
from scipy.optimize import nnls

from circuitscope.kernels.nonnegative import squares_with_one_more


def from_scratch(columns, target, along, beyond, target_beyond):
    rows, count = columns.shape
    out = []
    for shape, last, wanted in zip(along, beyond, target_beyond, strict=True):
        design = np.zeros((rows + 1, count + 1))
        design[:-1, :-1], design[:-1, -1], design[-1, -1] = columns, shape, last
        out.append(nnls(design, np.append(target, wanted))[1] ** 2)
    return np.array(out)


def problem(kind, rng):
    """Columns, target, and 30 further columns."""
    if kind == "random":
        columns, target = rng.standard_normal((12, 40)), rng.standard_normal(12)
    else:  # exponentials that are almost dependent, as the search for transitions has them
        x = np.linspace(0, 1, 14)
        columns = np.exp(-np.outer(x, np.geomspace(0.1, 80, 35)))
        target = 0.7 * np.exp(-3 * x) + 0.5 * (x < 0.4) + 0.02 * rng.standard_normal(14)
    rows = len(columns)
    return columns, target, rng.standard_normal((30, rows)), rng.uniform(0, 2, 30), rng.standard_normal(30)


@pytest.mark.parametrize("kind", ["random", "exponentials"])
@pytest.mark.parametrize("seed", range(5))
def test_the_squares_are_those_of_a_solver_that_starts_from_nothing(kind, seed):
    given = problem(kind, np.random.default_rng(seed))
    np.testing.assert_allclose(squares_with_one_more(*given), from_scratch(*given), rtol=1e-8, atol=1e-12)


def test_a_column_that_is_there_already_changes_nothing_and_one_that_is_the_target_leaves_nothing():
    rng = np.random.default_rng(0)
    columns, target = np.abs(rng.standard_normal((8, 5))), np.abs(rng.standard_normal(8))
    along = np.stack([columns[:, 2], target, -target, np.zeros(8)])
    found = squares_with_one_more(columns, target, along, np.zeros(4), np.zeros(4))
    alone = nnls(columns, target)[1] ** 2
    np.testing.assert_allclose(found, [alone, 0, alone, alone], atol=1e-12)
