"""A row of the table, and the timer that alternates the sides it compares. No benchmark lives here."""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Row:
    """One line of the table; `met` is None where there is nothing to meet."""

    name: str
    ours: str
    other: str
    ratio: str
    target: str
    met: bool | None
    note: str = ""


@dataclass(frozen=True)
class Section:
    """What a benchmark returns: rows, and text that goes below the table as it is."""

    rows: list[Row] = field(default_factory=list)
    text: str = ""


def alternate(sides: Sequence[Callable[[], object]], rounds: int, calls: int = 1) -> list[list[float]]:
    """Seconds per call [side][round], the sides taking turns: A B A B … with `calls` calls in a turn.

    One untimed turn of each comes first.
    """
    for side in sides:
        side()
    seconds: list[list[float]] = [[] for _ in sides]
    for _ in range(rounds):
        for taken, side in zip(seconds, sides, strict=True):
            began = time.perf_counter()
            for _ in range(calls):
                side()
            taken.append((time.perf_counter() - began) / calls)
    return seconds


def faster(name: str, ours: Sequence[float], other: Sequence[float], at_least: float | None, note: str = "") -> Row:
    """How many times faster we are: the median over rounds of other / ours."""
    ratios = [b / a for a, b in zip(ours, other, strict=True)]
    middle = statistics.median(ratios)
    target, met = ("–", None) if at_least is None else (f"at least {at_least:g}x", middle >= at_least)
    return Row(name, duration(ours), duration(other), spread(ratios, "{:.2f}", "x"), target, met, note)


def costs(name: str, ours: Sequence[float], other: Sequence[float], at_most: float, note: str = "") -> Row:
    """How much more we take: the median over rounds of ours / other."""
    ratios = [a / b for a, b in zip(ours, other, strict=True)]
    met = statistics.median(ratios) <= at_most
    return Row(name, duration(ours), duration(other), spread(ratios, "{:.3f}"), f"at most {at_most:g}", met, note)


def limit(name: str, ours: str, target: str, met: bool, note: str = "") -> Row:
    """An absolute limit: there is no other side."""
    return Row(name, ours, "–", "–", target, met, note)


def duration(seconds: Sequence[float]) -> str:
    """The median, in a unit that suits it."""
    middle = statistics.median(seconds)
    return f"{middle * 1e3:.3g} ms" if middle < 1 else f"{middle:.2f} s"


def spread(values: Sequence[float], form: str, unit: str = "") -> str:
    """`median unit (lower quartile – upper quartile)`."""
    middle = form.format(statistics.median(values)) + unit
    if len(values) < 2:
        return middle
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return f"{middle} ({form.format(low)} – {form.format(high)})"


def markdown(header: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """A table with padded columns, readable as text too."""
    widths = [max(len(line[i]) for line in [header, *lines]) for i in range(len(header))]
    rule = ["-" * width for width in widths]
    padded = ([cell.ljust(width) for cell, width in zip(line, widths, strict=True)] for line in [header, rule, *lines])
    return "\n".join(f"| {' | '.join(line)} |" for line in padded)
