"""When a rise is 10%, 50% and 90% done, read off a monotone fit, with intervals from drawn curves.

A transition need not have the shape of a sigmoid. So the sigmoid only says that there is one; the times come from the
non-decreasing curve that fits the values best once the smooth baseline is taken off (isotonic regression).
"""

import numpy as np
from jaxtyping import Float
from scipy.optimize import isotonic_regression

Array = np.ndarray

SHARES = (0.1, 0.5, 0.9)


def crossings(
    steps: Float[Array, " step"], rise: Float[Array, " step"], size: float
) -> tuple[Float[Array, " share"], Float[Array, "share 2"]]:
    """The steps at which a monotone fit of a rise from 0 reaches SHARES of `size`, and the steps on either side.

    Between two steps the fit is taken to be a straight line.
    """
    fit = monotone(rise)
    at = np.clip(np.searchsorted(fit, np.array(SHARES) * size), 1, len(fit) - 1)
    low, high = fit[at - 1], fit[at]
    part = np.clip((np.array(SHARES) * size - low) / np.where(high > low, high - low, 1.0), 0.0, 1.0)
    around = np.stack([steps[at - 1], steps[at]], axis=1)
    return around[:, 0] + part * (around[:, 1] - around[:, 0]), around


def monotone(rise: Float[Array, " step"]) -> Float[Array, " step"]:
    """The non-decreasing curve that fits best."""
    return np.asarray(isotonic_regression(rise).x)
