"""Interventions in words: a table of effects, the strongest first."""

from collections.abc import Iterator

import pandas as pd

from circuitscope.analysis.checkpoints.results import Results
from circuitscope.viz.registry import TextTable, words


@words("causal")
def causal_words(found: Results) -> Iterator[TextTable]:
    """One table of the strongest effects at the last checkpoint."""
    frame = found["causal"]
    yield TextTable(("intervention", "where", "effect"), list(causal_lines(frame[frame.step == frame.step.max()])))


def causal_lines(frame: pd.DataFrame, most: int = 24) -> Iterator[tuple[str, ...]]:
    """(intervention, where, effect), the strongest first."""
    ranked = frame.loc[frame.value.abs().sort_values(ascending=False).index].head(most)
    for row in ranked.to_dict("records"):
        layer = "" if row["where"][0] in "Lb" else f"L{row['layer']} "
        yield row["intervention"], f"{layer}{row['where']}", f"{row['value']:+.2f} ± {row['stderr']:.2f} {row['unit']}"
    if len(frame) > most:
        yield "", f"and {len(frame) - most} weaker ones in causal.parquet", ""
