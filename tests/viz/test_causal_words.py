"""Interventions in words: digits, why there is no effect, and the file that holds the rest."""

import math
from collections.abc import Sequence
from typing import Any

import pandas as pd
from made_up_runs import made_up_run

from circuitscope.analysis.checkpoints.results import Results
from circuitscope.analysis.registry import ANALYSES
from circuitscope.runs.run import Run
from circuitscope.viz.registry import words_of
from circuitscope.viz.words.causal import causal_words


def told(run: Run, effect: float, sequences: int = 16, ablations: int = 2, more: Sequence[tuple[Any, ...]] = ()):
    rows = [
        ("mean ablation, later Φ free", 0, f"L0H{h}", "accuracy lost", 0.5 + h / 100, 0.003) for h in range(ablations)
    ]
    rows += [("interchange", 0, f"blocks.0.{role}", "effect", effect, effect) for role in ("key", "value")]
    rows += more
    columns = ANALYSES["causal"].table_columns
    names = ("intervention", "layer", "where", "unit", "value", "stderr")
    frame = pd.DataFrame([{"run": "a", "step": 12, "n": 16, **dict(zip(names, row, strict=True))} for row in rows])
    found = Results(run, [12], sequences, {"causal": frame[list(columns)].astype(columns)})
    table, *sentences = causal_words(found)
    return table.rows, sentences


def test_an_effect_that_cannot_be_measured_is_explained_once_and_has_no_rows(tmp_path):
    rows, sentences = told(made_up_run(tmp_path), math.nan)
    assert [row[1:] for row in rows] == [
        ("L0H1", "+0.510 ± 0.003 accuracy lost"),
        ("L0H0", "+0.500 ± 0.003 accuracy lost"),
    ]
    assert sentences == [
        "interchange: no effect to measure at 2 places, because the model does not tell apart prompts in which two"
        " values are exchanged, so there is nothing to restore"
    ]
    rows, sentences = told(made_up_run(tmp_path, "other"), 0.25)
    assert (len(rows), sentences) == (4, [])


def test_the_weaker_ones_are_said_to_be_in_the_file_that_holds_them(tmp_path):
    run = made_up_run(tmp_path)
    for sequences, name in ((256, "causal.parquet"), (16, "causal-16.parquet")):
        rows, _ = told(run, 0.25, sequences, ablations=30)
        assert rows[-1] == ("", f"and 8 weaker ones in {name}", "")


def test_a_plain_table_names_its_file_too(tmp_path, monkeypatch):
    run = made_up_run(tmp_path)
    frame = pd.DataFrame({"run": "a", "step": 12, "part": "binding"}, index=range(30))
    one = ANALYSES["circuit"]
    monkeypatch.setitem(ANALYSES._things, "toy", one.__class__("toy", "A toy.", {"part": "string"}, rows=one.rows))
    said = list(words_of("toy").say(Results(run, [12], 16, {"toy": frame})))
    assert said[-1] == "and 6 more rows in toy-16.parquet"


def test_interventions_that_change_nothing_are_counted_not_listed(tmp_path):
    nothing = [("knockout in Φ", 0, f"key<-{role}", "accuracy lost", 0.0, 0.0) for role in ("key", "value")]
    rows, sentences = told(made_up_run(tmp_path), 0.25, more=nothing)
    assert (len(rows), sentences) == (4, ["knockout in Φ: nothing changed at 2 places"])


def test_a_place_that_does_not_name_its_layer_is_told_with_it(tmp_path):
    block = [("knockout in Φ", 1, "block<-start", "accuracy lost", 0.9, 0.02)]
    rows, _ = told(made_up_run(tmp_path), 0.25, more=block)
    assert rows[0] == ("knockout in Φ", "L1 block<-start", "+0.90 ± 0.02 accuracy lost")
