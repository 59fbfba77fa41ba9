"""Which curves of a run are looked at: where a score ends highest, by head or by whole layer."""

import json
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from circuitscope.analysis.causal.interventions import Effect
from circuitscope.analysis.causal.parts import Circuit, Part
from circuitscope.analysis.phases.detection import transitions
from circuitscope.analysis.phases.timeline import Timeline, curves_of, epoch_steps, loss_bump
from circuitscope.analysis.phases.verdict import accuracy_level, loss_level, verdict
from circuitscope.analysis.registry import ANALYSES
from circuitscope.analysis.scores.curves import at_places, place_name, strongest
from circuitscope.config import RunConfig
from circuitscope.config.rate import learning_time
from circuitscope.errors import UserError
from circuitscope.runs.run import Run
from circuitscope.viz.words.phases import timeline_lines
from circuitscope.zoom import zoom_in

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


def test_the_curve_of_a_part_of_the_circuit_takes_the_place_of_the_highest(tmp_path):
    """Seen on a real run: Mamba's scan reads one position after the value, and the timeline showed another matrix."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text(RunConfig.build("mamba", "mqar").dump())
    held = {"split": "validation", "loss": 1.0, "accuracy": 0.5, "loss_per_batch": [1.0], "accuracy_per_batch": [0.5]}
    lines = [json.dumps({"step": step, **held}) + "\n" for step in STEPS]
    (tmp_path / "run" / "metrics.jsonl").write_text("".join(lines))
    frame = table(
        ("recall", 0, None, "composed", "channel", [0, 0.2, 0.5]),
        ("recall+1", 0, None, "ssm", "channel", [0, 0.1, 0.4]),
    )
    recall = replace(part("recall", "recall+1", 0, 0.9), head=None, factor="ssm")
    circuit = Circuit([recall], None, recall, None, 0.25)
    run = Run(tmp_path / "run")
    assert curves_of(run, frame, circuit)["recall+1 L0 ssm"].values.tolist() == [0, 0.1, 0.4]
    assert "recall L0 composed" not in curves_of(run, frame, circuit)
    assert curves_of(run, frame)["recall L0 composed"].values.tolist() == [0, 0.2, 0.5]


def test_after_a_zoom_loss_and_accuracy_come_from_the_checkpoints(tmp_path):
    """Seen on a real run: evaluations every 50 steps were used though every dense checkpoint was scored."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text(RunConfig.build("attention", "mqar").dump())
    held = {"split": "validation", "loss": 1.0, "accuracy": 0.5, "loss_per_batch": [1.0], "accuracy_per_batch": [0.5]}
    lines = [json.dumps({"step": step, **held}) + "\n" for step in (0, 200)]
    (tmp_path / "run" / "metrics.jsonl").write_text("".join(lines))
    frame = table(("loss", None, None, "model", None, [3, 2, 1]), ("accuracy", None, None, "model", None, [0, 0.5, 1]))
    assert curves_of(Run(tmp_path / "run"), frame)["loss"].values.tolist() == [3, 2, 1]
    assert curves_of(Run(tmp_path / "run"))["loss"].values.tolist() == [1, 1]


def test_time_is_the_sum_of_the_learning_rates():
    config = RunConfig.build("attention", "mqar", steps=100, warmup=0.1, lr=1.0)
    assert learning_time([0, 10, 20], config.train) == pytest.approx([0, 5.5, 15.5])


EVENTS = np.linspace(0, 1500, 31)


def rises_at(step):
    return transitions(EVENTS, 1 / (1 + np.exp(-(EVENTS - step) / 20)), draws=20)


def part(step, edges, layer, lost):
    return Part(step, edges, layer, 0, "pattern", True, 0.9, 0.01, (0, 0.9), Effect(1.0, 1 - lost, lost, 0.01, 64))


def made_up(**found):
    judged = verdict(EVENTS, np.zeros(31), np.zeros(31), 0.25)
    return Timeline("run", found, judged, "accuracy", (612.5, 1225.0))


def test_only_what_a_knockout_backs_enters_the_order():
    """Seen on a real run: binding "rises, then recall" though cutting the binding edges cost 0.00."""
    found = {
        "binding L0H0": rises_at(400),
        "recall L1H0": rises_at(700),
        "accuracy": rises_at(900),
        "loss": rises_at(900),
    }
    timeline = made_up(**found)
    recall = part("recall", "recall", 1, 0.9)
    circuit = Circuit([part("binding", "binding", 0, 0.0), recall], None, recall, None, 0.25)
    assert timeline.order(circuit).events[0].name == "recall L1H0"
    assert "binding L0H0" not in [e.name for e in timeline.order(circuit).events]
    binding = part("binding", "binding", 0, 0.9)
    both = Circuit([binding, recall], binding, recall, None, 0.25)
    assert [e.name for e in timeline.order(both).events][:2] == ["binding L0H0", "recall L1H0"]
    assert {e.name for e in timeline.order().events} == {"loss", "accuracy"}


def test_an_epoch_that_begins_within_a_transition_is_marked():
    timeline = made_up(loss=rises_at(610), accuracy=rises_at(900))
    assert [row["epoch"] for row in timeline.rows()][:1] == [612.5]
    assert np.isnan([row["epoch"] for row in timeline.rows()][1])
    config = RunConfig.build("attention", "mqar", examples=640, batch_size=64, steps=25)
    assert epoch_steps(config) == (10, 20)
    assert epoch_steps(RunConfig.build("attention", "mqar", examples=None)) == ()


@pytest.mark.parametrize("boundary", [602, 612.5, 623])
def test_an_epoch_between_the_values_around_a_jump_is_marked_wherever_it_is(boundary):
    """The jump is between the values at steps 600 and 625; when within these the epoch begins is not known."""
    steps = np.linspace(0, 1500, 61)
    values = np.where(steps > 610, 1.0, 3.0) + 0.02 * np.random.default_rng(0).standard_normal(61)
    found = transitions(steps, values)
    timeline = replace(made_up(loss=found, accuracy=found), epochs=(boundary, 1400.0))
    assert [row["epoch"] for row in timeline.rows()] == [boundary, boundary]


def falls_to(level, step=400):
    values = 4.85 - (4.85 - level) / (1 + np.exp(-(EVENTS - step) / 20))
    return transitions(EVENTS, values, draws=20, level=loss_level(np.log(64)))


def test_what_needs_no_circuit_is_marked_in_the_table_and_in_words_and_is_left_out_of_the_order():
    rise = 0.24 / (1 + np.exp(-(EVENTS - 700) / 20))
    rises = transitions(EVENTS, rise, draws=20, level=accuracy_level(0.25))
    timeline = made_up(loss=falls_to(np.log(64)), accuracy=rises)
    assert [row["ends_at"] for row in timeline.rows()] == ["context-free", "any value"]
    assert timeline.order().events == ()
    assert set(str(timeline.order()).splitlines()) == {
        "loss: no transition beyond a level that needs no circuit",
        "accuracy: no transition beyond a level that needs no circuit",
    }
    said = "\n".join(timeline_lines(timeline))
    assert "; context-free: it learns which tokens are answers" in said
    assert "; it ends at the accuracy of any value of the context" in said
    through = made_up(loss=falls_to(1.0), accuracy=rises_at(700))
    assert [row["ends_at"] for row in through.rows()] == [None, None]
    assert {e.name for e in through.order().events} == {"loss", "accuracy"}


def test_the_curves_of_a_run_know_the_levels_of_its_task(tmp_path):
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    (tmp_path / "run" / "checkpoints" / "step-00000100.safetensors").write_bytes(b"")
    (tmp_path / "run" / "config.yaml").write_text(RunConfig.build("attention", "mqar", vocab_size=128, pairs=4).dump())
    lines = []
    for step in EVENTS:
        loss = 4.85 - 0.69 / (1 + np.exp(-(step - 400) / 20))
        row = {"step": int(step), "split": "validation", "loss": loss, "accuracy": 0.02}
        lines.append(json.dumps({**row, "loss_per_batch": [loss], "accuracy_per_batch": [0.02]}) + "\n")
    (tmp_path / "run" / "metrics.jsonl").write_text("".join(lines))
    run = Run(tmp_path / "run")
    found = curves_of(run)
    assert found["loss"].level == loss_level(np.log(64))
    assert found["accuracy"].level == accuracy_level(0.25)
    assert loss_bump(run) is None
    with pytest.raises(UserError, match="no lower than an answer that ignores the sequence"):
        zoom_in(run)
