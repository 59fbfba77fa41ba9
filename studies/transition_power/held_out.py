"""Curves that no part of the detector was built or calibrated with: they were drawn once, at the end, to judge it.

Every kind is a function (points, rng) → a curve, in units of σ. NULLS have no transition. In "epochs" the data repeats:
the training loss falls a little wherever an epoch begins, and only what is not marked as such a place is an alarm.
None of these schedules, noises, smooth shapes and steps is in development.py or held_out_first.py. Of the
kinds of epochs, the second and third were added when the first had led to a change of what is marked as an epoch, and
the last two when those had led to another.
"""

import numpy as np
from curves import Drawn, evaluations, height, place, stepped
from scipy.special import erf


def _smooth(x, rng):
    """A power law and an exponential, or a mixture of exponentials whose rates have a gamma distribution."""
    if rng.random() < 0.5:
        share, scale, time = rng.uniform(0.2, 0.8), np.exp(rng.uniform(np.log(0.01), np.log(0.5))), rng.uniform(0.05, 1)
        return share * (1 + x / scale) ** -rng.uniform(0.3, 1.5) + (1 - share) * np.exp(-x / time)
    rates = rng.gamma(rng.uniform(0.5, 2), np.exp(rng.uniform(0, 3)), 20)
    return np.exp(-np.outer(x, rates)).mean(axis=1)


def _in_time(rate, points, rng):
    """A smooth curve in the time that a rate makes, with noise that is shared a little by neighbours."""
    steps = evaluations(points, rng)
    clock = np.interp(steps, np.arange(1501), np.concatenate([[0], np.cumsum(rate)]))
    noise = correlated(rng.standard_normal(points), rng.uniform(0, 0.4))
    return Drawn(steps, clock, height(rng) * _smooth(clock / clock[-1], rng) + noise)


def inverse_root(points, rng):
    """A warmup of up to a third of the run, then one over the square root of the step."""
    at, warm = np.arange(1, 1501), rng.uniform(10, 500)
    return _in_time(np.minimum(at / warm, np.sqrt(warm / at)), points, rng)


def restarts(points, rng):
    """Two to four cosines, one after the other."""
    period = 1500 / rng.integers(2, 5)
    return _in_time(0.5 * (1 + np.cos(np.pi * (np.arange(1500) % period) / period)), points, rng)


def correlated(drawn, rho):
    """AR(1) noise with the same standard deviation from drawn numbers."""
    out = drawn.copy()
    for i in range(1, len(out)):
        out[i] = rho * out[i - 1] + np.sqrt(1 - rho**2) * out[i]
    return out


def heavy_and_correlated(points, rng):
    """t with 4 degrees, shared with the neighbours."""
    return correlated(rng.standard_t(4, points) / np.sqrt(2), 0.4)


def outliers(points, rng):
    """One value in twenty has noise four times as large."""
    size = np.where(rng.random(points) < 0.05, 4.0, 1.0)
    return size * rng.standard_normal(points) / np.sqrt(0.95 + 0.05 * 16)


def pink(points, rng):
    """Noise whose power falls as one over the frequency, with standard deviation 1."""
    frequency = np.fft.rfftfreq(4 * points)[1:]
    spectrum = rng.standard_normal((2, len(frequency))) / np.sqrt(frequency)
    noise = np.fft.irfft(np.concatenate([[0], spectrum[0] + 1j * spectrum[1]]), 4 * points)
    return (noise / noise.std())[:points]


def slow_and_fast(points, rng):
    """Half of the variance is that of a random walk, half is white."""
    walk = np.cumsum(rng.standard_normal(points)) / np.sqrt(points / 3)
    return (walk + rng.standard_normal(points)) / np.sqrt(2)


def uneven(points, rng):
    """Noise that is large in one stretch of the run and small in the others."""
    first = rng.integers(0, points // 2)
    size = np.full(points, 0.5)
    size[first : first + points // 2] = 1.3
    return size * rng.standard_normal(points)


def _with(noise):
    def draw(points, rng):
        steps = evaluations(points, rng)
        return Drawn(steps, steps, height(rng) * _smooth(steps / 1500, rng) + noise(points, rng))

    return draw


def from_chance(points, rng):
    """An accuracy on 300 to 3,000 answers that rises from 1/4 to 0.85 to 1."""
    steps, answers = evaluations(points, rng), int(rng.choice([300, 1000, 3000]))
    right = 0.25 + (rng.uniform(0.85, 1) - 0.25) * (1 - _smooth(steps / 1500, rng))
    return Drawn(steps, steps, rng.binomial(answers, right.clip(0, 1)) / answers)


def epochs(points, rng):
    """The loss falls by 4 to 20 σ in the few steps after each of two to four epochs begins, less in each later one."""
    steps = evaluations(points, rng)
    boundaries = tuple(b for b in 1500 / rng.uniform(2.2, 4.5) * np.arange(1, 5) if b < 1500)
    first = rng.uniform(4, 20)
    falls = sum(
        first * 0.7**i * np.where(steps > b, 1 - np.exp(-(steps - b) / 10), 0.0) for i, b in enumerate(boundaries)
    )
    values = abs(height(rng)) * _smooth(steps / 1500, rng) - falls + rng.standard_normal(points)
    return Drawn(steps, steps, values, boundaries=boundaries)


def _epochs(fall, count=(2.2, 4.5)):
    """Some epochs; `fall` says how far the loss has fallen so many steps after one began, from 0 to 1."""

    def draw(points, rng):
        steps = evaluations(points, rng)
        boundaries = tuple(b for b in 1500 / rng.uniform(*count) * np.arange(1, 10) if b < 1500)
        falls = sum(rng.uniform(4, 20) * fall(steps - b, rng) for b in boundaries)
        values = abs(height(rng)) * _smooth(steps / 1500, rng) - falls + rng.laplace(size=points) / np.sqrt(2)
        return Drawn(steps, steps, values, boundaries=boundaries)

    return draw


def _late(since, rng):
    """Nothing for up to 15 steps, then a straight line over as many as 40."""
    return np.clip((since - rng.uniform(0, 15)) / rng.uniform(5, 40), 0, 1)


def _bent(since, rng):
    """Slow at first and at the end, over some tens of steps: 1 − (1 + z) exp(−z)."""
    z = np.clip(since, 0, None) / rng.uniform(2, 12)
    return 1 - (1 + z) * np.exp(-z)


NULLS = {
    "inverse root schedule": inverse_root,
    "cosine with restarts": restarts,
    "heavy tails (t, 4 degrees), ρ 0.4": _with(heavy_and_correlated),
    "outliers": _with(outliers),
    "pink noise": _with(pink),
    "random walk and white noise": _with(slow_and_fast),
    "uneven noise": _with(uneven),
    "accuracy from chance": from_chance,
    "epochs": epochs,
    "epochs, at once": _epochs(lambda since, rng: (since > 0).astype(float)),
    "epochs, late": _epochs(_late),
    "epochs, many": _epochs(_bent, count=(4.5, 9)),
    "epochs, bent": _epochs(_bent),
}


def normal(steps, rng):
    """The integral of a bell, and its middle."""
    u, m, w = place(steps, rng)
    return 0.5 * (1 + erf(1.8124 * (u - m) / w)), float(np.exp(m) - steps[1])  # from 10% to 90%, 2 · 0.9062


def sudden_end(steps, rng):
    """A step that begins slowly and ends suddenly, 1 − exp(−exp(z)), and where half of it is done."""
    u, m, w = place(steps, rng)
    scale = w / 3.08
    return 1 - np.exp(-np.exp((u - m) / scale)), float(np.exp(m + scale * np.log(np.log(2))) - steps[1])


def two_stairs(steps, rng):
    """Two logistic steps of half the size, close together, and the middle between them."""
    u, m, w = place(steps, rng)
    each = 2 * np.log(9) / (0.4 * w)
    halves = [1 / (1 + np.exp(-each * (u - m - side * w))) for side in (-0.3, 0.3)]
    return np.mean(halves, axis=0), float(np.exp(m) - steps[1])


_SHAPES = {"normal": normal, "sudden end": sudden_end, "two stairs": two_stairs}
_UNDER = ("inverse root schedule", "heavy tails (t, 4 degrees), ρ 0.4", "outliers", "uneven noise")
STEPS = {f"{null}, {shape}, 12 σ": stepped(NULLS[null], step, 12) for null in _UNDER for shape, step in _SHAPES.items()}
