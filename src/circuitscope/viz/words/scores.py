"""Scores in words: where each score ends highest, its values there at the end and the start, and what it means.

A score has the score of even weights beside it, and prefix matching is compared with the same at a new period.
"""

import math
import re
from collections.abc import Iterator
from typing import Any

import pandas as pd

from circuitscope.analysis.checkpoints.results import Results
from circuitscope.analysis.measured import measured
from circuitscope.analysis.scores.curves import at_places, curve_at, place_name, strongest
from circuitscope.analysis.scores.registry import Score, shown_in
from circuitscope.viz.registry import Said, TextTable, words

_DIFFERS = 0.1  # by so much, and three standard errors, a score must differ from its control to be mentioned
_HEAD = re.compile(r"L\d+H\d+")


@words("scores")
def score_words(found: Results) -> Iterator[Said]:
    """One table with a line for each score that tables show; a score of edges has a line for each matrix."""
    frame, steps = found["scores"], found.steps
    first = f"step {steps[0]}" if len(steps) > 1 else ""
    repeats = found.run.config.task.batch(0, size=1).layout.period is not None
    columns = (
        "score",
        "where",
        f"step {steps[-1]}",
        first,
        "even weights",
        "strongest channels",
        "share of the weight, unless said otherwise",
    )
    lines = list(score_lines(frame, repeats))
    yield TextTable(columns, lines) if lines else "no scores: no layer has a mixing matrix Φ, whose weight they measure"
    yield from new_period_lines(frame)


def score_lines(frame: pd.DataFrame, repeats: bool) -> Iterator[tuple[str, ...]]:
    """(score, where, last value, first value, that of even weights, strongest channels, meaning): the strongest places.

    A score of edges has a line for each matrix on the task's own sequences, and one line on repeated blocks.

    Args:
        repeats: whether the task's own sequences are repeated blocks.
    """
    trained_on = ("own", "repeats") if repeats else ("own",)
    for score in shown_in("table"):
        for name, meaning in score.means.items():
            rows = at_places(frame, name)
            each = score.edges is not None and score.on == "own"
            for factor in rows.factor.unique() if each else [None]:
                place = strongest(frame, name, factor)
                if place is None:
                    continue
                start = curve_at(frame, place).iloc[0]
                yield (
                    name.replace("_", " "),
                    place_name(place) + _reads(score, place),
                    measured(place.value, place.stderr),
                    f"{start.value:.2f}" if start.step < place.step else "",
                    "" if pd.isna(place.even) else f"{place.even:.2f}",
                    _channels(frame, place),
                    meaning if score.on in trained_on else f"{meaning}, off-distribution",
                )


def new_period_lines(frame: pd.DataFrame) -> Iterator[str]:
    """A sentence where prefix matching is lost on blocks of a length that training never had."""
    place = strongest(frame, "induction")
    if place is None:
        return
    there = _same_place(frame, place, "induction_new_period")
    if there is None:
        return
    lost, error = place.value - there.value, math.hypot(place.stderr, there.stderr)
    if lost > max(3 * error, _DIFFERS):
        so = ": it copies from a fixed distance more than it matches prefixes" if there.value < lost else ""
        yield (
            f"{place_name(place)} scores {place.value:.2f} in prefix matching on blocks of the lengths of training, and"
            f" {there.value:.2f} on blocks of a length that training never had{so}"
        )


def _same_place(frame: pd.DataFrame, place: "pd.Series[Any]", score: str) -> "pd.Series[Any] | None":
    """The row of another score at the same place and step."""
    other = place.copy()
    other["score"] = score
    rows = curve_at(frame, other)
    rows = rows[rows.step == place.step]
    return rows.iloc[0] if len(rows) else None


def _reads(score: Score, place: "pd.Series[Any]") -> str:
    """The head that a head reads, where the factor names one."""
    return f" of {place.factor}" if score.edges is None and _HEAD.fullmatch(str(place.factor)) else ""


def _channels(frame: pd.DataFrame, place: "pd.Series[Any]", most: int = 3) -> str:
    if place.unit is pd.NA or place.unit != "channel":
        return ""
    here = (frame.step == place.step) & (frame.score == place.score) & (frame.factor == place.factor)
    rows = frame[here & (frame.layer == place.layer) & (frame.weighting == "abs") & frame["head"].notna()]
    top = rows.nlargest(most, "value")
    listed = ", ".join(f"{h} {v:.2f}" for h, v in zip(top["head"], top.value, strict=True))
    return f"of {len(rows)}: {listed}" if listed else ""
