"""Curves to build the detector with: its threshold and its grids were chosen on these kinds, and on no others.

Every kind is a function (points, rng) → a curve without a transition, in units of σ, the standard deviation of its
noise. `stepped` adds a step. What is kept back for the final judgement is in held_out.py.
"""

import numpy as np
from curves import Drawn, ar1, evaluations, logistic


def _smooth(shape, noise):
    def draw(points, rng):
        steps = evaluations(points, rng)
        return Drawn(steps, steps, noise(points, rng) + _height(rng) * shape(steps / 1500, rng))

    return draw


def _height(rng):
    """How far a curve falls or rises, in σ."""
    return rng.choice([-1, 1]) * np.exp(rng.uniform(np.log(5), np.log(150)))


def _scale(rng):
    return np.exp(rng.uniform(np.log(0.02), np.log(1)))


SHAPES = {
    "constant": lambda x, rng: 0 * x,
    "linear": lambda x, rng: x,
    "exponential": lambda x, rng: np.exp(-x / _scale(rng)),
    "two exponentials": lambda x, rng: 0.6 * np.exp(-x / _scale(rng)) + 0.4 * np.exp(-x / _scale(rng)),
    "power law": lambda x, rng: (1 + x / _scale(rng)) ** -rng.uniform(0.3, 2),
    "stretched": lambda x, rng: np.exp(-((x / _scale(rng)) ** rng.uniform(0.4, 1))),
    "logarithm": lambda x, rng: np.log1p(x / _scale(rng)) / 3,
}
NOISES = {
    "ρ 0": lambda points, rng: ar1(points, 0, rng),
    "ρ 0.5": lambda points, rng: ar1(points, 0.5, rng),
    "ρ 0.8": lambda points, rng: ar1(points, 0.8, rng),
    "falling": lambda points, rng: ar1(points, 0.3, rng) * np.geomspace(2, 0.2, points),
}


def warmup(points, rng):
    """An exponential in the time of a schedule: a warmup of 2% to 20% of the run, then constant or half a cosine."""
    steps = evaluations(points, rng)
    warm = rng.uniform(0.02, 0.2) * 1500
    at = np.arange(1500)
    rate = np.minimum((at + 1) / warm, 1.0)
    if rng.random() < 0.5:
        rate = np.where(at < warm, rate, 0.5 * (1 + np.cos(np.pi * (at - warm) / (1500 - warm))))
    clock = np.interp(steps, np.arange(1501), np.concatenate([[0], np.cumsum(rate)]))
    shape = np.exp(-clock / clock[-1] / _scale(rng))
    return Drawn(steps, clock, _height(rng) * shape + ar1(points, rng.choice([0, 0.5]), rng))


def saturating(points, rng):
    """An accuracy on 512 answers that rises to 1: its noise vanishes."""
    steps = evaluations(points, rng)
    return Drawn(steps, steps, rng.binomial(512, 1 - np.exp(-steps / 1500 / _scale(rng))) / 512)


NULLS = {
    **{f"{a}, {b}": _smooth(shape, noise) for a, shape in SHAPES.items() for b, noise in NOISES.items()},
    "schedule": warmup,
    "accuracy rising to 1": saturating,
}


def _stepped(kind, size):
    def draw(points, rng):
        drawn = NULLS[kind](points, rng)
        rise, midpoint = logistic(drawn.steps, rng)
        falls = drawn.values[0] > drawn.values[-1]
        return Drawn(drawn.steps, drawn.clock, drawn.values + (-size if falls else size) * rise, midpoint)

    return draw


_UNDER_STEPS = (
    "constant, ρ 0",
    "constant, ρ 0.8",
    "exponential, ρ 0",
    "exponential, ρ 0.5",
    "two exponentials, ρ 0.5",
    "power law, ρ 0",
    "power law, ρ 0.8",
    "schedule",
)
STEPS = {f"{kind}, {size} σ": _stepped(kind, size) for size in (8, 12, 20) for kind in _UNDER_STEPS}
