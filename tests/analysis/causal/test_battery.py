"""The battery of interventions on models whose circuit is known."""

import pandas as pd
import pytest

from circuitscope.analysis.causal.battery import COLUMNS, causal_rows
from circuitscope.viz.words.causal import causal_lines
from planted import planted_conv_mamba, planted_induction, planted_task

pytestmark = pytest.mark.slow

BATCH = planted_task().batch(0, split="test", size=64)


def table(model):
    return pd.DataFrame(causal_rows(model, BATCH)).assign(run="x", step=0)[list(COLUMNS)].astype(COLUMNS)


@pytest.fixture(scope="module")
def induction():
    return table(planted_induction())


def value(frame, intervention, layer, where):
    rows = frame[(frame.intervention == intervention) & (frame.layer == layer) & (frame["where"] == where)]
    return rows.value.item()


def test_the_head_that_recalls_is_needed_and_the_idle_one_is_not(induction):
    assert value(induction, "mean ablation, later Φ frozen", 1, "L1H0") > 0.5
    assert value(induction, "mean ablation, later Φ frozen", 1, "L1H1") == pytest.approx(0)


def test_binding_acts_only_through_the_pattern_of_the_next_layer(induction):
    assert value(induction, "mean ablation, later Φ frozen", 0, "L0H0") == pytest.approx(0, abs=0.05)
    assert value(induction, "mean ablation, later Φ free", 0, "L0H0") > 0.5


def test_queries_need_values_in_the_second_layer(induction):
    assert value(induction, "knockout in Φ", 1, "query<-value") > 0.9
    assert value(induction, "knockout in Φ", 1, "query<-filler") == pytest.approx(0)


def test_the_binding_sits_at_the_values_before_the_last_layer(induction):
    assert value(induction, "interchange", 1, "blocks.1.hook_resid_pre at value") > 0.9
    assert value(induction, "interchange", 1, "blocks.1.hook_resid_pre at filler") == pytest.approx(0, abs=0.05)


def test_the_strongest_come_first_on_screen(induction):
    lines = list(causal_lines(induction, "causal-16.parquet", most=5))
    assert len(lines) == 6
    assert lines[-1][1] == f"and {len(induction) - 5} weaker ones in causal-16.parquet"
    shown = [abs(float(line[2].split()[0])) for line in lines[:-1]]
    assert shown == sorted(shown, reverse=True)


def test_channels_are_taken_in_groups():
    frame = table(planted_conv_mamba(vocab=64))
    groups = frame[frame.intervention.str.startswith("mean")]["where"].unique().tolist()
    assert groups == ["L0", "L0, 12 channels strongest in recall", "L0, the other 116"]
    assert value(frame, "mean ablation, later Φ frozen", 0, "L0") > 0.9
