"""Finds transitions in curves over training: whether there are any, when, and how large.

It also says what the loss bump did to accuracy, and which transition came first. It takes plain arrays, no models: a
curve is steps and values. `evidence` weighs the evidence for a transition; `simulation` gives the critical values.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Literal, overload

import numpy as np
from jaxtyping import Float
from numpy.typing import ArrayLike

from circuitscope.analysis.phases.evidence import FLOOR, Grid, Scan, baselines, sigmoid
from circuitscope.errors import UserError, shown, unknown

Array = np.ndarray

FEWEST = 8  # a curve with fewer points is not judged
RESOLVED = 2  # with fewer points inside a transition, its interval reaches to the points around it
MOST = 3  # transitions looked for on one curve
HOPE = 4.0  # a first candidate that misses the critical evidence by less than this is kept for a test of two
SMALLEST = 0.05  # share of the curve's range that a transition must cover

# 97% quantile of the evidence on the worst kind of curve without a transition, by number of points.
# Printed by: python -m circuitscope.analysis.phases.simulation --calibrate
CRITICAL_POINTS = (8, 12, 16, 20, 30, 45, 60, 100, 200)
CRITICAL_VALUES = (0.96, 0.55, 0.69, 0.70, 0.98, 0.24, 0.68, -0.30, -0.62)


@lru_cache(maxsize=4)
def _grid(steps: bytes) -> Grid:
    return Grid(np.frombuffer(steps))


@lru_cache(maxsize=4)
def _fine(steps: bytes) -> Float[Array, "base step"]:
    """A fine grid of baselines, with mean 0 and mean square 1, from which a fit chooses one."""
    rows = np.unique(baselines(np.frombuffer(steps), fine=True).shape, axis=0)
    rows = rows[np.ptp(rows, axis=1) > 0]
    rows = rows - rows.mean(axis=1, keepdims=True)
    rows = rows / np.sqrt((rows**2).mean(axis=1, keepdims=True))
    return np.concatenate([np.zeros((1, rows.shape[1])), rows])


def critical(points: int) -> float:
    """The evidence above which a curve with this number of points has a transition."""
    return float(np.interp(np.log(points), np.log(CRITICAL_POINTS), CRITICAL_VALUES))


@dataclass(frozen=True)
class Transition:
    """One step in a curve. Onset and end are where 10% and 90% of it are done."""

    onset: float
    midpoint: float
    end: float
    size: float  # after - before, net of the baseline
    low: float  # 95% interval of the midpoint
    high: float
    onset_low: float  # 95% interval of the onset
    onset_high: float
    evidence: float
    sigma: float  # marginal standard deviation of the noise around the fit


@dataclass(frozen=True)
class Transitions(Sequence[Transition]):
    """The transitions of one curve in order of step, and how it was judged."""

    found: tuple[Transition, ...]
    evidence: float  # of the strongest candidate; nan where the curve was not judged
    critical: float
    note: str

    @property
    def judged(self) -> bool:
        return bool(np.isfinite(self.evidence))

    @property
    def main(self) -> Transition | None:
        """The largest transition."""
        return max(self.found, key=lambda t: abs(t.size), default=None)

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
    steps: ArrayLike, values: ArrayLike, *, repeats: ArrayLike | None = None, seed: int = 0, draws: int = 200
) -> Transitions:
    """Transitions of one curve.

    Args:
        steps: increasing, not negative.
        values: one value per step; values that are not finite are left out.
        repeats: [step, batch], the same curve for each evaluation batch or seed. The interval is then the wider of two:
            one from noise around the fit, and one from resampling the repeats.
        draws: how many random curves are drawn for the intervals.
    """
    t, y, reps = _curve(steps, values, repeats)
    n = len(t)
    if n < FEWEST:
        return Transitions((), np.nan, np.nan, f"too few points to judge: {n} where at least {FEWEST} are needed")
    grid, limit = _grid(t.tobytes()), critical(n)
    if np.ptp(y) == 0:
        return Transitions((), -np.inf, limit, "constant")
    scan = grid.scan(y[:, None])
    strongest = float(scan.evidence[0])
    shapes, evidences, noise = search(grid, y, scan)
    if not shapes:
        return Transitions((), strongest, limit, "no transition")
    fit = _Fit(grid, y, noise, shapes)
    spans = fit.intervals(reps, draws, np.random.default_rng(seed))
    found = []
    for (m, w), size, evidence, span in zip(fit.shapes, fit.sizes, evidences, spans, strict=True):
        places = np.exp([m - w / 2, m, m + w / 2, *span]) - grid.s0
        onset, mid, end, low, high, first, last = (float(p) for p in places)
        low, high, first, last = min(low, mid), max(high, mid), min(first, onset), max(last, onset)
        if ((t > onset) & (t < end)).sum() < RESOLVED:  # it is only known to lie between the points around it
            before, after = float(t[t <= onset].max(initial=t[0])), float(t[t >= end].min(initial=t[-1]))
            low, high, first, last = min(low, before), max(high, after), min(first, before), max(last, after)
        found.append(Transition(onset, mid, end, float(size), low, high, first, last, evidence, fit.sigma))
    found.sort(key=lambda item: item.midpoint)
    return Transitions(tuple(found), strongest, limit, f"{len(found)} transition{'s' * (len(found) > 1)}")


def search(
    grid: Grid, values: Float[Array, " step"], scan: Scan, curve: int = 0
) -> tuple[list[tuple[float, float]], list[float], int]:
    """Transitions (midpoint, width) of one curve, the evidence of each, and the noise; `scan` has the first candidate.

    The search finds one transition after another, and tests each beside those before it. Two steps hide each other:
    tested alone, each looks like noise that wanders. So a first candidate that just misses the critical evidence is
    kept for one more test; both are accepted if the second has the critical evidence and both together have twice that.
    """
    limit, spread = critical(grid.n), float(np.ptp(values))
    accepted: tuple[list[tuple[float, float]], list[float], int] = ([], [], int(scan.noise[curve]))
    shapes: list[tuple[float, float]] = []
    evidences: list[float] = []
    while True:
        evidence, noise = float(scan.evidence[curve]), int(scan.noise[curve])
        evidences = [*evidences, evidence]
        enough = evidence > limit and sum(evidences) > limit * len(evidences)
        hopeful = len(evidences) == 1 and evidence > limit - HOPE
        if not (enough or hopeful):
            return accepted
        fit = _Fit(grid, values, noise, [*shapes, (float(scan.midpoint[curve]), float(scan.width[curve]))])
        if np.abs(fit.sizes).min() < SMALLEST * spread:
            return accepted
        shapes = fit.shapes
        if enough:
            accepted = (shapes, evidences, noise)
        if len(shapes) == MOST or grid.n < FEWEST + 4 * len(shapes):
            return accepted
        fixed = np.concatenate([_tangent(grid, m, w) for m, w in shapes], axis=1)
        scan, curve = grid.scan(values[:, None], fixed, shapes, like=noise), 0


def _curve(
    steps: ArrayLike, values: ArrayLike, repeats: ArrayLike | None
) -> tuple[Float[Array, " step"], Float[Array, " step"], Float[Array, "step batch"] | None]:
    t, y = np.asarray(steps, dtype=float), np.asarray(values, dtype=float)
    if t.ndim != 1 or t.shape != y.shape:
        raise UserError(f"a curve has one value per step, got {t.shape} steps and {y.shape} values")
    if not np.isfinite(t).all() or (len(t) and t.min() < 0):
        raise UserError("steps must be finite and not negative")
    wrong = np.flatnonzero(np.diff(t) <= 0)
    if len(wrong):
        i = int(wrong[0])
        raise UserError(f"steps must increase: {t[i + 1]:g} comes after {t[i]:g}; sort them, with one value per step")
    keep = np.isfinite(y)
    reps = None
    if repeats is not None:
        reps = np.asarray(repeats, dtype=float)
        if reps.ndim != 2 or len(reps) != len(t):
            raise UserError(f"repeats must be [step, batch] with {len(t)} steps, got {reps.shape}")
        keep &= np.isfinite(reps).all(axis=1)
        reps = reps[keep]
    return np.ascontiguousarray(t[keep]), y[keep], reps


def _tangent(grid: Grid, midpoint: float, width: float) -> Float[Array, "step 3"]:
    """A sigmoid and its derivatives in midpoint and log width: what a slightly different sigmoid would add."""
    h = 0.05
    m = midpoint + width * h * np.array([0, 1, -1, 0, 0])
    w = width * np.exp(h * np.array([0, 0, 0, 1, -1]))
    s = sigmoid(grid.u, m, w)
    return np.stack([s[0], (s[1] - s[2]) / (2 * h), (s[3] - s[4]) / (2 * h)], axis=1)


class _Fit:
    """The baseline and sigmoids of one curve, with midpoints and widths refined and the kind of noise fixed."""

    def __init__(self, grid: Grid, values: Float[Array, " step"], noise: int, shapes: Sequence[tuple[float, float]]):
        self.grid, self.noise, self.shapes = grid, noise, list(shapes)
        self.whiten = grid.whitening[noise][0]
        self.bases = _fine(grid.steps.tobytes())
        y = values[:, None]
        self.base = self._baseline(y)
        for _ in range(2):
            for i in range(len(self.shapes)):
                self._refine(i, y)
            self.base = self._baseline(y)
        design = np.concatenate([self._columns(), self._sigmoids()], axis=1)
        coefficients = np.linalg.lstsq(self.whiten @ design, self.whiten @ values, rcond=None)[0]
        self.fitted = design @ coefficients
        self.sizes = coefficients[-len(self.shapes) :]
        rest = self.whiten @ (values - self.fitted)
        freedom = max(grid.n - design.shape[1], 1)
        self.sigma = max(float(np.sqrt((rest**2).sum() / freedom)), FLOOR * float(np.ptp(values)))

    def _sigmoids(self, but: int | None = None) -> Float[Array, "step sigmoid"]:
        kept = np.array([s for i, s in enumerate(self.shapes) if i != but]).reshape(-1, 2)
        return np.asarray(sigmoid(self.grid.u, kept[:, 0], kept[:, 1]).T)

    def _columns(self) -> Float[Array, "step column"]:
        one = np.ones((self.grid.n, 1))
        base = self.bases[self.base][:, None]
        return one if self.base == 0 else np.concatenate([one, base], axis=1)

    def _gain(
        self, columns: Float[Array, "step column"], rows: Float[Array, "row step"], values: Float[Array, "step curve"]
    ) -> Float[Array, "row curve"]:
        """How much the sum of squares falls when a row joins the columns."""
        q = np.linalg.qr(self.whiten @ columns)[0]
        s = rows @ self.whiten.T
        whole = (s**2).sum(1)
        s = s - (s @ q) @ q.T
        length = (s**2).sum(1)
        usable = length > 1e-6 * whole + 1e-15
        inverse = np.where(usable, 1 / np.where(usable, length, 1.0), 0.0)
        return np.asarray(inverse[:, None] * (s @ (self.whiten @ values)) ** 2)

    def _baseline(self, y: Float[Array, "step 1"]) -> int:
        columns = np.concatenate([np.ones((self.grid.n, 1)), self._sigmoids()], axis=1)
        gain = self._gain(columns, self.bases, y)[:, 0]
        best = int(gain.argmax())
        q = np.linalg.qr(self.whiten @ columns)[0]
        z = self.whiten @ y[:, 0]
        rest = float(((z - q @ (q.T @ z)) ** 2).sum())
        left = max(rest - float(gain[best]), self.grid.n * (FLOOR * float(np.ptp(y))) ** 2)
        return best if self.grid.n * np.log(max(rest, left) / left) > np.log(self.grid.n) * 2 else 0

    def _narrowest(self, midpoint: Float[Array, " shape"]) -> Float[Array, " shape"]:
        gaps = np.diff(self.grid.u)
        i = np.clip(np.searchsorted(self.grid.u, midpoint, side="right") - 1, 0, len(gaps) - 1)
        return np.asarray(np.minimum(gaps[i], self.grid.widest))

    def _candidates(
        self, i: int, midpoints: Float[Array, " midpoint"], widths: Float[Array, " width"]
    ) -> tuple[Float[Array, " shape"], Float[Array, " shape"]]:
        m, w = (a.ravel() for a in np.meshgrid(midpoints, widths, indexing="ij"))
        w = np.clip(w, self._narrowest(m), self.grid.widest)
        others = [s for k, s in enumerate(self.shapes) if k != i]
        ok = self.grid.allowed(m, w, others)
        return np.append(m[ok], self.shapes[i][0]), np.append(w[ok], self.shapes[i][1])

    def _refine(self, i: int, y: Float[Array, "step 1"]) -> None:
        others = np.concatenate([self._columns(), self._sigmoids(but=i)], axis=1)
        m, w = self.shapes[i]
        reach, factor = max(w / 2, float(self._narrowest(np.array([m]))[0])), 2.0
        for _ in range(5):
            ms, ws = self._candidates(i, m + reach * np.linspace(-1, 1, 9), w * factor ** np.linspace(-1, 1, 7))
            best = int(self._gain(others, sigmoid(self.grid.u, ms, ws), y)[:, 0].argmax())
            m, w = float(ms[best]), float(ws[best])
            self.shapes[i] = (m, w)
            reach, factor = reach / 2.5, factor**0.5

    def intervals(
        self, repeats: Float[Array, "step batch"] | None, draws: int, rng: np.random.Generator
    ) -> list[tuple[float, float, float, float]]:
        """95% intervals of midpoint and onset, on the log-step axis, of every transition."""
        drawn = [self.fitted[:, None] + self.sigma * self.grid.draw(self.noise, draws, rng)]
        if repeats is not None and repeats.shape[1] > 1:
            chosen = rng.integers(0, repeats.shape[1], (draws, repeats.shape[1]))
            drawn.append(repeats[:, chosen].mean(axis=2))
        spans = []
        for i, (m, w) in enumerate(self.shapes):
            reach = 3 * max(w / 2, float(self._narrowest(np.array([m]))[0]))
            ms, ws = self._candidates(i, m + reach * np.linspace(-1, 1, 121), w * 2.0 ** np.arange(-2, 2.25, 0.25))
            others = np.concatenate([self._columns(), self._sigmoids(but=i)], axis=1)
            rows = sigmoid(self.grid.u, ms, ws)
            low, high, first, last = np.inf, -np.inf, np.inf, -np.inf
            for curves in drawn:
                best = self._gain(others, rows, curves).argmax(0)
                a, b = np.quantile(ms[best], [0.025, 0.975])
                c, d = np.quantile(ms[best] - ws[best] / 2, [0.025, 0.975])
                low, high, first, last = min(low, a), max(high, b), min(first, c), max(last, d)
            spans.append((float(low), float(high), float(first), float(last)))
        return spans


@dataclass(frozen=True)
class Verdict:
    """What the loss bump did to accuracy."""

    kind: Literal["bump with accuracy", "bump without accuracy", "smooth", "not judged"]
    sentence: str
    drop: Transition | None  # the largest fall of the loss
    before: float  # accuracy before the drop's onset, nan without a drop
    after: float  # highest accuracy held after the drop's end


def verdict(
    steps: ArrayLike,
    loss: ArrayLike,
    accuracy: ArrayLike,
    chance: float,
    *,
    found: Transitions | None = None,
) -> Verdict:
    """Is there a bump in the loss, and does accuracy then rise above that of answering with any value of the context?

    "Without accuracy" means that after the largest fall of the loss accuracy stays at or below chance + 0.02. The
    accuracy that counts is the largest median of three evaluations in a row, so that one lucky evaluation does not.

    Args:
        chance: the accuracy of answering with any value of the context; 0 if the context offers none.
        found: the transitions of the loss, if they are known already.
    """
    if not 0 <= chance <= 1:
        raise UserError(f"chance is an accuracy between 0 and 1, got {shown(chance)}")
    if found is None:
        found = transitions(steps, loss)
    t, acc = np.asarray(steps, dtype=float), np.asarray(accuracy, dtype=float)
    if acc.shape != t.shape:
        raise UserError(f"accuracy must have one value per step: expected {t.shape}, got {acc.shape}")
    if not found.judged:
        return Verdict("not judged", f"not judged: the loss has {found.note}", None, np.nan, np.nan)
    drop = max((x for x in found if x.size < 0), key=lambda x: -x.size, default=None)
    if drop is None:
        return Verdict("smooth", f"no fall of the loss stands out ({found.note})", None, np.nan, np.nan)
    finite = np.isfinite(acc)
    earlier, later = acc[finite & (t <= drop.onset)], acc[finite & (t >= drop.end)]
    if not len(later):
        return Verdict("not judged", f"no accuracy after step {drop.end:.0f}", drop, np.nan, np.nan)
    before = float(np.median(earlier[-3:])) if len(earlier) else np.nan
    held = [float(np.median(later[i : i + 3])) for i in range(max(len(later) - 2, 1))]
    after = max(held)
    kind: Literal["bump with accuracy", "bump without accuracy"] = (
        "bump without accuracy" if after <= chance + 0.02 else "bump with accuracy"
    )
    sentence = (
        f"{kind}: loss falls by {-drop.size:.3g} around step {drop.midpoint:.0f} ({drop.low:.0f} to {drop.high:.0f}); "
        f"accuracy {before:.1%} before, {after:.1%} after"
        + (f"; any value of the context gives {chance:.1%}" if chance else "")
    )
    return Verdict(kind, sentence, drop, before, after)


@dataclass(frozen=True)
class Event:
    name: str
    step: float
    low: float
    high: float


@dataclass(frozen=True)
class Lag:
    """The time from one event to a later one, in steps, with a 95% interval."""

    first: str
    second: str
    steps: float
    low: float
    high: float
    distinguishable: bool  # the two events' intervals do not meet

    def __str__(self) -> str:
        if not self.distinguishable:
            return f"{self.first}, {self.second}: not distinguishable"
        return f"{self.first}, then {self.second}: {self.steps:.0f} steps later ({self.low:.0f} to {self.high:.0f})"


@dataclass(frozen=True)
class Order:
    events: tuple[Event, ...]  # by step
    lags: tuple[Lag, ...]  # of every pair, earlier first
    absent: tuple[str, ...]  # curves without a transition

    def __str__(self) -> str:
        together = {(lag.first, lag.second): lag for lag in self.lags}
        lines = [str(together[a.name, b.name]) for a, b in pairwise(self.events)]
        return "\n".join(lines + [f"{name}: no transition" for name in self.absent])


def order(curves: Mapping[str, Transitions], at: Literal["onset", "midpoint"] = "onset") -> Order:
    """What happened first: the main transition of each named curve, by onset or midpoint.

    A lag's interval combines the intervals of its two events, which are taken to be independent:
    (b - a) - √((b - b_low)² + (a_high - a)²) to (b - a) + √((b_high - b)² + (a - a_low)²).
    """
    if at not in ("onset", "midpoint"):
        raise unknown("point of a transition", at, ("onset", "midpoint"))
    events = []
    for name, found in curves.items():
        main = found.main
        if main is None:
            continue
        span = (main.onset, main.onset_low, main.onset_high) if at == "onset" else (main.midpoint, main.low, main.high)
        events.append(Event(name, *span))
    events.sort(key=lambda event: event.step)
    lags = []
    for i, a in enumerate(events):
        for b in events[i + 1 :]:
            lag = b.step - a.step
            down, up = np.hypot(b.step - b.low, a.high - a.step), np.hypot(b.high - b.step, a.step - a.low)
            lags.append(Lag(a.name, b.name, lag, float(lag - down), float(lag + up), bool(a.high < b.low)))
    present = {event.name for event in events}
    return Order(tuple(events), tuple(lags), tuple(name for name in curves if name not in present))
