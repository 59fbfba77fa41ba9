"""Finds transitions in curves over training: whether there are any, when, and how large.

A transition is a step that no mixture of exponentials explains (`mixture`), so no model with fixed features would be
expected to learn like this. When it happens is read off a monotone fit (`crossings`). This module takes plain arrays,
no models: a curve is steps and values.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import overload

import numpy as np
from jaxtyping import Float
from numpy.typing import ArrayLike

from circuitscope.analysis.phases.crossings import SHARES, crossings, monotone
from circuitscope.analysis.phases.mixture import EDGE, FLOOR, Candidate, Design, Grid
from circuitscope.errors import UserError

Array = np.ndarray

LIMIT = 19.0  # a transition has a larger statistic than this
FEWEST = 10  # a curve with fewer values is not judged
MOST = 3  # transitions looked for on one curve
SMALLEST = 0.05  # share of the curve's range that a transition must cover
_EARLY = 0.5  # a smooth curve that makes this share of its change before value number EDGE is not judged
_COEFFICIENTS = 6  # about as many does a fit use; for the freedom that is left to σ
_CLEAR = 6.0  # such a change counts if it is so many σ


@dataclass(frozen=True)
class Level:
    """A value that a curve reaches without the circuit that is looked for.

    A transition that ends there, or on the way there, is marked with the level's name.
    """

    name: str
    value: float
    slack: float = 0.0  # how far beyond the level a transition may end all the same, in units of the curve
    slack_share: float = 0.0  # the same, as a share of the transition

    def holds(self, size: float, after: float) -> bool:
        """Whether a transition of this size, after which the curve is at `after`, goes no further than the level."""
        beyond = after - self.value if size > 0 else self.value - after
        return bool(beyond <= max(self.slack, self.slack_share * abs(size)))


@dataclass(frozen=True)
class Transition:
    """One step in a curve. Onset, midpoint and end are where 10%, 50% and 90% of it are done."""

    onset: float
    midpoint: float
    end: float
    size: float  # after - before, without what the smooth baseline does
    low: float  # 95% interval of the midpoint
    high: float
    onset_low: float  # 95% interval of the onset
    onset_high: float
    end_high: float  # upper end of the 95% interval of the end
    statistic: float
    sigma: float  # standard deviation of the noise around the fit
    after: float = np.nan  # the fitted curve where the transition is done
    ends_at: str = ""  # the name of the level that it does not go beyond

    @property
    def steepness(self) -> float:
        """|size| / log(end / onset): how far the curve goes while the number of steps grows by a factor of e."""
        return float(abs(self.size) / max(np.log((self.end + 1) / (self.onset + 1)), 1e-9))


@dataclass(frozen=True)
class Transitions(Sequence[Transition]):
    """The transitions of one curve in order of step, and how it was judged."""

    found: tuple[Transition, ...]
    statistic: float  # of the strongest candidate; nan where there was none to look at
    judged: bool
    note: str

    @property
    def beyond(self) -> tuple[Transition, ...]:
        """Those that go beyond the level that a curve reaches without a circuit; all if there is no such level."""
        return tuple(t for t in self.found if not t.ends_at)

    @property
    def main(self) -> Transition | None:
        """The steepest transition of those that go beyond the level; a larger one may be a slow fall after it."""
        return max(self.beyond, key=lambda t: t.steepness, default=None)

    @overload
    def __getitem__(self, index: int) -> Transition: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Transition, ...]: ...
    def __getitem__(self, index: int | slice) -> Transition | tuple[Transition, ...]:
        return self.found[index]

    def __len__(self) -> int:
        return len(self.found)

    def __iter__(self) -> Iterator[Transition]:
        return iter(self.found)


def transitions(
    steps: ArrayLike,
    values: ArrayLike,
    *,
    clock: ArrayLike | None = None,
    repeats: ArrayLike | None = None,
    level: Level | None = None,
    seed: int = 0,
    draws: int = 200,
) -> Transitions:
    """Transitions of one curve.

    Args:
        steps: increasing, not negative.
        values: one value per step; values that are not finite are left out.
        clock: the sum of the learning rates up to each step, which is the time of gradient flow; by default the steps,
            which is right for a constant rate.
        repeats: [step, batch], the same curve for each evaluation batch or seed. The interval is then the wider of two:
            one from noise around the fit, and one from resampling the repeats.
        level: what the curve reaches without a circuit; transitions that go no further are marked.
        draws: how many random curves are drawn for the intervals.
    """
    t, y, at_time, reps = _curve(steps, values, clock, repeats)
    if len(t) < FEWEST:
        return Transitions((), np.nan, False, f"too few points to judge: {len(t)} where at least {FEWEST} are needed")
    spread = float(np.ptp(y))
    if spread == 0:
        return Transitions((), 0.0, True, "constant")
    grid = _grid(at_time.tobytes(), t.tobytes())
    rises = grid.design.alone(y / spread).max() < grid.design.alone(-y / spread).max()
    sign = -1.0 if rises else 1.0
    scaled = sign * y / spread
    taken, strongest, anywhere = _search(grid, scaled)
    if not taken:
        if why := _not_judged(grid, scaled, anywhere):
            return Transitions((), strongest, False, why)
        return Transitions((), strongest, True, "no transition")
    fit = _Fit(grid, scaled, taken)
    again = None if reps is None else sign * reps / spread
    found = []
    times = fit.times(t, again, draws, np.random.default_rng(seed))
    fitted = sign * spread * (scaled - fit.rest)
    for one, size, (at, spans) in zip(taken, fit.sizes, times, strict=True):
        (onset, midpoint, end), ((first, last), (low, high), (_, done)) = at.tolist(), spans.tolist()
        change = -sign * spread * size
        after = float(np.interp(end, t, fitted)) + (1 - SHARES[-1]) * change
        name = level.name if level is not None and level.holds(change, after) else ""
        noise = spread * fit.sigma
        found.append(
            Transition(onset, midpoint, end, change, low, high, first, last, done, one.statistic, noise, after, name)
        )
    found.sort(key=lambda item: item.midpoint)
    return Transitions(tuple(found), strongest, True, f"{len(found)} transition{'s' * (len(found) > 1)}")


@lru_cache(maxsize=8)
def _grid(clock: bytes, steps: bytes) -> Grid:
    return Grid(np.frombuffer(clock), np.frombuffer(steps))


def _curve(
    steps: ArrayLike, values: ArrayLike, clock: ArrayLike | None, repeats: ArrayLike | None
) -> tuple[Float[Array, " step"], Float[Array, " step"], Float[Array, " step"], Float[Array, "step batch"] | None]:
    """Steps, values, times and repeats where all are finite; times increase, be it by very little."""
    t, y = np.asarray(steps, dtype=float), np.asarray(values, dtype=float)
    if t.ndim != 1 or t.shape != y.shape:
        raise UserError(f"a curve has one value per step, got {t.shape} steps and {y.shape} values")
    if not np.isfinite(t).all() or (len(t) and t.min() < 0):
        raise UserError("steps must be finite and not negative")
    wrong = np.flatnonzero(np.diff(t) <= 0)
    if len(wrong):
        i = int(wrong[0])
        raise UserError(f"steps must increase: {t[i + 1]:g} comes after {t[i]:g}; sort them, with one value per step")
    times = t if clock is None else np.asarray(clock, dtype=float)
    if times.shape != t.shape or not np.isfinite(times).all() or (np.diff(times) < 0).any():
        raise UserError(f"clock must hold one time per step, never falling: expected {t.shape}, got {times.shape}")
    keep = np.isfinite(y)
    reps = None
    if repeats is not None:
        reps = np.asarray(repeats, dtype=float)
        if reps.ndim != 2 or len(reps) != len(t):
            raise UserError(f"repeats must be [step, batch] with {len(t)} steps, got {reps.shape}")
        keep &= np.isfinite(reps).all(axis=1)
        reps = reps[keep]
    t, times = t[keep], times[keep]
    if len(t):  # a learning rate of 0 stops the clock
        times = times + 1e-9 * max(float(np.ptp(times)), 1e-30) * (t - t[0]) / max(float(np.ptp(t)), 1e-30)
    return np.ascontiguousarray(t), y[keep], np.ascontiguousarray(times), reps


def _search(grid: Grid, y: Float[Array, " step"]) -> tuple[list[Candidate], float, Candidate]:
    """The transitions of a falling curve with range 1, the largest statistic, and the best sigmoid at any place."""
    taken: list[Candidate] = []
    strongest, anywhere = -np.inf, None
    while True:
        design = _with(grid, taken)
        best, free = grid.scan(y, taken, design)
        strongest, anywhere = max(strongest, best.statistic), anywhere or free
        if best.statistic <= LIMIT:
            return taken, strongest, anywhere
        if min(_Fit(grid, y, [*taken, best]).sizes) < SMALLEST:
            return taken, strongest, anywhere
        taken = [*taken, best]
        if len(taken) == MOST or grid.n < FEWEST + 2 * EDGE * len(taken):
            return taken, strongest, anywhere


def _window(grid: Grid, one: Candidate) -> slice:
    """The values around a transition: a width more on either side, and EDGE values at least."""
    first, last = np.searchsorted(grid.u, [one.midpoint - 1.5 * one.width, one.midpoint + 1.5 * one.width])
    middle = int(np.searchsorted(grid.u, one.midpoint))
    return slice(max(0, min(int(first), middle - EDGE)), max(int(last), middle + EDGE))


_SHIFTS, _STRETCHES = (-0.5, 0.0, 0.5), (0.5, 1.0)  # of the sigmoids that give a transition its shape, in widths


def _sigmoids(grid: Grid, one: Candidate) -> Float[Array, "step column"]:
    """Falls in and around the place of a transition: their mixtures have other shapes than a single sigmoid."""
    shift, stretch = (a.ravel() for a in np.meshgrid(_SHIFTS, _STRETCHES))
    return grid.falls(one.midpoint + shift * one.width, stretch * one.width).T


def _with(grid: Grid, taken: Sequence[Candidate]) -> Design:
    """The exponentials and the transitions found so far."""
    if not taken:
        return grid.design
    return Design(np.concatenate([grid.exponentials, *(_sigmoids(grid, one) for one in taken)], axis=1))


def _not_judged(grid: Grid, y: Float[Array, " step"], anywhere: Candidate) -> str:
    """Why a curve without a transition may have one all the same, or ""."""
    if anywhere.statistic > LIMIT:
        early = anywhere.midpoint < grid.u[grid.n // 2]
        where, instead = ("first", "evaluate more often") if early else ("last", "train longer or evaluate more often")
        return f"it turns too close to its {where} value to judge; {instead}"
    noise = int(grid.design.alone(y).argmax())
    fitted = grid.exponentials @ grid.design.coefficients(y, noise)
    change = float(fitted[0] - fitted[-1])
    early = float(fitted[0] - fitted[EDGE - 1])
    sigma = max(float((y - fitted).std()), FLOOR)
    if change > _CLEAR * sigma and early > _EARLY * change:
        share = f"{early / change:.0%} of its change"
        return f"{share} comes before value number {EDGE}, too early to judge; evaluate more often"
    return ""


class _Fit:
    """The baseline and the transitions of one falling curve with range 1."""

    def __init__(self, grid: Grid, y: Float[Array, " step"], taken: Sequence[Candidate]):
        self.y, self.design = y, _with(grid, taken)
        self.noise = int(self.design.alone(y).argmax())
        first, each = grid.exponentials.shape[1], len(_SHIFTS) * len(_STRETCHES)
        self.groups = [slice(first + i * each, first + (i + 1) * each) for i in range(len(taken))]
        self.windows = [_window(grid, one) for one in taken]
        self.falls, self.rest = self._split(y)
        self.sizes = [float(fall[0] - fall[-1]) for fall in self.falls]
        noise = self.design.parts[self.noise].white @ self.rest
        self.sigma = max(float(np.sqrt(noise @ noise / max(grid.n - _COEFFICIENTS, 1))), FLOOR)

    def _split(self, y: Float[Array, " step"]) -> tuple[list[Float[Array, " step"]], Float[Array, " step"]]:
        """What each transition does in the best fit to a curve, and what the fit leaves."""
        coefficients = self.design.coefficients(y, self.noise)
        rest = y - self.design.columns @ coefficients
        falls = [self.design.columns[:, group] @ coefficients[group] for group in self.groups]
        return falls, rest - self.design.constant(rest, self.noise)

    def times(
        self,
        steps: Float[Array, " step"],
        repeats: Float[Array, "step batch"] | None,
        draws: int,
        rng: np.random.Generator,
    ) -> list[tuple[Float[Array, " share"], Float[Array, "share 2"]]]:
        """For each transition the steps of 10%, 50% and 90%, with 95% intervals that reach to the steps around them.

        The drawn curves have the monotone shapes that were found, not those of sigmoids, and are fitted anew.
        """
        shaped = self.y - self.rest
        for fall, window in zip(self.falls, self.windows, strict=True):
            shaped[window] += (fall[0] - fall)[window] - monotone((fall[0] - fall - self.rest)[window])
        white = rng.standard_normal((len(steps), draws))
        noise = np.linalg.solve(self.design.parts[self.noise].whiten, white)
        drawn = list((shaped[:, None] + self.sigma * noise).T)
        samples = [drawn]
        if repeats is not None and repeats.shape[1] > 1:
            chosen = rng.integers(0, repeats.shape[1], (draws, repeats.shape[1]))
            samples.append(list(repeats[:, chosen].mean(axis=2).T))
        out = []
        here = self._crossings(steps, self.y)
        spread = [np.array([[c for c, _ in self._crossings(steps, curve)] for curve in sample]) for sample in samples]
        for i, (at, around) in enumerate(here):
            spans = np.array([np.quantile(s[:, i], [0.025, 0.975], axis=0).T for s in spread])
            low = np.minimum(np.minimum(spans[:, :, 0].min(axis=0), around[:, 0]), at)
            high = np.maximum(np.maximum(spans[:, :, 1].max(axis=0), around[:, 1]), at)
            out.append((at, np.stack([low, high], axis=1)))
        return out

    def _crossings(
        self, steps: Float[Array, " step"], y: Float[Array, " step"]
    ) -> list[tuple[Float[Array, " share"], Float[Array, "share 2"]]]:
        falls, rest = self._split(y)
        return [
            crossings(steps[window], (fall[0] - fall - rest)[window], float(fall[0] - fall[-1]))
            for fall, window in zip(falls, self.windows, strict=True)
        ]
