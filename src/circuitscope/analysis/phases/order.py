"""What happened first: events with intervals, their order, and the lags between them."""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import numpy as np

from circuitscope.analysis.phases.detection import Transitions
from circuitscope.errors import unknown


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
    absent: tuple[str, ...]  # curves without a transition, and those whose transitions need no circuit
    needless: tuple[str, ...] = ()  # the latter

    def __str__(self) -> str:
        together = {(lag.first, lag.second): lag for lag in self.lags}
        lines = [str(together[a.name, b.name]) for a, b in pairwise(self.events)]
        beyond = dict.fromkeys(self.needless, " beyond a level that needs no circuit")
        return "\n".join(lines + [f"{name}: no transition{beyond.get(name, '')}" for name in self.absent])


def order(curves: Mapping[str, Transitions], at: Literal["onset", "midpoint"] = "onset") -> Order:
    """What happened first: the main transition of each named curve, by onset or midpoint.

    Transitions that go no further than the level of their curve are left out (`Transitions.main`).

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
    absent = tuple(name for name in curves if name not in present)
    return Order(tuple(events), tuple(lags), absent, tuple(name for name in absent if len(curves[name])))
