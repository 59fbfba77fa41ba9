"""Is there a transition in a curve? The Bayes factor of a smooth baseline with a sigmoid against the baseline alone.

A curve is  y = a + b g(step) [+ size · sigmoid(u)] + noise,  u = log(step + s0).  Only the curve is given, so
everything else is averaged over, with these priors:

    noise      AR(1) from one evaluation to the next, with rho one of RHOS; its size follows one of TRENDS
    baseline   nothing 1/4, step 1/8, log step 1/8, exponential 1/4, power law or logarithm 1/4; b as wide as the range
    sigmoid    midpoint uniform in u, width one of four, size log-uniform from SIZES[0] to SIZES[1] sigma, up or down
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int
from scipy.special import gammaln, logsumexp

from circuitscope.kernels.numba_simd import serial

Array = np.ndarray

EDGE = 3  # evaluations that a transition must have before its onset and after its end
WIDEST = np.log(4.0)  # end / onset of a transition is at most 4, and at most 0.4 of the curve's log-step range
WIDEST_SHARE = 0.4
RHOS = (0.0, 0.2, 0.4, 0.6, 0.8)
TRENDS = (
    (0.0, 0.6),
    (np.log(10.0), 0.1),
    (np.log(100.0), 0.1),
    (np.log(1000.0), 0.1),
    (-np.log(10.0), 0.1),
)  # noise of constant size; 10, 100 or 1,000 times smaller at the end; 10 times larger; each with its probability
FLOOR = 5e-3  # noise is never taken to be below this share of the curve's range
SIZES = (4.5, 1000.0)
BETWEEN = 40.0  # factor b, in sigma, that the allowance for shapes between two baselines of the grid assumes
LOGIT_SPAN = 2 * np.log(9.0)  # from 10% to 90% of a logistic function
_NEGLIGIBLE = 7.0  # terms of a sum below exp(-7) of its largest are left out


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


class Baselines(NamedTuple):
    """Curves without a transition, up to offset and factor; the first is the constant.

    `between` holds how a shape changes within its cell of the grid (one standard deviation of a uniform distribution).
    """

    shape: Float[Array, "base step"]
    between: Float[Array, "base 2 step"]
    prior: Float[Array, " base"]


def baselines(steps: Float[Array, " step"], fine: bool = False) -> Baselines:
    """1, x, log(step + s0), exp(-x / tau), (1 + x / s)^-a and log(1 + x / s) with x = step - first step.

    tau and s run from a fifth of the first interval to twice the range, a from 0.35 to 2.8; every shape of the last
    three kinds is there twice: as it is, and with what lies between it and its neighbours.
    """
    x, u = steps - steps[0], axis(steps)[0]
    low, high = np.log(0.2 * x[1]), np.log(2 * x[-1])
    zero = np.zeros((2, len(x)))
    rows = [(np.zeros_like(x), zero, 1 / 4), (x / x[-1], zero, 1 / 8), ((u - u[0]) / (u[-1] - u[0]), zero, 1 / 8)]
    curved = []
    taus, apart = _even(low, high, 0.06 if fine else 0.3)
    for tau in np.exp(taus):
        g = np.exp(-x / tau)
        curved.append((g, np.stack([apart * (x / tau) * g, zero[0]]), 1 / 8 / len(taus)))
    scales, apart = _even(low, high, 0.2 if fine else 0.6)
    powers, apart_a = (np.geomspace(0.25, 4, 9), np.log(2) / 2) if fine else (np.geomspace(0.35, 2.8, 4), np.log(2))
    prior = 1 / 8 / len(scales) / (1 + len(powers))
    for y in x[None] / np.exp(scales)[:, None]:
        logarithm, span = np.log1p(y), np.log1p(y[-1])
        between = np.stack([-apart * y / (1 + y), -0.35 * logarithm**2 / 2]) / span
        curved.append((logarithm / span, between, prior))
        for a in powers:
            g = (1 + y) ** -a
            curved.append((g, np.stack([apart * a * y * g / (1 + y), -apart_a * a * logarithm * g]), prior))
    shapes, changes, priors = zip(*rows, *[(g, zero, p) for g, _, p in curved], *curved, strict=True)
    return Baselines(np.stack(shapes), np.stack(changes) / np.sqrt(12), np.array(priors))


def _even(low: float, high: float, apart: float) -> tuple[Float[Array, " point"], float]:
    """Evenly spaced points from low to high, about `apart` from each other, and their exact distance."""
    points = np.linspace(low, high, max(6, round((high - low) / apart)))
    return points, float(points[1] - points[0])


@dataclass(frozen=True)
class Scan:
    """The result of a scan, with one value per curve."""

    evidence: Float[Array, " curve"]  # log of the Bayes factor
    noise: Int[Array, " curve"]  # number of the kind of noise in the largest term with a sigmoid
    midpoint: Float[Array, " curve"]
    width: Float[Array, " curve"]


class _Part(NamedTuple):
    """All shapes, whitened for one kind of noise, with the columns that are always in the design projected out."""

    always: Float[Array, "step column"]  # orthonormal
    base: Float[Array, "base 3 step"]
    sigmoid: Float[Array, "shape step"]
    score: Float[Array, " base"]  # log score of a baseline, without its sum of squares
    freedom: Float[Array, " base"]
    along: Float[Array, "base 3 shape"]
    inverse: Float[Array, "base shape"]  # 1 / squared length of the sigmoid beside the baseline; 0 if the two coincide


class Grid:
    """All shapes that are compared on one set of steps: noise, baselines, sigmoids."""

    def __init__(self, steps: Float[Array, " step"]):
        n = len(steps)
        self.steps, self.n = steps, n
        self.u, self.s0 = axis(steps)
        gaps = np.diff(self.u)
        self.range = float(self.u[-1] - self.u[0])
        self.widest = min(WIDEST, WIDEST_SHARE * self.range)
        self.base = baselines(steps)
        within = np.unique(np.linspace(0, n - 2, min(n - 1, 80)).astype(int))
        midpoints = np.concatenate([self.u[within] + part * gaps[within] for part in (0.25, 0.75)])
        gap = np.concatenate([gaps[within]] * 2)
        widths = np.minimum(gap, self.widest)[:, None] ** np.linspace(1, 0, 4) * self.widest ** np.linspace(0, 1, 4)
        m, w, likely = np.repeat(midpoints, 4), widths.ravel(), np.repeat(gap, 4)
        ok = self.allowed(m, w)
        self.midpoint, self.width = m[ok], w[ok]
        self.prior = likely[ok] / max(likely[ok].sum(), 1e-300)
        self.sigmoid = sigmoid(self.u, self.midpoint, self.width)
        self.noise = [(rho, trend) for trend, _ in TRENDS for rho in RHOS]
        self.noise_prior = [share / len(RHOS) for _, share in TRENDS for _ in RHOS]
        self.whitening = [self._whitening(rho, trend) for rho, trend in self.noise]
        self._parts = self._project(np.ones((n, 1)), range(len(self.noise)))

    def allowed(
        self,
        midpoint: Float[Array, " shape"],
        width: Float[Array, " shape"],
        taken: Sequence[tuple[float, float]] = (),
    ) -> Bool[Array, " shape"]:
        """Which shapes are not too wide and have EDGE evaluations before, after, and between them and those `taken`."""
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

    def _project(self, always: Float[Array, "step column"], noises: Sequence[int]) -> list[_Part]:
        return [
            self._part(self.whitening[k][0], always, np.log(self.noise_prior[k]) - 0.5 * self.whitening[k][1])
            for k in noises
        ]

    def _part(self, w: Float[Array, "step step"], always: Float[Array, "step column"], score: float) -> _Part:
        """A baseline's factor has a flat prior; changes of its shape have one of BETWEEN sigma, which shrinks them."""

        def beside(rows: Float[Array, "row step"]) -> Float[Array, "row step"]:
            return np.asarray(rows - (rows @ q) @ q.T)

        n, bases = self.n, len(self.base.prior)
        q, r = np.linalg.qr(w @ always)
        shape = self.base.shape @ w.T
        size = np.linalg.norm(shape, axis=1)
        shape = beside(shape)
        norm = np.linalg.norm(shape, axis=1)
        alive = norm > np.maximum(1e-6 * size, 1e-12)
        shape = np.where(alive[:, None], shape / np.where(alive, norm, 1.0)[:, None], 0.0)
        change = beside(BETWEEN * self.base.between.reshape(2 * bases, n) @ w.T).reshape(bases, 2, n)
        change -= (change @ shape[:, :, None]) * shape[:, None]
        squares, turn = np.linalg.eigh(change @ change.transpose(0, 2, 1))
        squares = np.maximum(squares, 0)
        change = turn.transpose(0, 2, 1) @ change / np.sqrt(1 + squares)[:, :, None]
        base = np.concatenate([shape[:, None], change], axis=1)
        freedom = n - always.shape[1] - alive.astype(float)
        total = (
            score
            - np.log(np.abs(np.diag(r))).sum()
            + np.log(self.base.prior)
            + np.where(alive, 0.5 * np.log(2 * np.pi) - np.log(np.where(alive, norm, 1.0)), 0.0)
            - 0.5 * np.log1p(squares).sum(axis=1)
            + gammaln(freedom / 2)
            - freedom / 2 * np.log(np.pi)
        )
        s = beside(self.sigmoid @ w.T).astype(np.float32)
        along = (base.reshape(3 * bases, n).astype(np.float32) @ s.T).reshape(bases, 3, len(s))
        whole = (s**2).sum(axis=1)
        length = whole[None] - np.einsum("jps,jps->js", along, along)
        usable = length > np.float32(1e-3) * whole[None] + np.float32(1e-12)
        inverse = np.divide(1, length, out=np.zeros_like(length), where=usable)
        return _Part(q, base, s, total, freedom, along, inverse)

    def scan(
        self,
        values: Float[Array, "step curve"],
        fixed: Float[Array, "step column"] | None = None,
        taken: Sequence[tuple[float, float]] = (),
        like: int | None = None,
    ) -> Scan:
        """The evidence for one sigmoid in each curve, and where it is.

        With the linear coefficients and sigma integrated out, noise V, design X and S the sum of squares that is left,

            p(y) ∝ |V|^-½ |Xᵀ V⁻¹ X|^-½ Γ(ν/2) (π S)^(-ν/2),   ν = n - columns of X,

        summed over noise and baselines with their priors. A sigmoid that explains a share r² of S multiplies p(y)
        by (1 - r²)^(-ν/2) and by the prior of its size over the spread of its estimate. The columns `fixed` are in the
        design with and without it. A sigmoid with fewer than EDGE evaluations between it and a `taken` one is left out.
        With `like`, only kinds of noise with the same trend as that one are considered.
        """
        n, curves = values.shape
        y = (values - values.mean(0)) / np.maximum(np.ptp(values, axis=0), 1e-300)
        floor = n * FLOOR**2
        noises = [k for k, (_, trend) in enumerate(self.noise) if like is None or trend == self.noise[like][1]]
        parts = [self._parts[k] for k in noises]
        if fixed is not None:
            parts = self._project(np.concatenate([np.ones((n, 1)), fixed], axis=1), noises)
        free = self.allowed(self.midpoint, self.width, taken)
        if not free.any():
            nothing = np.zeros(curves)
            return Scan(np.full(curves, -np.inf), nothing.astype(int), nothing, nothing)
        seen = []
        for k, part in zip(noises, parts, strict=True):
            z = self.whitening[k][0] @ y
            z = z - part.always @ (part.always.T @ z)
            along = (part.base.reshape(-1, n) @ z).T.reshape(curves, -1, 3)
            rest = np.maximum((z**2).sum(0)[:, None] - (along**2).sum(axis=2), 0) + floor
            score = part.score[None] - 0.5 * part.freedom[None] * np.log(rest)
            s = np.ascontiguousarray((part.sigmoid @ z.astype(np.float32)).T)
            seen.append((s, along.astype(np.float32), rest, score))
        null = logsumexp(np.concatenate([score for *_, score in seen], axis=1), axis=1)
        top, total = null - _NEGLIGIBLE, np.zeros(curves)
        by_shape, noise = np.zeros((curves, len(self.prior))), np.zeros(curves, dtype=np.int64)
        prior = np.log(np.where(free, self.prior, 1.0))
        for k, part, (s, along, rest, score) in zip(noises, parts, seen, strict=True):
            inverse = np.where(free[None], part.inverse, np.float32(0))
            _add_sigmoids(
                k, s, along, rest, score, part.along, inverse, part.freedom, prior, floor, top, total, by_shape, noise
            )
        evidence = top + np.log(np.maximum(total, 1e-300)) - null
        midpoint, width = self._place(by_shape)
        return Scan(evidence, noise, midpoint, width)

    def _place(self, by_shape: Float[Array, "curve shape"]) -> tuple[Float[Array, " curve"], Float[Array, " curve"]]:
        """Mean midpoint and width within the window of 8% of the log-step range that holds most of the probability."""
        rank = np.argsort(self.midpoint, kind="stable")
        m, w, p = self.midpoint[rank], self.width[rank], by_shape[:, rank]
        first = np.searchsorted(m, m - 0.04 * self.range)
        last = np.searchsorted(m, m + 0.04 * self.range, side="right")

        def inside(values: Float[Array, "curve shape"]) -> Float[Array, "curve shape"]:
            sums = np.concatenate([np.zeros((len(values), 1)), values.cumsum(axis=1)], axis=1)
            return np.asarray(sums[:, last] - sums[:, first])

        held = inside(p)
        best = held.argmax(axis=1)[:, None]
        mass, at = (np.take_along_axis(a, best, 1)[:, 0] for a in (held, np.broadcast_to(m, p.shape)))
        some = mass > 1e-12
        mean = [
            np.where(some, np.take_along_axis(inside(p * a), best, 1)[:, 0] / np.where(some, mass, 1.0), other)
            for a, other in ((m, at), (w, self.widest))
        ]
        return mean[0], mean[1]


def _sum_sigmoids(
    k: int,
    s: Float[Array, "curve shape"],
    z: Float[Array, "curve base 3"],
    rest: Float[Array, "curve base"],
    score: Float[Array, "curve base"],
    along: Float[Array, "base 3 shape"],
    inverse: Float[Array, "base shape"],
    freedom: Float[Array, " base"],
    prior: Float[Array, " shape"],
    floor: float,
    top: Float[Array, " curve"],
    total: Float[Array, " curve"],
    by_shape: Float[Array, "curve shape"],
    noise: Int[Array, " curve"],
) -> None:
    """Adds the terms of all baselines and sigmoids to `total` and `by_shape`, in units of the largest one, exp(top)."""
    curves, shapes = s.shape
    bases = len(freedom)
    explained = np.empty(shapes, np.float32)
    likely = prior.max()
    smallest = SIZES[0]
    span = np.log(SIZES[1] / SIZES[0])
    for i in range(curves):
        for j in range(bases):
            v = freedom[j]
            scale = np.float32(1 / rest[i, j])
            z0, z1, z2 = z[i, j, 0], z[i, j, 1], z[i, j, 2]
            most = np.float32(0)
            for c in range(shapes):
                left = s[i, c] - along[j, 0, c] * z0 - along[j, 1, c] * z1 - along[j, 2, c] * z2
                share = left * left * inverse[j, c] * scale
                explained[c] = share
                most = max(most, share)
            least = 1 - np.exp(-2 / v * (top[i] - _NEGLIGIBLE - score[i, j] - likely))
            if most < least:
                continue
            cap = 1 - floor / rest[i, j]
            for c in range(shapes):
                if explained[c] < least or inverse[j, c] == 0:
                    continue
                r2 = min(float(explained[c]), cap)
                length = 1 / float(inverse[j, c])
                size = np.sqrt(r2 * v / (1 - r2) / length)
                far = (size - smallest) / np.sqrt(1 / length + max(size, smallest) ** 2 / (2 * v))
                tail = 2 / (abs(far) + np.sqrt(far * far + 8 / np.pi))  # about ∫_|far|^∞ φ / φ(|far|)
                if far >= 0:
                    term = -0.5 * v * np.log(1 - r2) + 0.5 * np.log(2 * np.pi / length)
                    term += np.log(1 - np.exp(-far * far / 2) * tail / np.sqrt(2 * np.pi))
                else:  # integrates from the smallest size on, and over sigma by Laplace's method
                    size, w = smallest, v - 1
                    a = size * np.sqrt(length * r2)
                    t = (a + np.sqrt(a * a + 4 * w)) / 2
                    term = w * np.log(t) - t * t / 2 + a * t - 0.5 * np.log(1 + w / (t * t)) - size * size * length / 2
                    term -= w * 0.5 * np.log(w) - w / 2 - 0.5 * np.log(2.0)
                    term += 0.5 * np.log(1 / length + size * size / (2 * v)) + np.log(tail)
                term += prior[c] + score[i, j] - np.log(2 * span * size)
                if term > top[i]:
                    less = np.exp(top[i] - term)
                    total[i] *= less
                    for d in range(shapes):
                        by_shape[i, d] *= less
                    top[i] = term
                    noise[i] = k
                weight = np.exp(term - top[i])
                total[i] += weight
                by_shape[i, c] += weight


_add_sigmoids = serial(_sum_sigmoids)
