"""Smooth learning curves as mixtures of exponentials, and how much better a sigmoid beside them fits a curve.

A model with fixed features that learns by gradient flow on a squared loss has the loss

    c₀ + Σ c_i exp(−λ_i t),   c_i ≥ 0,   t = Σ lr,

and such mixtures are all completely monotone functions (Bernstein): exponentials, power laws, stretched exponentials
with an exponent up to 1, logarithms, and their sums. Here λ runs over a fine grid, and non-negative least squares find
the c_i. A curve that rises is the mirror image. Noise is one of NOISES: AR(1) from one value to the next.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float
from scipy.optimize import nnls

from circuitscope.kernels.nonnegative import squares_with_one_more

Array = np.ndarray

EDGE = 3  # values that a transition has before its onset and after its end
WIDEST = float(np.log(4.0))  # the end comes at most four times as late as the onset, and
WIDEST_SHARE = 0.4  # a transition takes at most this share of the curve's log-time range
NOISES = (  # correlation ρ from one value to the next, and how large the noise is at the end, where it was 1 at first
    *((rho, 1.0) for rho in (0.0, 0.2, 0.4, 0.6, 0.8, 0.9, 0.97)),
    *((rho, 0.1) for rho in (0.0, 0.4, 0.8)),
    (0.0, 0.01),
)
FLOOR = 4e-3  # noise is never taken to be below this share of the curve's range
_RATIO = 1.25  # of neighbouring rates λ
_PLACES = 40  # places that a scan looks at
_LOGIT_SPAN = 2 * np.log(9.0)  # from 10% to 90% of a logistic function
_NEGLIGIBLE = 1e-5  # singular values of the dictionary below this share of the largest are left out


def sigmoid(
    u: Float[Array, " step"], midpoint: Float[Array, " shape"], width: Float[Array, " shape"]
) -> Float[Array, "shape step"]:
    """1 / (1 + exp(−2 ln 9 (u − m) / w)): from 10% to 90% between m − w/2 and m + w/2."""
    z = _LOGIT_SPAN * (u[None] - midpoint[:, None]) / width[:, None]
    return np.asarray(0.5 * (1 + np.tanh(z / 2)))


@dataclass(frozen=True)
class Candidate:
    """The best sigmoid beside a mixture; place and width in log time."""

    statistic: float  # −2 log likelihood ratio of the mixture without and with the sigmoid
    midpoint: float
    width: float
    noise: int  # the index in NOISES of the noise beside which it fits best


@dataclass(frozen=True)
class _Whitened:
    """The columns of a design for one noise, with the constant projected out and rotated to few rows: W X ≈ U R."""

    whiten: Float[Array, "step step"]  # W with W V Wᵀ = 1 for the noise's covariance V, whose mean variance is 1
    white: Float[Array, "step step"]  # the same, and the constant is taken out
    logdet: float  # log |V|
    basis: Float[Array, "step row"]
    reduced: Float[Array, "row column"]


class Design:
    """Columns with coefficients of at least 0, beside a free constant, for every noise of NOISES."""

    def __init__(self, columns: Float[Array, "step column"]):
        self.columns = columns
        self.parts = []
        for rho, last in NOISES:
            whiten, logdet = _whitening(len(columns), rho, last)
            one = whiten.sum(axis=1)
            one /= np.linalg.norm(one)
            white = whiten - np.outer(one, one @ whiten)
            left, size, right = np.linalg.svd(white @ columns, full_matrices=False)
            kept = size > _NEGLIGIBLE * size[0]
            self.parts.append(_Whitened(whiten, white, logdet, left[:, kept], size[kept, None] * right[kept]))

    def _likelihood(self, squares: Float[Array, " fit"], noise: int) -> Float[Array, " fit"]:
        """Twice the log likelihood of fits to a curve with range 1, σ at its best, but for a constant."""
        n = len(self.columns)
        return np.asarray(-n * np.log(squares / n + FLOOR**2) - self.parts[noise].logdet)

    def alone(self, y: Float[Array, " step"]) -> Float[Array, " noise"]:
        """Twice the log likelihood of the columns, by noise."""
        out = []
        for noise, part in enumerate(self.parts):
            z = part.white @ y
            seen = part.basis.T @ z
            squares = max(float(z @ z - seen @ seen), 0.0) + nnls(part.reduced, seen)[1] ** 2
            out.append(self._likelihood(np.array([squares]), noise))
        return np.concatenate(out)

    def beside(
        self, y: Float[Array, " step"], rows: Float[Array, "shape step"], noises: Sequence[int]
    ) -> Float[Array, "noise shape"]:
        """Twice the log likelihood of the columns with one more, for each of several rows."""
        out = np.empty((len(noises), len(rows)))
        for k, noise in enumerate(noises):
            part = self.parts[noise]
            z, shapes = part.white @ y, rows @ part.white.T
            seen, along = part.basis.T @ z, shapes @ part.basis
            z, shapes = z - part.basis @ seen, shapes - along @ part.basis.T
            length = np.maximum(np.linalg.norm(shapes, axis=1), 1e-9)
            outside = shapes @ z / length
            inside = squares_with_one_more(part.reduced, seen, along, length, outside)
            out[k] = self._likelihood(inside + np.maximum(float(z @ z) - outside**2, 0.0), noise)
        return out

    def coefficients(self, y: Float[Array, " step"], noise: int) -> Float[Array, " column"]:
        """The coefficients of the columns that fit best."""
        part = self.parts[noise]
        return np.asarray(nnls(part.reduced, part.basis.T @ (part.white @ y))[0])

    def constant(self, rest: Float[Array, " step"], noise: int) -> float:
        """The constant that fits best what the columns leave: 1ᵀV⁻¹ rest / 1ᵀV⁻¹1."""
        whiten = self.parts[noise].whiten
        one = whiten.sum(axis=1)
        return float(one @ (whiten @ rest) / (one @ one))


def _whitening(n: int, rho: float, last: float) -> tuple[Float[Array, "step step"], float]:
    """W and log |V| of AR(1) noise whose size goes from 1 to `last`, evenly in its logarithm, over n values."""
    size = np.geomspace(1, last, n)
    size /= np.sqrt((size**2).mean())
    white, root, i = np.eye(n), np.sqrt(1 - rho**2), np.arange(1, n)
    white[i, i], white[i, i - 1] = 1 / root, -rho / root
    return white / size[None], (n - 1) * float(np.log(1 - rho**2)) + 2 * float(np.log(size).sum())


class Grid:
    """All shapes that are compared on one set of steps: exponentials, and sigmoids that fall from 1 to 0.

    Exponentials are functions of the time that the learning rate makes. Sigmoids are functions of log step: whether a
    step is sudden is asked of the curve as one sees it, and a warmup stretches the time of its first steps.
    """

    def __init__(self, clock: Float[Array, " step"], steps: Float[Array, " step"]):
        x = (clock - clock[0]) / (clock[-1] - clock[0])
        s = (steps - steps[0]) / (steps[-1] - steps[0])
        self.n = len(x)
        self.u = np.log(s + s[1])
        rates = np.geomspace(0.1, 7 / x[1], int(np.ceil(np.log(70 / x[1]) / np.log(_RATIO))))
        self.exponentials = np.concatenate([np.exp(-np.outer(x, rates)), 1 - x[:, None]], axis=1)
        self.design = Design(self.exponentials)
        self.widest = min(WIDEST, WIDEST_SHARE * float(self.u[-1] - self.u[0]))
        gaps = np.diff(self.u)
        at = np.unique(np.linspace(1, self.n - 3, min(self.n - 3, _PLACES)).astype(int))
        inside = (0.5,) if len(at) > _PLACES / 2 else (0.25, 0.75)
        midpoints = np.concatenate([self.u[at] + part * gaps[at] for part in inside])
        narrow = np.minimum(np.concatenate([gaps[at]] * len(inside)), self.widest)
        widths = narrow[:, None] ** np.array([1, 0.5, 0]) * self.widest ** np.array([0, 0.5, 1])
        self.midpoint, self.width = np.repeat(midpoints, 3), widths.ravel()

    def falls(self, midpoint: Float[Array, " shape"], width: Float[Array, " shape"]) -> Float[Array, "shape step"]:
        """Sigmoids from 1 to 0."""
        return 1 - sigmoid(self.u, midpoint, width)

    def allowed(
        self, midpoint: Float[Array, " shape"], width: Float[Array, " shape"], taken: Sequence[Candidate] = ()
    ) -> Bool[Array, " shape"]:
        """Which shapes are not too wide and have EDGE values before, after, and between them and those `taken`."""
        before, after = self._reach(midpoint, width)
        ok = (before >= EDGE) & (self.n - after >= EDGE) & (width <= self.widest * (1 + 1e-9))
        for one in taken:
            first, last = self._reach(np.array([one.midpoint]), np.array([one.width]))
            ok &= (first - after >= EDGE) | (before - last >= EDGE)
        return np.asarray(ok)

    def _reach(self, midpoint: Float[Array, " shape"], width: Float[Array, " shape"]) -> tuple[Array, Array]:
        """How many values come before the onset, and before the end."""
        before = np.searchsorted(self.u, midpoint - width / 2, side="right")
        return before, np.searchsorted(self.u, midpoint + width / 2, side="left")

    def scan(self, y: Float[Array, " step"], taken: Sequence[Candidate], design: Design) -> tuple[Candidate, Candidate]:
        """The best sigmoid in a curve that falls: of those that are allowed, and of all, also at the ends.

        Args:
            taken: transitions that the design has already.
        """
        noises = range(len(NOISES))
        without = float(design.alone(y).max())
        fits = design.beside(y, self.falls(self.midpoint, self.width), noises)
        ok = self.allowed(self.midpoint, self.width, taken)
        best = []
        for mask in (ok, np.ones_like(ok)):
            if not mask.any():
                best.append(Candidate(-np.inf, float(self.u[0]), self.widest, 0))
                continue
            noise, at = np.unravel_index(np.where(mask, fits, -np.inf).argmax(), fits.shape)
            shape = float(self.midpoint[at]), float(self.width[at])
            best.append(Candidate(float(fits[noise, at]) - without, *shape, int(noise)))
        return self._refined(y, best[0], taken, design, without), best[1]

    def _refined(
        self, y: Float[Array, " step"], start: Candidate, taken: Sequence[Candidate], design: Design, without: float
    ) -> Candidate:
        """The best sigmoid between the places and widths of the grid, around a first one."""
        if not np.isfinite(start.statistic):
            return start
        best, reach, factor = start, max(start.width / 2, float(self.u[-1] - self.u[0]) / self.n), 2.0
        for _ in range(4):
            m, w = (a.ravel() for a in np.meshgrid(reach * np.linspace(-1, 1, 5), factor ** np.linspace(-1, 1, 3)))
            m, w = best.midpoint + m, np.clip(best.width * w, self._narrowest(best.midpoint), self.widest)
            ok = self.allowed(m, w, taken)
            if ok.any():
                fits = design.beside(y, self.falls(m[ok], w[ok]), [best.noise])[0] - without
                at = int(fits.argmax())
                if fits[at] > best.statistic:
                    best = Candidate(float(fits[at]), float(m[ok][at]), float(w[ok][at]), best.noise)
            reach, factor = reach / 2, factor**0.5
        return best

    def _narrowest(self, midpoint: float) -> float:
        gaps = np.diff(self.u)
        i = int(np.clip(np.searchsorted(self.u, midpoint, side="right") - 1, 0, len(gaps) - 1))
        return float(min(gaps[i], self.widest))
