"""The scores figure shows the values of the table, place by place."""

import numpy as np
import pytest
from laid_out import assert_legend_apart, entries
from made_up_runs import made_up_circuit, score_table

from circuitscope.errors import UserError
from circuitscope.viz.scores import NAMED, scores
from circuitscope.viz.step_axis import StepAxis

STEPS = [0, 500, 1000]


def drawn(axes) -> dict[str, list[float]]:
    return {x.get_label(): list(x.get_ydata()) for x in axes.lines}


def shown(figure) -> dict:
    return {a.get_title().split(":")[0].split(",")[0]: a for a in figure.axes if a.get_visible()}


def test_every_place_of_one_run_is_drawn_in_the_panel_of_its_score():
    table = score_table(
        {
            ("recall", 0, 0, "pattern"): [0.1, 0.2, 0.3],
            ("recall", 1, 0, "pattern"): [0.2, 0.4, 0.9],
            ("binding", 0, 0, "pattern"): [0.3, 0.5, 0.7],
            ("recall", 1, None, "pattern"): [9.0, 9.0, 9.0],  # the heads of a layer together: not a place of attention
        },
        STEPS,
    )
    found = shown(scores({"run": table}))
    assert list(found) == ["binding", "recall"]
    assert drawn(found["recall"]) == {"L0H0": [0.1, 0.2, 0.3], "L1H0": [0.2, 0.4, 0.9]}
    assert drawn(found["binding"]) == {"L0H0": [0.3, 0.5, 0.7]}
    np.testing.assert_array_equal(found["recall"].lines[0].get_xdata(), STEPS)
    points = found["recall"].collections[1].get_paths()[0].vertices
    at = points[points[:, 0] == 1000, 1]
    assert (at.min(), at.max()) == pytest.approx((0.88, 0.92))


def test_layers_of_channels_are_drawn_whole_by_factor():
    table = score_table(
        {
            ("recall", 0, None, "conv"): [0.1, 0.1, 0.1],
            ("recall", 0, None, "ssm"): [0.1, 0.3, 0.4],
            ("recall", 0, 17, "ssm"): [0.9, 0.9, 0.9],
        },
        STEPS,
    )
    assert drawn(shown(scores({"run": table}))["recall"]) == {
        "L0 conv": [0.1, 0.1, 0.1],
        "L0 ssm": [0.1, 0.3, 0.4],
    }


def test_the_single_head_of_any_mixer_is_drawn():
    table = score_table(
        {("recall", 0, None, "conv"): [0.1, 0.1, 0.1], ("recall", 0, 0, "delta"): [0.1, 0.3, 0.4]}, STEPS
    )
    assert drawn(shown(scores({"run": table}))["recall"]) == {"L0H0": [0.1, 0.3, 0.4], "L0 conv": [0.1, 0.1, 0.1]}


def test_beyond_six_places_the_weak_ones_are_grey():
    places = {("recall", 0, head, "pattern"): [0.0, 0.0, 0.1 * head] for head in range(9)}
    figure = scores({"run": score_table(places, STEPS)})
    (axes,) = shown(figure).values()
    grey = [x for x in axes.lines if x.get_color() == "0.75"]
    assert len(grey) == 9 - NAMED
    assert max(x.get_ydata()[-1] for x in grey) == pytest.approx(0.2)
    assert entries(figure) == [*(f"L0H{h}" for h in range(3, 9)), "3 other places", "bands: ± a standard error"]


def test_a_place_has_one_colour_in_all_panels_and_one_entry_in_one_legend():
    recall = {("recall", 0, head, "pattern"): [0.0, 0.0, 0.1 * head] for head in range(9)}
    binding = {("binding", 0, head, "pattern"): [0.0, 0.0, 0.1 * (8 - head)] for head in range(9)}
    figure = scores({"run": score_table(recall | binding, STEPS)})
    by_panel = [{x.get_label(): x.get_color() for x in axes.lines} for axes in shown(figure).values()]
    assert by_panel[0] == by_panel[1]
    coloured = [place for place, colour in by_panel[0].items() if colour != "0.75"]
    assert sorted(coloured) == ["L0H0", "L0H1", "L0H2", "L0H6", "L0H7", "L0H8"]  # the highest of either score
    assert len({by_panel[0][place] for place in coloured}) == NAMED
    assert len(entries(figure)) == NAMED + 2
    assert_legend_apart(figure)


def test_heads_of_two_factors_are_told_apart():
    table = score_table(
        {("recall", 0, 0, "pattern"): [0.1, 0.2, 0.3], ("recall", 0, 0, "delta"): [0.2, 0.3, 0.4]}, STEPS
    )
    assert drawn(shown(scores({"run": table}))["recall"]) == {
        "L0H0 pattern": [0.1, 0.2, 0.3],
        "L0H0 delta": [0.2, 0.3, 0.4],
    }


def test_six_runs_have_one_legend_and_their_places_beside_the_panel():
    tables = {
        f"a-run-with-a-name-{i}": score_table(
            {(name, i % 2, 0, "pattern"): [0.1, 0.2, 0.1 * i] for name in ("recall", "binding", "value", "induction")},
            STEPS,
        )
        for i in range(6)
    }
    figure = scores(tables)
    assert entries(figure) == [*tables, "bands: ± a standard error"]
    assert_legend_apart(figure)
    for axes in shown(figure).values():
        colours = [x.get_color() for x in axes.lines]
        assert len(set(colours)) == 6
        assert [t.get_text() for t in axes.texts] == ["L1H0", "L0H0"] * 3  # the highest first
        assert [t.get_color() for t in axes.texts] == colours[::-1]


def test_steps_can_be_limited_and_on_a_log_axis():
    table = score_table({("recall", 0, 0, "pattern"): [0.1, 0.2, 0.3], ("value", 0, 0, "pattern"): [1, 1, 1]}, STEPS)
    for axes in shown(scores({"run": table}, axis=StepAxis(log=True, last=600))).values():
        assert axes.get_xscale() == "symlog"
        assert axes.get_xlim()[1] == pytest.approx(630)
        assert axes.get_xlabel() == "step (log scale)"


def test_of_several_runs_the_best_place_of_each_is_drawn():
    attention = {("recall", 0, 0, "pattern"): [0.5, 0.5, 0.1], ("recall", 1, 0, "pattern"): [0.2, 0.4, 0.9]}
    mamba = {("recall", 0, None, "conv"): [0.1, 0.1, 0.1], ("recall", 0, None, "ssm"): [0.1, 0.3, 0.4]}
    (axes,) = shown(scores({"a": score_table(attention, STEPS), "m": score_table(mamba, STEPS)})).values()
    assert drawn(axes) == {"a, L1H0": [0.2, 0.4, 0.9], "m, L0 ssm": [0.1, 0.3, 0.4]}


def test_scores_can_be_chosen_and_wrong_ones_are_refused():
    table = score_table({("recall", 0, 0, "pattern"): [0.1, 0.2, 0.3], ("value", 0, 0, "pattern"): [1, 1, 1]}, STEPS)
    assert list(shown(scores({"run": table}, names=["value"]))) == ["value"]
    with pytest.raises(UserError, match="did you mean 'recall'"):
        scores({"run": table}, names=["recal"])
    with pytest.raises(UserError, match="at least one run"):
        scores({})


def test_the_data_are_the_curves():
    table = score_table({("recall", 1, 0, "pattern"): [0.1, 0.2, 0.3]}, STEPS)
    data = scores({"run": table}).data
    assert list(data) == ["run", "score", "place", "step", "value", "stderr", "even"]
    curve = [["run", "recall", "L1H0", s, v, 0.02] for s, v in zip(STEPS, [0.1, 0.2, 0.3], strict=True)]
    assert data.drop(columns="even").values.tolist() == curve


def test_the_loss_bump_is_shaded_in_every_panel():
    table = score_table({("recall", 0, 0, "pattern"): [0.1, 0.2, 0.3], ("binding", 0, 0, "pattern"): [0, 0, 1]}, STEPS)
    figure = scores({"run": table}, bump={"run": (400, 700)})
    for axes in shown(figure).values():
        (span,) = axes.patches
        assert (span.get_x(), span.get_width()) == (400, 300)
    assert "loss bump, steps 400 to 700" in entries(figure)


LATE = {
    ("recall", 0, None, "ssm"): [0.0, 0.0, 0.1],
    ("recall", 0, None, "composed"): [0.1, 0.2, 0.3],
    ("recall+1", 0, None, "ssm"): [0.1, 0.5, 0.9],
    ("recall+1", 0, None, "composed"): [0.0, 0.1, 0.2],
    ("binding", 0, None, "conv"): [0.3, 0.3, 0.3],
}


def test_the_edges_that_the_circuit_names_are_drawn_and_its_place_is_thick():
    circuit = made_up_circuit(("recall", "recall+1", 0, None, "ssm"))
    figure = scores({"run": score_table(LATE, STEPS)}, circuits={"run": circuit})
    found = shown(figure)
    assert list(found) == ["binding", "recall+1"]
    assert drawn(found["recall+1"]) == {"L0 composed": [0.0, 0.1, 0.2], "L0 ssm": [0.1, 0.5, 0.9]}
    assert "1 position later" in " ".join(found["recall+1"].get_title().split())
    wide = {line.get_label(): line.get_linewidth() for line in found["recall+1"].lines}
    assert wide["L0 ssm"] > wide["L0 composed"]
    assert "thick: named by the circuit" in entries(figure)
    assert "no circuit known" not in figure.get_suptitle()
    assert set(figure.data.score) == {"recall+1", "binding"}


def test_without_a_circuit_the_edges_are_fixed_and_the_title_says_so():
    figure = scores({"run": score_table(LATE, STEPS)})
    assert drawn(shown(figure)["recall"]) == {"L0 ssm": [0.0, 0.0, 0.1], "L0 composed": [0.1, 0.2, 0.3]}
    assert figure.get_suptitle() == "run; binding and recall on fixed edges, no circuit known"
    assert "thick: named by the circuit" not in entries(figure)


def test_of_several_runs_each_has_the_edges_of_its_own_circuit():
    circuit = made_up_circuit(("recall", "recall+1", 0, None, "ssm"))
    attention = score_table({("recall", 1, 0, "pattern"): [0.2, 0.4, 0.8]}, STEPS)
    figure = scores(
        {"m": score_table(LATE, STEPS), "a": attention}, names=["recall"], circuits={"m": circuit, "a": None}
    )
    (axes,) = shown(figure).values()
    assert drawn(axes) == {"m, L0 ssm, recall+1": [0.1, 0.5, 0.9], "a, L1H0": [0.2, 0.4, 0.8]}
    assert [t.get_text() for t in axes.texts] == ["L0 ssm, recall+1", "L1H0"]
    assert figure.get_suptitle().startswith("Each run where its circuit has the score, else where it ends highest")


def test_even_weights_are_dotted_once_for_each_level_and_named():
    table = score_table(LATE, STEPS)
    table["even"] = np.where(table.factor == "ssm", 0.05, 0.25)
    figure = scores({"run": table})
    levels = {
        name: sorted(float(x.get_ydata()[0]) for x in axes.lines if x.get_linestyle() == ":")
        for name, axes in shown(figure).items()
    }
    assert levels == {"recall": [0.05, 0.25], "binding": [0.25]}
    assert "dotted: even weight on all positions that may be read" in entries(figure)
    assert set(figure.data.even) == {0.05, 0.25}
    own = {x.get_color() for x in shown(figure)["recall"].lines if x.get_linestyle() == ":"}
    assert own <= {x.get_color() for x in shown(figure)["recall"].lines if x.get_linestyle() == "-"}
