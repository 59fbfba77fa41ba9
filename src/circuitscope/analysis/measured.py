"""How a measured number is written everywhere: value and standard error, with the digits that the error allows."""

import math

_FEWEST, _MOST = 2, 4  # digits after the point


def measured(value: float, stderr: float, *, sign: bool = False) -> str:
    """`0.962 ± 0.003`: one digit of the error that matters, and the value with as many digits after the point.

    An error that is not known, or is zero in four digits, is left out.

    Args:
        sign: whether a value above zero gets a plus.
    """
    error = float(f"{stderr:.0e}") if math.isfinite(stderr) else 0.0
    digits = min(max(_FEWEST, -math.floor(math.log10(error))), _MOST) if error > 0 else _FEWEST
    if round(error, digits) == 0:
        return f"{value:{'+' if sign else ''}.{_FEWEST}f}"
    return f"{value:{'+' if sign else ''}.{digits}f} ± {error:.{digits}f}"
