"""What drawn curves are made of: the steps of evaluations, noise, and sigmoid steps. No detector is used here."""

from dataclasses import dataclass

import numpy as np

POINTS = (20, 30, 60, 120)  # evaluations of a curve, in turn


@dataclass(frozen=True)
class Drawn:
    """A curve: steps, the sum of the learning rates up to each, values, and where its step is (nan: it has none)."""

    steps: np.ndarray
    clock: np.ndarray
    values: np.ndarray
    midpoint: float = np.nan
    boundaries: tuple[float, ...] = ()  # steps at which the data begins to repeat


def evaluations(points, rng):
    """Evaluations of a run of 1,500 steps: evenly spaced from 0, or for a third of the runs log-spaced."""
    if rng.random() < 2 / 3:
        return np.linspace(0, 1500, points)
    return np.round(np.geomspace(10, 10 + 1500, 4 * points)[::4][:points] - 10, 3)


def ar1(points, rho, rng):
    """Noise with standard deviation 1 and correlation ρ from one evaluation to the next."""
    noise = rng.standard_normal(points)
    for i in range(1, points):
        noise[i] = rho * noise[i - 1] + np.sqrt(1 - rho**2) * noise[i]
    return noise


def place(steps, rng, narrow=0.02, wide=0.08):
    """Midpoint and 10% to 90% width of a step in log steps, four evaluations or more from either end."""
    u = np.log(steps + steps[1])
    width = (u[-1] - u[0]) * rng.uniform(narrow, wide)
    return u, rng.uniform(u[4] + width / 2, u[-5] - width / 2), width


def logistic(steps, rng):
    """A sigmoid from 0 to 1 and its midpoint."""
    u, m, w = place(steps, rng)
    return 1 / (1 + np.exp(-2 * np.log(9) * (u - m) / w)), float(np.exp(m) - steps[1])


def height(rng):
    """How far a smooth curve falls or rises, in σ."""
    return rng.choice([-1, 1]) * np.exp(rng.uniform(np.log(10), np.log(100)))


def stepped(null, step, size):
    """Curves of the kind `null` with a step of so many σ, in the direction in which the curve goes."""

    def draw(points, rng):
        drawn = null(points, rng)
        rise, midpoint = step(drawn.steps, rng)
        falls = drawn.values[:3].mean() > drawn.values[-3:].mean()
        return Drawn(drawn.steps, drawn.clock, drawn.values + (-size if falls else size) * rise, midpoint)

    return draw
