"""The probe figure shows what a probe reads beside its control and chance, for one run and for several."""

import numpy as np
import pandas as pd
import pytest
from laid_out import assert_legend_apart, entries
from made_up_runs import probe_table

from circuitscope.errors import UserError
from circuitscope.viz.probes import probes
from circuitscope.viz.step_axis import StepAxis
from circuitscope.viz.words.probes import control_lines

HOOKS = ["hook_embed", "blocks.0.hook_resid_post", "blocks.1.hook_resid_post"]
STEPS = [0, 100, 200]


def line(axes, label: str):
    (found,) = [x for x in axes.lines if x.get_label() == label]
    return found


def test_control_and_chance_are_drawn_and_named():
    figure = probes(probe_table(HOOKS, ["key", "value"], STEPS))
    by_hook, by_step, *_ = figure.axes
    for axes, label in ((by_hook, "value"), (by_step, "value, L1 resid_post")):
        control = line(axes, f"_{label}, control")
        np.testing.assert_allclose(control.get_ydata(), 0.28)
        assert control.get_color() == line(axes, label).get_color()
        assert control.get_alpha() < 0.6
        assert control.get_linewidth() < line(axes, label).get_linewidth()
        assert [x.get_ydata()[0] for x in axes.lines if x.get_linestyle() == ":" and len(x.get_xdata()) == 2] == [0.25]
    assert [t.get_text() for t in by_step.texts] == ["chance 0.25"]
    assert "pale: control" in entries(figure)


def rings(axes) -> list[list[float]]:
    """x and y of every point with a ring."""
    found = [x for x in axes.lines if x.get_label() == "_no better than its control"]
    return [list(point) for x in found for point in zip(*x.get_data(), strict=True)]


def test_points_where_the_control_is_as_good_have_a_ring_and_others_none():
    table = probe_table(HOOKS[:1], ["key"], STEPS)  # 0.3, 0.6, 0.9 ± 0.05 beside 0.28
    by_hook, by_step, *_ = probes(table).axes
    assert rings(by_hook) == []
    assert rings(by_step) == [[0, 0.3]]
    figure = probes(table.assign(control=0.2))
    assert not any(rings(axes) for axes in figure.axes)
    assert "ring: no better than its control" not in entries(figure)


def test_the_words_name_every_place_where_the_control_is_as_good():
    table = probe_table(HOOKS[:2], ["key"], STEPS)
    assert list(control_lines(table[table.step == 200])) == []
    lines = list(control_lines(table[table.step == 0]))
    assert [line.partition(":")[0] for line in lines] == ["hook_embed at key", "blocks.0.hook_resid_post at key"]
    assert "0.280 beside 0.300, 95% interval 0.250 to 0.350" in lines[0]
    assert list(control_lines(table.assign(control=float("nan")))) == []


def test_a_probe_without_a_control_names_none():
    table = probe_table(HOOKS, ["key"], STEPS).assign(control=float("nan"), selectivity=float("nan"))
    figure = probes(table)
    assert "pale: control" not in entries(figure)
    assert not [x for axes in figure.axes for x in axes.lines if "control" in x.get_label()]


def test_the_legend_has_an_entry_for_each_role_and_hook_and_lies_apart():
    figure = probes(probe_table(HOOKS, ["key", "value"], STEPS), bump=(50, 100))
    assert entries(figure) == [
        *("at key", "at value", "embed", "L0 resid_post", "L1 resid_post"),
        *("pale: control", "ring: no better than its control", "loss bump", "bands: 95% interval"),
    ]
    assert_legend_apart(figure)


def test_hooks_beyond_the_line_styles_have_markers_of_their_own():
    hooks = [f"blocks.{i}.hook_resid_post" for i in range(6)]
    by_step = probes(probe_table(hooks, ["query"], STEPS)).axes[1]
    lines = [x for x in by_step.lines if x.get_label().startswith("query")]
    assert len({(x.get_linestyle(), x.get_marker()) for x in lines}) == 6
    assert len({x.get_color() for x in lines}) == 6  # of one role, colours show hooks as well


def several(count: int, steps=STEPS) -> pd.DataFrame:
    return pd.concat(
        [
            probe_table(HOOKS[: 2 + i % 2], ["query"], steps, run=f"a-run-with-a-name-{i}", chance=1 / (2 + i))
            for i in range(count)
        ]
    )


def test_six_runs_are_a_panel_each_with_one_legend():
    bumps = {f"a-run-with-a-name-{i}": (50, 100) if i else None for i in range(6)}
    figure = probes(several(6), bump=bumps)
    panels = [axes for axes in figure.axes if axes.get_visible()]
    assert [axes.get_title() for axes in panels] == list(bumps)
    assert [len(axes.patches) for axes in panels] == [0, 1, 1, 1, 1, 1]
    assert [axes.texts[0].get_text() for axes in panels[:3]] == ["chance 0.5", "chance 0.333", "chance 0.25"]
    np.testing.assert_allclose(line(panels[1], "query, L1 resid_post").get_ydata(), [0.3, 0.6, 0.9])
    assert_legend_apart(figure)
    assert len(figure.data) == len(several(6))


def test_runs_with_one_checkpoint_are_drawn_by_hook():
    figure = probes(several(2, steps=[200]))
    first, second = figure.axes
    assert [t.get_text() for t in first.get_xticklabels()] == ["embed", "L0 resid_post"]
    assert [t.get_text() for t in second.get_xticklabels()] == ["embed", "L0 resid_post", "L1 resid_post"]


def test_steps_can_be_limited_and_on_a_log_axis():
    _, by_step, _, below = probes(probe_table(HOOKS, ["key"], STEPS), axis=StepAxis(log=True, first=100)).axes
    assert by_step.get_xscale() == below.get_xscale() == "log"
    with pytest.raises(UserError, match="steps are 0 to 200"):
        probes(probe_table(HOOKS, ["key"], STEPS), axis=StepAxis(first=300))
