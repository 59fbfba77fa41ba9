"""The kinds of charts that the report's page can draw. They hold plain numbers; the page chooses colours and sizes."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any


def number(value: float) -> float | None:
    """A value with five digits; None if it is not finite."""
    return float(f"{value:.5g}") if math.isfinite(value) else None


def numbers(values: Iterable[float]) -> list[float | None]:
    """Each value with five digits, None where it is not finite."""
    return [number(float(value)) for value in values]


@dataclass(frozen=True)
class Line:
    """A curve over training steps, with a band around it if `low` and `high` are given."""

    name: str
    step: Sequence[int]
    value: Sequence[float | None]
    low: Sequence[float | None] = ()
    high: Sequence[float | None] = ()


@dataclass(frozen=True)
class OverSteps:
    """Curves over training steps; `levels` are values to mark with a dotted line, by name."""

    title: str
    lines: Sequence[Line]
    levels: Sequence[tuple[str, float]] = ()


@dataclass(frozen=True)
class AtSteps:
    """One curve for each of some training steps, over something else; the page shows the step of its slider.

    Args:
        x: what the curve is drawn over.
        at: the places on that axis.
        values: for each step the value at each place.
        log: whether the values have a logarithmic axis.
    """

    title: str
    x: str
    at: Sequence[float]
    step: Sequence[int]
    values: Sequence[Sequence[float | None]]
    log: bool = False


@dataclass(frozen=True)
class Bars:
    """Named numbers with their standard errors; `rest` says what is left out, or is empty."""

    title: str
    bars: Sequence[tuple[str, float | None, float | None]]
    rest: str = ""


Chart = OverSteps | AtSteps | Bars


def told(chart: Chart) -> dict[str, Any]:
    """A chart as plain data, with the name of its kind."""
    return {"kind": type(chart).__name__, **asdict(chart)}
