"""A score is followed on the edges and at the place that the circuit names, or where it ends highest."""

from dataclasses import replace

import pandas as pd
import pytest

import circuitscope as cs
from circuitscope.analysis.causal.circuit import find_circuit
from circuitscope.analysis.causal.interventions import Effect
from circuitscope.analysis.causal.parts import Circuit
from circuitscope.analysis.registry import ANALYSES
from circuitscope.analysis.scores.curves import curve_of_part, followed
from circuitscope.analysis.scores.held_out import HeldOut
from circuitscope.analysis.scores.rows import every_score
from planted import planted_induction, planted_late_mamba, planted_task

TASK = planted_task()
DATA = HeldOut(TASK, longest=TASK.max_length, sequences=32)


def table(model: cs.HookedLM) -> pd.DataFrame:
    """The table of scores of one checkpoint."""
    columns = ANALYSES["scores"].table_columns
    rows = [{"run": "x", "step": 0, **row} for row in every_score(model, DATA)]
    return pd.DataFrame(rows, columns=list(columns)).astype(columns)


@pytest.fixture(scope="module")
def late() -> tuple[pd.DataFrame, Circuit]:
    model = planted_late_mamba()
    return table(model), find_circuit(model, DATA.own)


def test_the_planted_steps_are_found_one_position_after_the_value(late):
    _, circuit = late
    assert circuit.found
    assert [curve_of_part(part) for part in circuit.parts] == ["binding+1 L0 conv", "recall+1 L0 ssm"]
    assert (circuit.carry.edges, circuit.carry.place) == ("carry+1", "L0 conv")


def test_curves_are_those_of_the_circuit_and_have_the_weight_that_it_found(late):
    scores, circuit = late
    for part in circuit.parts:
        found = followed(scores, part.step, circuit)
        assert found.by_circuit
        assert (found.score, found.edges, found.where) == (part.step, part.edges, part.place)
        assert found.name == curve_of_part(part)
        assert found.rows.value.tolist() == pytest.approx([part.weight], abs=1e-6)
    assert followed(scores, "recall", circuit).rows.value.item() > 0.9
    assert followed(scores, "value", circuit).edges == "value"  # no part of the circuit


def test_without_a_circuit_a_score_is_on_its_own_edges_where_it_ends_highest(late):
    scores, _ = late
    found = followed(scores, "recall")
    assert (found.edges, found.by_circuit, found.chosen) == ("recall", False, "highest")
    assert found.where == "L0 composed"
    assert found.rows.value.item() < 0.4  # where the scan itself has 0.99 on the position after the value
    assert followed(scores, "nothing") is None


def test_a_circuit_that_does_not_recall_names_no_curve(late):
    scores, circuit = late
    parts = [part for part in circuit.tried if part.edges == "recall+1"]
    unsolved = Circuit(parts, None, parts[0], None, chance=1.0)
    assert not followed(scores, "recall", unsolved).by_circuit


def test_a_part_without_rows_in_an_older_table_leaves_the_score_where_it_ends_highest(late):
    scores, circuit = late
    older = scores[~scores.score.str.contains("+", regex=False)]
    assert not followed(older, "recall", circuit).by_circuit


def test_heads_of_attention_are_followed_by_head_and_not_where_another_looks_the_same():
    model = planted_induction(mimic=True)
    circuit = find_circuit(model, DATA.own)
    found = followed(table(model), "recall", circuit)
    assert (found.where, found.edges, found.by_circuit) == ("L1H0", "recall", True)


@pytest.mark.slow
@pytest.mark.parametrize("name", cs.models.names())
def test_every_place_that_a_circuit_can_name_has_its_curve_in_every_preset(name):
    model = cs.model(name, d_model=32, vocab_size=64, max_length=32).eval()
    scores = table(model)
    for tried in find_circuit(model, DATA.own).tried:
        for offset in (0, 1, 2, 3):
            edges = f"{tried.step}+{offset}" if offset else tried.step
            part = replace(tried, edges=edges, effect=Effect(1, 0, 1, 0, 8))
            circuit = Circuit([part], part, None, None, 0.25)
            assert followed(scores, tried.step, circuit).name == curve_of_part(part)
