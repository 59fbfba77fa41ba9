"""What analysis says of models that were really trained. The runs are shared with tests/learning."""

import pytest

from circuitscope.analysis.checkpoints.runner import analyze, circuits
from circuitscope.analysis.phases.timeline import timeline
from circuitscope.analysis.scores.curves import strongest

pytestmark = pytest.mark.slow


def at_end(frame, score, **place):
    rows = frame[(frame.step == frame.step.max()) & (frame.score == score)]
    for column, value in place.items():
        rows = rows[rows[column] == value]
    return rows.value.item()


@pytest.fixture(scope="module")
def default_scores(default_run):
    return analyze(default_run)


def test_two_layers_bind_in_the_first_and_recall_in_the_second(default_run, default_scores):
    assert at_end(default_scores, "binding", layer=0) > 0.8
    assert at_end(default_scores, "recall", layer=1) > 0.8
    assert strongest(default_scores, "binding").layer == 0
    assert strongest(default_scores, "recall").layer == 1
    found = circuits(default_run)[1500]
    assert (found.binding.place, found.recall.place) == ("L0H0", "L1H0")
    assert found.binding.effect.share > 0.7
    assert found.recall.effect.share > 0.9


def test_neither_is_there_at_the_start(default_scores):
    first = default_scores[default_scores.step == 0]
    at_start = first[first.score.isin(["recall", "binding"])].set_index(["score", "layer"]).value
    assert at_start["recall", 1] < 0.15  # even weight over what stands before a query
    assert at_start["binding", 0] < 0.35  # over the one to seven positions before a value


def test_the_order_of_events_is_reported(default_run, default_scores):
    when = timeline(default_run, default_scores)
    assert when.verdict.kind == "bump with accuracy"
    rises = {name: max(found, key=lambda t: abs(t.size)) for name, found in when.found.items() if found}
    assert rises["recall L1H0"].size > 0.5
    assert rises["accuracy"].size > 0.5
    assert rises["loss"].size < 0
    happened = {event.name: event.step for event in when.order(circuits(default_run)[1500]).events}
    assert happened["binding L0H0"] < happened["recall L1H0"]
    assert list(happened.values()) == sorted(happened.values())
    assert {"loss", "accuracy"} <= happened.keys()


def test_one_layer_finds_the_values_but_not_the_match(one_layer_run):
    frame = analyze(one_layer_run)
    assert at_end(frame, "value", layer=0) > 0.8
    assert at_end(frame, "recall", layer=0) == pytest.approx(0.25, abs=0.05)
    assert timeline(one_layer_run, frame).verdict.kind != "bump with accuracy"
    found = circuits(one_layer_run)[600]
    assert not found.found
    assert "no recall to explain" in found.sentences()[0]


def test_one_layer_of_mamba_shifts_by_its_conv_and_recalls_by_its_scan(mamba_run):
    found = circuits(mamba_run, sequences=128)[mamba_run.steps[-1]]
    assert found.found
    assert (found.binding.place, found.recall.place) == ("L0 conv", "L0 ssm")
    assert found.binding.effect.share > 0.7
    assert found.recall.effect.share > 0.7
    assert "the key gets there by the conv, not by ssm" in found.sentences()[-1]
