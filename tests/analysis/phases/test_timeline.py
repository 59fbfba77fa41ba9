"""Which curves of a run are looked at: where a score ends highest, by head or by whole layer."""

import json

import numpy as np
import pandas as pd
import pytest

from circuitscope.analysis.phases.timeline import at_places, curves_of, place_name, strongest
from circuitscope.analysis.registry import ANALYSES
from circuitscope.config import RunConfig
from circuitscope.runs.run import Run

STEPS = [0, 100, 200]


def table(*places: tuple) -> pd.DataFrame:
    """(score, layer, head, factor, unit, values by step)."""
    columns = ANALYSES["scores"].table_columns
    rows = [
        {"run": "x", "step": step, "layer": layer, "head": head, "factor": factor, "unit": unit, "score": score,
         "weighting": "abs", "value": value, "stderr": 0.0, "n": 8}
        for score, layer, head, factor, unit, values in places
        for step, value in zip(STEPS, values, strict=True)
    ]  # fmt: skip
    return pd.DataFrame(rows, columns=list(columns)).astype(columns)


@pytest.mark.parametrize("factor", ["pattern", "linear_attention", "delta", "anything"])
def test_heads_are_places_whatever_their_matrix_is_called(factor):
    frame = table(("recall", 0, None, "conv", "channel", [0, 0, 0.2]), ("recall", 1, 0, factor, "head", [0, 0.1, 0.9]))
    place = strongest(frame, "recall")
    assert (place_name(place), place.factor) == ("L1H0", factor)


def test_layers_of_heads_and_single_channels_are_no_places():
    frame = table(
        ("recall", 0, None, "delta", "head", [1, 1, 1]),
        ("recall", 0, 0, "delta", "head", [0, 0, 0.1]),
        ("recall", 0, None, "conv", "channel", [0, 0, 0.2]),
        ("recall", 0, 7, "conv", "channel", [1, 1, 1]),
        ("recall", None, None, "model", None, [0, 0, 0.3]),
    )
    assert sorted({place_name(row) for _, row in at_places(frame, "recall").iterrows()}) == ["L0 conv", "L0H0", "model"]
    assert strongest(frame, "recall").value == pytest.approx(0.3)
    assert strongest(frame, "recall", "delta").value == pytest.approx(0.1)
    assert strongest(frame, "binding") is None


def test_a_model_that_diverged_has_no_strongest_place():
    assert strongest(table(("recall", 0, 0, "pattern", "head", [0.1, np.nan, np.nan])), "recall") is None


def test_the_single_head_of_a_mixer_is_on_the_timeline(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text(RunConfig.build("attention", "mqar").dump())
    held = {"split": "validation", "loss": 1.0, "accuracy": 0.5, "loss_per_batch": [1.0], "accuracy_per_batch": [0.5]}
    metrics = [{"step": step, **held} for step in STEPS]
    (tmp_path / "run" / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in metrics))
    frame = table(("recall", 1, 0, "linear_attention", "head", [0, 0.1, 0.9]))
    curves = curves_of(Run(tmp_path / "run"), frame)
    assert curves["recall L1H0"].values.tolist() == [0, 0.1, 0.9]
