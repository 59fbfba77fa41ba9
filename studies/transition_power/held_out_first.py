"""Curves that judged an earlier detector, drawn once and then looked at: for today's they are kinds it was built with.

Every kind is a function (points, rng) → a curve, in units of σ. NULLS have no transition. In "epochs" the data repeats:
the training loss falls a little wherever an epoch begins, and only what is not marked as such a place is an alarm.
"""

import numpy as np
from curves import Drawn, ar1, evaluations, height, logistic, place, stepped


def _times(count, rng):
    """Time constants of several exponentials, as shares of the run."""
    return np.exp(rng.uniform(np.log(0.01), np.log(2), count))


def _mixture(x, rng):
    """A mixture of three to six exponentials from 1 to 0 or somewhat above."""
    times = _times(rng.integers(3, 7), rng)
    shares = rng.dirichlet(np.ones(len(times)))
    return np.exp(-x[:, None] / times) @ shares


def _in_time(rate, points, rng):
    """A mixture of exponentials in the time that a rate makes."""
    steps = evaluations(points, rng)
    clock = np.interp(steps, np.arange(1501), np.concatenate([[0], np.cumsum(rate)]))
    values = height(rng) * _mixture(clock / clock[-1], rng) + ar1(points, rng.uniform(0, 0.6), rng)
    return Drawn(steps, clock, values)


def linear_schedule(points, rng):
    """A warmup of up to a third of the run, then a straight line to 0."""
    at, warm = np.arange(1500), rng.uniform(10, 500)
    return _in_time(np.minimum((at + 1) / warm, (1500 - at) / (1500 - warm)).clip(0, 1), points, rng)


def stepped_schedule(points, rng):
    """The rate falls to a third, two or three times."""
    falls = rng.uniform(200, 1400, rng.integers(2, 4))
    return _in_time(3.0 ** -(np.arange(1500)[:, None] > falls).sum(axis=1), points, rng)


def _smooth(noise):
    def draw(points, rng):
        steps = evaluations(points, rng)
        return Drawn(steps, steps, height(rng) * _mixture(steps / 1500, rng) + noise(points, rng))

    return draw


def random_walk(points, rng):
    """Steps of a random walk whose standard deviation over the whole run is 1."""
    return np.cumsum(rng.standard_normal(points)) / np.sqrt(points / 3)


def moving_average(points, rng):
    """Every value shares its noise with the two before it."""
    drawn = rng.standard_normal(points + 2)
    return (drawn[2:] + drawn[1:-1] + drawn[:-2]) / np.sqrt(3)


def ceiling(points, rng):
    """An accuracy on 256 to 2,048 answers that nears 0.9 to 1."""
    steps, answers = evaluations(points, rng), int(rng.choice([256, 512, 2048]))
    right = rng.uniform(0.9, 1) * (1 - _mixture(steps / 1500, rng))
    return Drawn(steps, steps, rng.binomial(answers, right.clip(0, 1)) / answers)  # rounding may leave −1e-16


def epochs(points, rng):
    """The loss falls by 4 to 20 σ where each of two to five epochs begins, within a few steps."""
    steps = evaluations(points, rng)
    boundaries = 1500 / rng.uniform(2.2, 5.5) * np.arange(1, 6)
    boundaries = tuple(b for b in boundaries if b < 1500)
    falls = sum(rng.uniform(4, 20) / (1 + np.exp(-(steps - b) / 5)) for b in boundaries)
    values = abs(height(rng)) * _mixture(steps / 1500, rng) - falls + ar1(points, rng.uniform(0, 0.5), rng)
    return Drawn(steps, steps, values, boundaries=boundaries)


NULLS = {
    "linear schedule": linear_schedule,
    "stepped schedule": stepped_schedule,
    "heavy tails (t, 3 degrees)": _smooth(lambda points, rng: rng.standard_t(3, points) / np.sqrt(3)),
    "heavy tails (Laplace)": _smooth(lambda points, rng: rng.laplace(size=points) / np.sqrt(2)),
    "random walk": _smooth(random_walk),
    "moving average": _smooth(moving_average),
    "noise that grows": _smooth(lambda points, rng: rng.standard_normal(points) * np.geomspace(0.3, 2, points)),
    "accuracy near its ceiling": ceiling,
    "epochs": epochs,
}


def gompertz(steps, rng):
    """A step that begins suddenly and ends slowly, exp(−exp(−z)), and where half of it is done."""
    u, m, w = place(steps, rng)
    scale = w / 3.08  # from 10% to 90%, −log(−log 0.9) + log(−log 0.1) = 3.08
    return np.exp(-np.exp(-(u - m) / scale)), float(np.exp(m - scale * np.log(np.log(2))) - steps[1])


def straight(steps, rng):
    """A step that is a straight line in log steps, and its middle."""
    u, m, w = place(steps, rng)
    return np.clip((u - m) / (w / 0.8) + 0.5, 0, 1), float(np.exp(m) - steps[1])


_SHAPES = {"logistic": logistic, "sudden onset": gompertz, "straight": straight}
_UNDER = ("linear schedule", "heavy tails (t, 3 degrees)", "moving average", "noise that grows")
STEPS = {f"{null}, {shape}, 12 σ": stepped(NULLS[null], step, 12) for null in _UNDER for shape, step in _SHAPES.items()}
