"""Runs that differ in their seed alone, drawn as one curve with a band."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

import numpy as np
import pandas as pd

from circuitscope.config import differ_in_seed_alone
from circuitscope.runs.run import Run

Array = np.ndarray[Any, np.dtype[np.float64]]


@dataclass(frozen=True)
class Band:
    """A curve between a lower and an upper one."""

    step: Array
    value: Array
    low: Array
    high: Array

    @staticmethod
    def over(curves: Sequence[tuple[Iterable[float], Iterable[float]]]) -> "Band":
        """The mean, the lowest and the highest of several curves, at the steps that all of them have."""
        frames = [pd.Series(np.asarray(list(v), float), index=np.asarray(list(s), float)) for s, v in curves]
        both = pd.concat([f[~f.index.duplicated(keep="last")] for f in frames], axis=1, join="inner").sort_index()
        found = both.to_numpy(float)
        return Band(both.index.to_numpy(float), found.mean(axis=1), found.min(axis=1), found.max(axis=1))


@dataclass(frozen=True)
class Group:
    """One run, or several that differ in their seed alone; `at` are their places among the runs given."""

    label: str
    runs: tuple[Run, ...]
    at: tuple[int, ...]


def groups_of(runs: Sequence[Run], together: bool = True) -> list[Group]:
    """Groups runs in their order; with `together`, those that differ in their seed alone form one group."""
    found: list[list[int]] = []
    for i, run in enumerate(runs):
        fits = (at for at in found if all(differ_in_seed_alone(run.config, runs[j].config) for j in at))
        group = next(fits, None) if together else None
        if group is None:
            found.append([i])
        else:
            group.append(i)
    return [Group(_label([runs[i] for i in at]), tuple(runs[i] for i in at), tuple(at)) for at in found]


def _label(runs: Sequence[Run]) -> str:
    if len(runs) == 1:
        return runs[0].name
    letters = zip(*(run.name for run in runs), strict=False)
    shared = "".join(same[0] for same in takewhile(lambda at: len(set(at)) == 1, letters)).rstrip("-_. 0123456789")
    return f"{shared or runs[0].name}, {len(runs)} seeds"
