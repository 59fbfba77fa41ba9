"""What the detector says of curves of real runs, which studies/transition_power keeps."""

from pathlib import Path

import pandas as pd
import pytest

from circuitscope.analysis.phases.detection import transitions
from circuitscope.analysis.phases.verdict import accuracy_level, loss_level, verdict
from circuitscope.tasks import MQAR

STUDY = Path(__file__).parents[3] / "studies" / "transition_power"
TASK = MQAR(length=16, pairs=4, vocab_size=128)


@pytest.fixture(scope="module")
def curves():
    return dict(iter(pd.read_csv(STUDY / "real_curves.csv").groupby("run")))


def judged(curve):
    found = transitions(curve.step, curve.loss, clock=curve.clock, level=loss_level(TASK.context_free), draws=20)
    return verdict(curve.step, curve.loss, curve.accuracy, TASK.chance, found=found).kind


@pytest.mark.parametrize("run", ["shuffled 000", "shuffled 010", "shuffled 015", "shuffled 040"])
def test_with_shuffled_labels_there_is_no_bump(curves, run):
    assert judged(curves[run]) == "context-free"


@pytest.mark.parametrize("run", ["one layer 001", "one layer 006"])
def test_one_layer_of_attention_has_a_bump_without_accuracy_and_its_accuracy_ends_at_any_value(curves, run):
    curve = curves[run]
    assert judged(curve) == "bump without accuracy"
    level = accuracy_level(TASK.chance)
    found = transitions(curve.step, curve.accuracy, clock=curve.clock, level=level, draws=20)
    assert {t.ends_at for t in found} == {level.name}


@pytest.mark.parametrize("run", ["deltanet 007", "two layers 003", "mamba 009"])
def test_where_recall_forms_there_is_a_bump_with_accuracy(curves, run):
    assert judged(curves[run]) == "bump with accuracy"
