"""Scores in words: where each score ends highest, its values there at the end and the start, and what it means."""

import re
from collections.abc import Iterator
from typing import Any

import pandas as pd

from circuitscope.analysis.checkpoints.results import Results
from circuitscope.analysis.measured import measured
from circuitscope.analysis.phases.timeline import at_places, curve_at, place_name, strongest
from circuitscope.analysis.scores.registry import Score, shown_in
from circuitscope.viz.registry import Said, TextTable, words

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
        "strongest channels",
        "share of the weight, unless said otherwise",
    )
    lines = list(score_lines(frame, repeats))
    yield TextTable(columns, lines) if lines else "no scores: no layer has a mixing matrix Φ, whose weight they measure"


def score_lines(frame: pd.DataFrame, repeats: bool) -> Iterator[tuple[str, ...]]:
    """(score, where, value at the last step, at the first, strongest channels, meaning): the strongest place of each.

    A score of edges has a line for each matrix on the task's own sequences, and one line on repeated blocks.

    Args:
        repeats: whether the task's own sequences are repeated blocks.
    """
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
                    _channels(frame, place),
                    meaning if repeats or score.on == "own" else f"{meaning}, off-distribution",
                )


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
