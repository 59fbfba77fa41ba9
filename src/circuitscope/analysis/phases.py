"""Transitions in curves over training: whether, when, how large; what the loss bump did to accuracy; what came first.

Plain arrays in, no models: a curve is steps and values. The critical values come from `phase_simulation`.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Literal, overload

import numpy as np
from jaxtyping import Bool, Float, Int
from numpy.typing import ArrayLike

from circuitscope.errors import UserError, shown, unknown

Array = np.ndarray

FEWEST = 8  # points below which a curve is not judged
EDGE = 3  # evaluations wanted before the onset and after the end
WIDEST = np.log(4.0)  # end / onset of a transition is at most 4, and at most 0.4 of the curve's log-step range
WIDEST_SHARE = 0.4
RESOLVED = 2  # points inside a transition below which its interval reaches to the points around it
MOST = 3  # transitions looked for on one curve
RHOS = (0.0, 0.2, 0.4, 0.6, 0.75, 0.85, 0.93)
TRENDS = (
    0.0,
    np.log(10.0),
    np.log(100.0),
    -np.log(10.0),
)  # noise even; 10 or 100 times smaller at the end; 10 times larger
FLOOR = 3e-3  # noise is never taken to be below this share of the curve's range
SIZE_PRIOR = 10.0  # spread of sizes, in sigma, that the penalty of a sigmoid supposes
SMALLEST = 0.05  # share of the curve's range that a transition must cover
LOGIT_SPAN = 2 * np.log(9.0)  # from 10% to 90% of a logistic function

# 97% quantile of the evidence on the worst kind of curve without a transition, by number of points.
# Printed by: python -m circuitscope.analysis.phase_simulation --calibrate
CRITICAL_POINTS = (8, 12, 16, 20, 30, 40, 60, 100)
CRITICAL_VALUES = (12.09, 14.43, 12.25, 13.36, 14.80, 13.73, 14.80, 16.22)


def axis(steps: Float[Array, " step"]) -> tuple[Float[Array, " step"], float]:
    """u = log(step + s0) and s0: the first positive step where the curve starts at step 0, else 0."""
    s0 = float(steps[steps > 0][0]) if steps[0] <= 0 else 0.0
    return np.log(steps + s0), s0


def sigmoid(
    u: Float[Array, " step"], midpoint: Float[Array, " shape"], width: Float[Array, " shape"]
) -> Float[Array, "shape step"]:
    """1 / (1 + exp(-2 ln 9 (u - m) / w)): from 10% to 90% between m - w/2 and m + w/2."""
    z = LOGIT_SPAN * (u[None] - midpoint[:, None]) / width[:, None]
    return np.asarray(0.5 * (1 + np.tanh(z / 2)))


def baselines(steps: Float[Array, " step"], fine: bool) -> Float[Array, "base step"]:
    """Every curve without a transition, up to offset and factor; the first row is the constant.

    1, x, log(step + s0), exp(-x / tau), log(x + s), (1 + x / s)^-a with x = step - first step. The constants tau and s
    run from a fifth of the first interval to twice the range, a from 1/4 to 4. Rows are centred, with mean square 1.
    """
    x = steps - steps[0]
    low, high = np.log(0.2 * x[1]), np.log(2 * x[-1])
    taus = np.exp(np.linspace(low, high, 100 if fine else 25))[:, None]
    s = np.exp(np.linspace(low, high, 40 if fine else 10))[:, None]
    powers = (0.25, 0.35, 0.5, 0.7, 1.0, 1.4, 2.0, 2.8, 4.0) if fine else (0.5, 1.0, 2.0)
    rows = [x[None], axis(steps)[0][None], np.exp(-x / taus), np.log(x + s), *[(1 + x / s) ** -a for a in powers]]
    shapes = np.concatenate(rows)
    shapes -= shapes.mean(axis=1, keepdims=True)
    shapes /= np.sqrt((shapes**2).mean(axis=1, keepdims=True))
    return np.concatenate([np.zeros((1, len(x))), shapes])


class Grid:
    """All shapes that are compared on one set of steps: noise, baselines, sigmoids."""

    def __init__(self, steps: Float[Array, " step"]):
        n = len(steps)
        self.steps, self.n = steps, n
        self.u, self.s0 = axis(steps)
        gaps = np.diff(self.u)
        self.range = float(self.u[-1] - self.u[0])
        self.widest = min(WIDEST, WIDEST_SHARE * self.range)
        self.base = {False: baselines(steps, fine=True), True: baselines(steps, fine=False)}
        within = np.unique(np.linspace(0, n - 2, min(n - 1, 80)).astype(int))
        midpoints = np.concatenate([self.u[within] + part * gaps[within] for part in (0.25, 0.75)])
        gap = np.concatenate([gaps[within]] * 2)
        widths = np.minimum(gap, self.widest)[:, None] ** np.linspace(1, 0, 4) * self.widest ** np.linspace(0, 1, 4)
        m, w = np.repeat(midpoints, 4), widths.ravel()
        ok = self.allowed(m, w)
        self.midpoint, self.width = m[ok], w[ok]
        self.sigmoid = sigmoid(self.u, self.midpoint, self.width)
        self.noise = [(rho, trend) for trend in TRENDS for rho in RHOS]
        self.whitening = [self._whitening(rho, trend) for rho, trend in self.noise]
        self.whitened = [
            ({coarse: base @ w.T for coarse, base in self.base.items()}, self.sigmoid @ w.T) for w, _ in self.whitening
        ]

    def allowed(
        self,
        midpoint: Float[Array, " shape"],
        width: Float[Array, " shape"],
        taken: Sequence[tuple[float, float]] = (),
    ) -> Bool[Array, " shape"]:
        """Not too wide, and with EDGE evaluations before, after, and between it and those taken (midpoint, width)."""
        before = np.searchsorted(self.u, midpoint - width / 2, side="right")
        after = np.searchsorted(self.u, midpoint + width / 2, side="left")
        ok = (before >= EDGE) & (self.n - after >= EDGE) & (width <= self.widest * (1 + 1e-9))
        for m, w in taken:
            first = np.searchsorted(self.u, m - w / 2, side="right")
            last = np.searchsorted(self.u, m + w / 2, side="left")
            ok &= (first - after >= EDGE) | (before - last >= EDGE)
        return np.asarray(ok)

    def deviation(self, trend: float) -> Float[Array, " step"]:
        """Standard deviation of the noise at each point, in units of sigma (mean square 1)."""
        sd = np.exp(-trend * (self.u - self.u[0]) / self.range)
        return np.asarray(sd / np.sqrt((sd**2).mean()))

    def _whitening(self, rho: float, trend: float) -> tuple[Float[Array, "step step"], float]:
        """W with W V Wᵀ = 1 for the correlation matrix V of AR(1) noise, and log |V|."""
        n, sd = self.n, self.deviation(trend)
        w = np.eye(n)
        i = np.arange(1, n)
        w[i, i], w[i, i - 1] = 1 / np.sqrt(1 - rho**2), -rho / np.sqrt(1 - rho**2)
        return w / sd[None, :], (n - 1) * float(np.log(1 - rho**2)) + 2 * float(np.log(sd).sum())

    def draw(self, noise: int, curves: int, rng: np.random.Generator) -> Float[Array, "step curve"]:
        """Noise with marginal standard deviation 1."""
        return np.linalg.solve(self.whitening[noise][0], rng.standard_normal((self.n, curves)))

    def scan(
        self,
        values: Float[Array, "step curve"],
        fixed: Float[Array, "step column"] | None = None,
        taken: Sequence[tuple[float, float]] = (),
    ) -> "Scan":
        """Best baseline and best baseline + sigmoid of each curve, over all noises.

        For noise with correlation V, a design X with p columns and S = (y - X b)ᵀ V⁻¹ (y - X b), the score is the
        likelihood with b and sigma integrated out,

            l = - ½ log |V| - ½ log |Xᵀ V⁻¹ X| - ½ (n - p) log S,

        where the prior of a baseline's factor is as wide as the curve's range and that of a sigmoid's size
        SIZE_PRIOR sigma. The evidence is 2 (max l with a sigmoid - max l without). `fixed` are columns that both have;
        a sigmoid with fewer than EDGE evaluations between it and one of the `taken` (midpoint, width) is left out.
        """
        free = self.allowed(self.midpoint, self.width, taken)
        n, curves = values.shape
        spread = np.maximum(np.ptp(values, axis=0), 1e-300)
        y = (values - values.mean(0)) / spread
        floor = n * FLOOR**2
        null, best = np.full(curves, -np.inf), np.full(curves, -np.inf)
        where = np.zeros((3, curves), dtype=int)
        always = np.ones((n, 1)) if fixed is None else np.concatenate([np.ones((n, 1)), fixed], axis=1)
        for k, (w, log_det) in enumerate(self.whitening):
            q0, r = np.linalg.qr(w @ always)
            z = w @ y
            z = z - q0 @ (q0.T @ z)
            square = (z**2).sum(0)
            common = -0.5 * log_det - np.log(np.abs(np.diag(r))).sum()
            scores, rests, directions, freedom = {}, {}, {}, {}
            for coarse in (False, True):
                g = self.whitened[k][0][coarse]
                size = np.linalg.norm(g, axis=1)
                g = g - (g @ q0) @ q0.T
                norm = np.linalg.norm(g, axis=1)
                alive = norm > 1e-6 * size
                alive[0] = False
                q = np.where(alive[:, None], g / np.maximum(norm, 1e-300)[:, None], 0.0)
                p = always.shape[1] + alive
                rest = np.maximum(square[None] - (q @ z) ** 2, 0) + floor
                penalty = np.where(alive, 0.5 * np.log(2 * np.pi) - np.log(np.where(alive, norm, 1.0)), 0.0)
                scores[coarse] = common + penalty[:, None] - 0.5 * (n - p)[:, None] * np.log(rest)
                rests[coarse], directions[coarse], freedom[coarse] = rest, q, n - p
            null = np.maximum(null, scores[False].max(0))
            q, rest, df = directions[True], rests[True], freedom[True]
            s = self.whitened[k][1]
            s = s - (s @ q0) @ q0.T
            along = q @ s.T
            length = (s**2).sum(1)[None] - along**2
            usable = free[None] & (length > 1e-3 * (s**2).sum(1)[None] + 1e-12)
            inverse = np.where(usable, 1 / np.where(usable, length, 1.0), 0.0)
            price = np.log(np.where(usable, 1 + SIZE_PRIOR**2 * length, np.inf).astype(np.float32))
            cost = np.exp(price / df[:, None].astype(np.float32))
            sz, qz = (s @ z).astype(np.float32), (q @ z).astype(np.float32)
            along, inverse, less = (a.astype(np.float32) for a in (along, inverse, 1 / rest))
            for start in range(0, curves, 32):
                part = slice(start, start + 32)
                left = sz[None, :, part] - along[:, :, None] * qz[:, None, part]
                left = np.square(left, out=left)
                left *= -inverse[:, :, None]
                left *= less[:, None, part]
                left += 1
                np.maximum(left, np.float32(floor) * less[:, None, part], out=left)
                left *= cost[:, :, None]
                c = left.argmin(1)
                low = np.take_along_axis(left, c[:, None], 1)[:, 0]
                total = scores[True][:, part] - 0.5 * df[:, None] * np.log(low)
                j = total.argmax(0)
                b = np.arange(total.shape[1])
                better = total[j, b] > best[part]
                best[part] = np.where(better, total[j, b], best[part])
                where[:, part] = np.where(better, np.stack([np.full_like(j, k), j, c[j, b]]), where[:, part])
        return Scan(2 * (best - null), where[0], where[1], where[2])


@dataclass(frozen=True)
class Scan:
    evidence: Float[Array, " curve"]
    noise: Int[Array, " curve"]
    base: Int[Array, " curve"]
    shape: Int[Array, " curve"]


@lru_cache(maxsize=8)
def _grid(steps: bytes) -> Grid:
    return Grid(np.frombuffer(steps))


def critical(points: int) -> float:
    """Evidence above which there is a transition, for a curve of so many points."""
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
        """The largest."""
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
        values: one a step; those that are not finite are left out.
        repeats: [step, batch], the same curve by evaluation batch or by seed. The interval is then the wider of the one
            from noise around the fit and the one from resampling the repeats.
        draws: curves drawn for the intervals.
    """
    t, y, reps = _curve(steps, values, repeats)
    n = len(t)
    if n < FEWEST:
        return Transitions((), np.nan, np.nan, f"too few points to judge: {n}, at least {FEWEST} are needed")
    grid, limit = _grid(t.tobytes()), critical(n)
    if np.ptp(y) == 0:
        return Transitions((), -np.inf, limit, "constant")
    scan = grid.scan(y[:, None])
    strongest = float(scan.evidence[0])
    shapes, evidences, noise = search(grid, y, strongest, int(scan.noise[0]), int(scan.shape[0]))
    if not shapes:
        return Transitions((), strongest, limit, "no transition")
    fit = _Fit(grid, y, noise, shapes)
    spans = fit.intervals(reps, draws, np.random.default_rng(seed))
    found = []
    for (m, w), size, evidence, span in zip(fit.shapes, fit.sizes, evidences, spans, strict=True):
        places = np.exp([m - w / 2, m, m + w / 2, *span]) - grid.s0
        onset, mid, end, low, high, first, last = (float(p) for p in places)
        low, high, first, last = min(low, mid), max(high, mid), min(first, onset), max(last, onset)
        if ((t > onset) & (t < end)).sum() < RESOLVED:  # the points around it say no more than that it is between them
            before, after = float(t[t <= onset].max(initial=t[0])), float(t[t >= end].min(initial=t[-1]))
            low, high, first, last = min(low, before), max(high, after), min(first, before), max(last, after)
        found.append(Transition(onset, mid, end, float(size), low, high, first, last, evidence, fit.sigma))
    found.sort(key=lambda item: item.midpoint)
    return Transitions(tuple(found), strongest, limit, f"{len(found)} transition{'s' * (len(found) > 1)}")


def search(
    grid: Grid, values: Float[Array, " step"], evidence: float, noise: int, shape: int
) -> tuple[list[tuple[float, float]], list[float], int]:
    """Transitions (midpoint, width) of one curve, the evidence of each, and the noise; `scan` gave the first candidate.

    One after another, each tested beside those before it. Two steps hide each other: alone, either looks like noise
    that wanders. So a first candidate with more than half of the critical evidence is kept for one more test, and two
    are accepted together where the second has the critical evidence and both together twice that.
    """
    limit, spread = critical(grid.n), float(np.ptp(values))
    accepted: tuple[list[tuple[float, float]], list[float], int] = ([], [], noise)
    shapes: list[tuple[float, float]] = []
    evidences: list[float] = []
    while True:
        fit = _Fit(grid, values, noise, [*shapes, (float(grid.midpoint[shape]), float(grid.width[shape]))])
        evidences = [*evidences, evidence]
        enough = evidence > limit and sum(evidences) > limit * len(evidences)
        hopeful = len(evidences) == 1 and evidence > limit / 2
        if not (enough or hopeful) or np.abs(fit.sizes).min() < SMALLEST * spread:
            return accepted
        shapes = fit.shapes
        if enough:
            accepted = (shapes, evidences, noise)
        if len(shapes) == MOST or grid.n < FEWEST + 4 * len(shapes):
            return accepted
        scan = grid.scan(values[:, None], np.concatenate([_tangent(grid, m, w) for m, w in shapes], axis=1), shapes)
        evidence, noise, shape = float(scan.evidence[0]), int(scan.noise[0]), int(scan.shape[0])


def _curve(
    steps: ArrayLike, values: ArrayLike, repeats: ArrayLike | None
) -> tuple[Float[Array, " step"], Float[Array, " step"], Float[Array, "step batch"] | None]:
    t, y = np.asarray(steps, dtype=float), np.asarray(values, dtype=float)
    if t.ndim != 1 or t.shape != y.shape:
        raise UserError(f"a curve is one value a step, got {t.shape} steps and {y.shape} values")
    if not np.isfinite(t).all() or (len(t) and t.min() < 0):
        raise UserError("steps are finite and not negative")
    wrong = np.flatnonzero(np.diff(t) <= 0)
    if len(wrong):
        i = int(wrong[0])
        raise UserError(f"steps must increase: {t[i + 1]:g} comes after {t[i]:g}; sort them, one value a step")
    keep = np.isfinite(y)
    reps = None
    if repeats is not None:
        reps = np.asarray(repeats, dtype=float)
        if reps.ndim != 2 or len(reps) != len(t):
            raise UserError(f"repeats are [step, batch] with {len(t)} steps, got {reps.shape}")
        keep &= np.isfinite(reps).all(axis=1)
        reps = reps[keep]
    return np.ascontiguousarray(t[keep]), y[keep], reps


def _tangent(grid: Grid, midpoint: float, width: float) -> Float[Array, "step 3"]:
    """A sigmoid and its derivatives in midpoint and log width: what a slightly different one would add."""
    h = 0.05
    m = midpoint + width * h * np.array([0, 1, -1, 0, 0])
    w = width * np.exp(h * np.array([0, 0, 0, 1, -1]))
    s = sigmoid(grid.u, m, w)
    return np.stack([s[0], (s[1] - s[2]) / (2 * h), (s[3] - s[4]) / (2 * h)], axis=1)


class _Fit:
    """Baseline and sigmoids of one curve, midpoints and widths refined, with the noise held."""

    def __init__(self, grid: Grid, values: Float[Array, " step"], noise: int, shapes: Sequence[tuple[float, float]]):
        self.grid, self.noise, self.shapes = grid, noise, list(shapes)
        self.whiten = grid.whitening[noise][0]
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
        base = self.grid.base[False][self.base][:, None]
        return one if self.base == 0 else np.concatenate([one, base], axis=1)

    def _gain(
        self, columns: Float[Array, "step column"], rows: Float[Array, "row step"], values: Float[Array, "step curve"]
    ) -> Float[Array, "row curve"]:
        """Fall of the sum of squares when a row joins the columns."""
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
        gain = self._gain(columns, self.grid.base[False], y)[:, 0]
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
    repeats: ArrayLike | None = None,
    seed: int = 0,
) -> Verdict:
    """Is there a bump in the loss, and does accuracy rise above chance with it?

    "Without accuracy" means that after the largest fall of the loss accuracy stays at or below chance + 0.02; what it
    holds is the largest median of three evaluations in a row, so that one lucky evaluation does not count.
    """
    if not 0 <= chance <= 1:
        raise UserError(f"chance is an accuracy between 0 and 1, got {shown(chance)}")
    found = transitions(steps, loss, repeats=repeats, seed=seed)
    t, acc = np.asarray(steps, dtype=float), np.asarray(accuracy, dtype=float)
    if acc.shape != t.shape:
        raise UserError(f"accuracy has one value a step: {t.shape} expected, got {acc.shape}")
    if not found.judged:
        return Verdict("not judged", found.note, None, np.nan, np.nan)
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
        f"accuracy {before:.1%} before, {after:.1%} after, chance {chance:.1%}"
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
    """From one event to a later one, in steps, with a 95% interval."""

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

    A lag's interval joins those of its two events, which are taken to be independent:
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
