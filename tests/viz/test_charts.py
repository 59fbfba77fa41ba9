"""What the report draws of analyses: the numbers of their tables, few enough for a page."""

import json

import numpy as np
import pandas as pd
import pytest
from made_up_runs import decay_table, made_up_run

from circuitscope.analysis.causal.battery import COLUMNS as CAUSAL
from circuitscope.analysis.checkpoints.results import Results
from circuitscope.analysis.probes.over_run import COLUMNS as PROBES
from circuitscope.viz.charts.kinds import AtSteps, Bars, OverSteps, told
from circuitscope.viz.charts.probes import probe_charts
from circuitscope.viz.registry import CHARTS


def charts_of(tmp_path, name, frame):
    run = made_up_run(tmp_path)
    return list(CHARTS[name](Results(run, sorted(set(frame.step)), 256, {name: frame})))


def test_decay_has_the_profile_of_each_layer_by_lag_and_the_rates_over_steps(tmp_path):
    steps = range(0, 4000, 100)
    table = decay_table({layer: dict.fromkeys(steps, 0.1 * (layer + 1)) for layer in (0, 1)}, length=200)
    first, second, rates = charts_of(tmp_path, "decay", table)
    for layer, chart in enumerate((first, second)):
        assert isinstance(chart, AtSteps)
        assert chart.title.startswith(f"L{layer} m(δ)")
        assert (chart.at[0], chart.at[-1], chart.step[0], chart.step[-1]) == (0, 199, 0, 3900)
        assert len(chart.at) == 64
        assert len(chart.step) == len(chart.values) == 24
        expected = 2 * np.exp(-0.1 * (layer + 1) * np.array(chart.at))
        assert chart.values[5] == pytest.approx(expected, rel=1e-4)
    assert isinstance(rates, OverSteps)
    assert [line.name for line in rates.lines] == ["L0", "L1"]
    line = rates.lines[1]
    assert list(line.step) == list(steps)
    assert set(line.value) == {0.2}
    assert (set(line.low), set(line.high)) == ({0.1}, {0.4})
    assert len(json.dumps([told(c) for c in (first, second, rates)])) < 60_000


def test_a_profile_of_zeros_is_not_drawn_and_single_zeros_are_gaps(tmp_path):
    table = decay_table({0: {0: 0.1}, 1: {0: 0.1}}, length=4)
    profile = table.quantity == "profile_median"
    table.loc[profile & (table.layer == 1), "value"] = 0.0
    table.loc[profile & (table.lag == 2), "value"] = 0.0
    profiles = [chart for chart in charts_of(tmp_path, "decay", table) if isinstance(chart, AtSteps)]
    assert [chart.title[:2] for chart in profiles] == ["L0"]
    assert [value is None for value in profiles[0].values[0]] == [False, False, True, False]


def test_causal_effects_are_bars_by_intervention_the_strongest_first(tmp_path):
    effects = [("knockout in Φ", f"query<-role{i}", 0.1 * i) for i in range(10)]
    effects += [("interchange", "blocks.0.hook_resid_pre at value", -0.3), ("interchange", "x", np.nan)]
    rows = [
        {"run": "a", "step": 9, "intervention": kind, "layer": 0, "where": where, "unit": "accuracy lost",
         "value": value, "stderr": 0.01, "n": 8}
        for kind, where, value in effects
    ]  # fmt: skip
    rows.append({**rows[0], "step": 3, "value": 5.0})
    frame = pd.DataFrame(rows).astype({"run": "string", "step": "int64", **CAUSAL})
    knockouts, interchange = charts_of(tmp_path, "causal", frame)
    assert isinstance(knockouts, Bars)
    assert knockouts.title == "knockout in Φ: accuracy lost"
    assert knockouts.bars[0] == ("L0 query<-role9", 0.9, 0.01)
    assert [value for _, value, _ in knockouts.bars] == pytest.approx([0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2])
    assert knockouts.rest == "and 2 weaker ones"
    assert list(interchange.bars) == [("L0 resid_pre at value", -0.3, 0.01)]


def probe_table(**columns):
    """Two hooks at two steps."""
    base = {"run": "a", "layer": 0, "role": "query", "at": "own", "probe": "p", "target": "t", "model": "m"}
    base |= {"metric": "accuracy", "low": 0.1, "high": 0.9, "control": 0.2, "selectivity": 0.3, "majority": 0.5}
    base |= {"chance": 0.25, "n_train": 8, "n_test": 4, "directions": 1, "left": np.nan, "model_accuracy": np.nan}
    base |= {"lost": np.nan, "lost_stderr": np.nan, "lost_control": np.nan, "lost_random": np.nan}
    rows = [
        {**base, "step": step, "hook": f"blocks.{layer}.hook_resid_post", "accuracy": 0.1 * step + layer / 2, **columns}
        for step in (0, 3)
        for layer in (0, 1)
    ]
    return pd.DataFrame(rows, columns=list(PROBES)).astype(PROBES)


def test_a_probe_has_curves_by_hook_and_role_with_the_chance_level():
    accuracy, selectivity = probe_charts(probe_table())
    assert [line.name for line in accuracy.lines] == ["query, L0 resid_post", "query, L1 resid_post"]
    assert accuracy.lines[1].value == pytest.approx([0.5, 0.8])
    assert (accuracy.lines[1].low, accuracy.lines[1].high) == ([0.1, 0.1], [0.9, 0.9])
    assert accuracy.levels == [("chance", 0.25)]
    assert selectivity.lines[0].value == [0.3, 0.3]
    removed = list(probe_charts(probe_table(selectivity=np.nan, lost=0.4, lost_stderr=0.02)))[1]
    assert list(removed.bars) == [(f"query, L{layer} resid_post", 0.4, 0.02) for layer in (0, 1)]


def test_a_chart_is_told_with_its_kind_as_plain_data():
    assert told(Bars("title", [("a", 1.0, None)])) == {
        "kind": "Bars", "title": "title", "bars": [("a", 1.0, None)], "rest": "",
    }  # fmt: skip
