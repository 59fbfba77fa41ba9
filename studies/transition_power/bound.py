"""How many steps of 5 sigma could any test find? An upper bound, by the lemma of Neyman and Pearson.

    python studies/transition_power/bound.py        # → bound.csv

A test that raises a false alarm on at most 5% of the curves of every smooth kind does so on at most 5% of any mixture
of these kinds. Of all such tests, the one that compares the likelihood of "5 sigma step" with that of the mixture finds
most steps; so its share is an upper bound for all, and the least favourable mixture gives the lowest one. The test is
told the size, sigma, rho and kind of baseline of the steps it looks for: no test on real curves knows them.
"""

from itertools import product
from pathlib import Path

import numpy as np
import pandas as pd
from curves import ar1
from scipy.special import logsumexp

from circuitscope.analysis.phases.mixture import sigmoid

SIZE, LEVEL = 5.0, 0.05
OFFSET, FACTOR = (
    30.0,
    35.0,
)  # standard deviation of a curve's offset and of its baseline's factor, in sigma of the steps
RHOS, SIGMAS = (0.0, 0.5, 0.8), (0.8, 1.2, 1.8, 2.6)  # of the curves without a step; SIGMAS in sigma of the steps
STEPPED, SMOOTH, SHAPES, ROUNDS = 1500, 400, 1200, 80


def axis(steps):
    """u = log(step + s0) and s0: the first positive step where the curve starts at step 0, else 0."""
    s0 = float(steps[steps > 0][0]) if steps[0] <= 0 else 0.0
    return np.log(steps + s0), s0


def evaluations(points, spacing):
    """Every 50 steps from 0, or from 10 to 10,000 in equal factors."""
    return 50.0 * np.arange(points) if spacing == "even" else np.geomspace(10, 10_000, points)


def correlated(points, curves, rho, rng):
    """AR(1) noise [step, curve] with standard deviation 1."""
    return np.stack([ar1(points, rho, rng) for _ in range(curves)], axis=1)


def baselines(steps):
    """Shapes by kind, None for the constant."""
    u = axis(steps)[0]
    x, v = ((a - a[0]) / (a[-1] - a[0]) for a in (steps, u))
    scales = np.geomspace(0.03, 1, 8)
    return {
        "constant": [None],
        "linear": [x],
        "log-linear": [v],
        "exponential": [np.exp(-x / s) for s in scales],
        "power law": [(1 + x / s) ** -a for s in scales for a in (0.5, 1.0, 1.7)],
    }


def covariance(points, rho, sigma, shape):
    i = np.arange(points)
    noise = sigma**2 * rho ** np.abs(i[:, None] - i[None])
    return noise + OFFSET**2 + (0 if shape is None else FACTOR**2 * np.outer(shape, shape))


def drawn(shapes, curves, points, rho, sigma, rng):
    mean = OFFSET * rng.standard_normal(curves) + np.zeros((points, curves))
    if shapes[0] is not None:
        mean += (np.stack(shapes)[rng.integers(0, len(shapes), curves)] * FACTOR * rng.standard_normal((curves, 1))).T
    return mean + sigma * correlated(points, curves, rho, rng)


def steps_of(steps, count, rng):
    """Sigmoids of the simulation: narrow, up or down, with four evaluations or more on either side."""
    u = axis(steps)[0]
    width = (u[-1] - u[0]) * rng.uniform(0.02, 0.08, count)
    midpoint = rng.uniform(u[3] + width / 2, u[-4] - width / 2)
    return SIZE * rng.choice([-1, 1], count)[:, None] * sigmoid(u, midpoint, width)


def log_density(values, shapes, rho, sigma, means):
    """Log density [curve], averaged over baselines and over means."""
    terms = []
    for shape in shapes:
        root = np.linalg.cholesky(covariance(len(values), rho, sigma, shape))
        z, m = np.linalg.solve(root, values), np.linalg.solve(root, means.T)
        square = (z**2).sum(0)[None] - 2 * m.T @ z + (m**2).sum(0)[:, None]
        terms.append(logsumexp(-0.5 * square, axis=0) - np.log(len(means)) - np.log(np.diag(root)).sum())
    return logsumexp(np.stack(terms), axis=0) - np.log(len(terms))


def bound(points, spacing, rho, base, seed=0):
    rng = np.random.default_rng(seed)
    steps = evaluations(points, spacing)
    by_kind = baselines(steps)
    nulls = list(product(by_kind, RHOS, SIGMAS))
    nothing, means = np.zeros((1, points)), steps_of(steps, SHAPES, rng)

    def draw():
        stepped = drawn(by_kind[base], STEPPED, points, rho, 1.0, rng) + steps_of(steps, STEPPED, rng).T
        smooth = [drawn(by_kind[kind], SMOOTH, points, r, s, rng) for kind, r, s in nulls]
        values = np.concatenate([stepped, *smooth], axis=1)
        null = np.stack([log_density(values, by_kind[kind], r, s, nothing) for kind, r, s in nulls])
        return log_density(values, by_kind[base], rho, 1.0, means), null

    def judged(weights, densities):
        """Share of steps found, and of alarms by null, at the level for the mixture."""
        step, null = densities
        ratio = step - logsumexp(null + np.log(weights)[:, None], axis=0)
        smooth = ratio[STEPPED:]
        rank = np.argsort(-smooth)
        share = np.cumsum(np.repeat(weights / SMOOTH, SMOOTH)[rank])
        limit = smooth[rank][np.searchsorted(share, LEVEL)]
        return (ratio[:STEPPED] > limit).mean(), (smooth > limit).reshape(len(nulls), SMOOTH).mean(axis=1)

    searched, weights = draw(), np.full(len(nulls), 1 / len(nulls))
    best = (np.inf, weights)
    for _ in range(ROUNDS):  # more weight to kinds with more alarms than the level
        found, alarms = judged(weights, searched)
        best = min(best, (found, weights), key=lambda b: b[0])
        weights = np.maximum(weights * np.exp(5 * (alarms - LEVEL)), 1e-7)
        weights /= weights.sum()
    return judged(best[1], draw())[0]  # on curves that had no part in the choice of weights


def main():
    rows = []
    for points, spacing, base, rho in product(
        (20, 30, 60), ("even", "log"), ("constant", "exponential"), (0.0, 0.5, 0.8)
    ):
        rows.append((points, spacing, base, rho, bound(points, spacing, rho, base)))
        print(*rows[-1], flush=True)
    table = pd.DataFrame(rows, columns=["points", "spacing", "baseline", "rho", "at_most"])
    table.to_csv(Path(__file__).with_name("bound.csv"), index=False, float_format="%.3f")


if __name__ == "__main__":
    main()
