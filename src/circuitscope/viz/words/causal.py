"""Interventions in words: a table of effects, the strongest first, and why some have none."""

from collections.abc import Iterator

import pandas as pd

from circuitscope.analysis.checkpoints.results import Results
from circuitscope.analysis.checkpoints.runner import table_path
from circuitscope.analysis.measured import measured
from circuitscope.viz.registry import Said, TextTable, words

_NO_EFFECT = {
    "interchange": "the model does not tell apart prompts in which two values are exchanged, so there is nothing to"
    " restore"
}


@words("causal")
def causal_words(found: Results) -> Iterator[Said]:
    """One table of the strongest effects at the last checkpoint."""
    frame, name = found["causal"], table_path(found.run, "causal", found.sequences).name
    last = frame[frame.step == frame.step.max()]
    something = last[last.value.notna() & (last.value != 0)]
    yield TextTable(("intervention", "where", "effect"), list(causal_lines(something, name)))
    for intervention, rows in last[last.value == 0].groupby("intervention", sort=False):
        yield f"{intervention}: nothing changed at {_places(rows)}"
    for intervention, rows in last[last.value.isna()].groupby("intervention", sort=False):
        why = _NO_EFFECT.get(str(intervention), "the accuracy could not be measured")
        yield f"{intervention}: no effect to measure at {_places(rows)}, because {why}"


def _places(rows: pd.DataFrame) -> str:
    return f"{len(rows)} place{'s' if len(rows) > 1 else ''}"


def causal_lines(frame: pd.DataFrame, table: str, most: int = 24) -> Iterator[tuple[str, ...]]:
    """(intervention, where, effect), the strongest first; the rest are in the file `table`."""
    ranked = frame.loc[frame.value.abs().sort_values(ascending=False).index].head(most)
    for row in ranked.to_dict("records"):
        layer = "" if row["where"].startswith(("L", "blocks.")) else f"L{row['layer']} "
        effect = f"{measured(row['value'], row['stderr'], sign=True)} {row['unit']}"
        yield row["intervention"], f"{layer}{row['where']}", effect
    if len(frame) > most:
        yield "", f"and {len(frame) - most} weaker ones in {table}", ""
