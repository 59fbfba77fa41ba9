"""The dynamics figure shows what the run's metrics and scores say."""

import numpy as np
import pytest
from laid_out import assert_legend_apart, entries
from made_up_runs import made_up_circuit, made_up_run, score_table
from matplotlib.colors import to_rgb

import circuitscope as cs
from circuitscope.errors import UserError
from circuitscope.viz.dynamics import dynamics, save_dynamics
from circuitscope.viz.step_axis import StepAxis
from circuitscope.viz.style import GREY

LEVEL = "any value of\nthe context"


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> cs.Run:
    return made_up_run(tmp_path_factory.mktemp("runs"), "tiny")


def drawn(axes, label: str) -> np.ndarray:
    """x and y of the one line with this label."""
    (line,) = [x for x in axes.lines if x.get_label() == label]
    return np.array(line.get_data(), dtype=float)


def spans(axes) -> list[tuple[float, float]]:
    """First and last step of every stretch that is shaded."""
    return [(p.get_x(), p.get_x() + p.get_width()) for p in axes.patches]


def band_at(band, step: float) -> tuple[float, float]:
    points = band.get_paths()[0].vertices
    heights = points[points[:, 0] == step, 1]
    return heights.min(), heights.max()


def test_lines_are_the_metrics_of_the_run(run):
    loss, accuracy = dynamics([run]).axes
    rows = run.metrics
    train, held = rows[rows.split == "train"], rows[rows.split == "validation"]
    assert len(train) >= 4
    assert len(held) >= 3
    np.testing.assert_array_equal(drawn(loss, "_tiny, train"), [train.step, train.loss])
    np.testing.assert_array_equal(drawn(loss, "tiny"), [held.step, held.loss])
    np.testing.assert_array_equal(drawn(accuracy, "tiny"), [held.step, held.accuracy])


def test_the_band_spans_the_evaluation_batches(run):
    loss, accuracy = dynamics([run]).axes
    held = run.metrics[run.metrics.split == "validation"]
    for axes, column in ((loss, "loss_per_batch"), (accuracy, "accuracy_per_batch")):
        (band,) = axes.collections
        for step, per_batch in zip(held.step, held[column], strict=True):
            assert len(per_batch) == 4
            assert band_at(band, step) == (min(per_batch), max(per_batch))


def test_chance_is_one_over_the_pairs_and_axes_are_named(run):
    loss, accuracy = dynamics([run]).axes
    chance = [x for x in accuracy.lines if x.get_linestyle() == ":"]
    assert [tuple(x.get_ydata()) for x in chance] == [(0.25, 0.25)]
    (name,) = [t for t in accuracy.texts if t.get_text() == f"{LEVEL} 0.25"]
    assert name.get_window_extent().x0 >= accuracy.get_window_extent().x1  # beside the panel, not on the curves
    assert (loss.get_ylabel(), accuracy.get_ylabel(), accuracy.get_xlabel()) == ("loss", "accuracy", "step")


def test_a_chance_level_of_one_run_alone_has_its_colour(tmp_path):
    runs = [made_up_run(tmp_path, name, pairs=pairs) for name, pairs in (("a", 2), ("b", 2), ("c", 4))]
    _, accuracy = dynamics(runs, together=False).axes
    texts = {t.get_text(): t.get_color() for t in accuracy.texts}
    assert list(texts) == [f"{LEVEL} 0.25", f"{LEVEL} 0.5"]
    colours = {x.get_label(): x.get_color() for x in accuracy.lines}
    assert texts[f"{LEVEL} 0.25"] == colours["c"]
    assert texts[f"{LEVEL} 0.5"] == GREY


def test_chance_levels_too_close_for_two_names_have_one(tmp_path):
    runs = [made_up_run(tmp_path, f"r{pairs}", length=128, vocab_size=512, pairs=pairs) for pairs in (30, 31)]
    _, accuracy = dynamics(runs).axes
    assert [t.get_text() for t in accuracy.texts] == [f"{LEVEL} 0.0323, 0.0333"]


def test_a_run_drawn_twice_is_two_lines_in_two_colours(run):
    loss, accuracy = dynamics([run, run]).axes
    lines = [x for x in accuracy.lines if x.get_label() == "tiny"]
    assert len(lines) == 2
    assert lines[0].get_color() != lines[1].get_color()
    assert len(loss.lines) == 4


def test_seeds_are_one_mean_with_a_band_from_lowest_to_highest(tmp_path):
    runs = [made_up_run(tmp_path, f"m-{s}", scale=1 + 0.1 * s, seed=s, steps=1500 + 100 * s) for s in range(3)]
    loss, _ = dynamics(runs).axes
    one = runs[0].metrics[lambda rows: rows.split == "validation"]
    step, value = drawn(loss, "m, 3 seeds")
    np.testing.assert_array_equal(step, one.step)  # to the end of the shortest
    np.testing.assert_allclose(value, 1.1 * one.loss, rtol=1e-12)
    band = loss.collections[-1]
    np.testing.assert_allclose(band_at(band, 700), [one.loss[one.step == 700].item() * s for s in (1, 1.2)], rtol=1e-12)
    assert len(dynamics(runs, together=False).axes[1].lines) == 3 + 1  # and the chance level


def test_the_bump_is_shaded_in_every_panel_and_named(run):
    table = score_table({("recall", 1, 0, "pattern"): [0.1, 0.9]}, [0, 2000])
    figure = dynamics([run], scores=[table], bump=(880.0, 1120.0))
    assert len(figure.axes) == 3
    for axes in figure.axes:
        assert spans(axes) == [pytest.approx((880, 1120))]
    assert "loss bump, steps 880 to 1120" in entries(figure)
    assert not any(spans(axes) for axes in dynamics([run]).axes)


def test_each_run_has_its_own_bump_in_its_colour(tmp_path):
    runs = [made_up_run(tmp_path, "one"), made_up_run(tmp_path, "two", lr=0.5), made_up_run(tmp_path, "three", lr=0.1)]
    figure = dynamics(runs, bump=[(100, 200), None, (150, 400)])
    loss, accuracy, bumps = figure.axes
    assert spans(bumps) == [pytest.approx((100, 200)), pytest.approx((150, 400))]
    assert [p.get_y() + p.get_height() / 2 for p in bumps.patches] == [0, 2]  # they do not cover each other
    lines = [x for x in accuracy.lines if x.get_linestyle() == "-"]
    shades = [p.get_facecolor()[:3] for p in bumps.patches]
    assert shades == [to_rgb(lines[0].get_color()), to_rgb(lines[2].get_color())]
    assert bumps.get_xlim() == loss.get_xlim()
    assert bumps.get_window_extent().y0 >= loss.get_window_extent().y1 - 1
    assert entries(figure)[:3] == ["one, loss bump, steps 100 to 200", "two, no loss bump found",
                                   "three, loss bump, steps 150 to 400"]  # fmt: skip
    assert len(dynamics(runs, bump=[None] * 3).axes) == 2


def six(root) -> list[cs.Run]:
    return [made_up_run(root, f"a-run-with-a-name-{i}", lr=0.1 * (i + 1)) for i in range(6)]


def test_six_runs_have_one_legend_outside_the_panels_and_train_is_said_once(tmp_path):
    runs = six(tmp_path)
    tables = [score_table(ATTENTION, STEPS)] * 6
    figure = dynamics(runs, scores=tables, bump=[(100 * i, 100 * i + 300) for i in range(6)])
    said = entries(figure)
    assert [text.split(",")[0] for text in said[:6]] == [run.name for run in runs]
    assert [text for text in said if "train" in text] == ["thin lines: training"]
    assert len(said) == 8  # and what bands are
    loss = figure.axes[0]
    train = [x for x in loss.lines if x.get_label().startswith("_")]
    assert len(train) == 6
    assert {x.get_linewidth() for x in train} == {0.8}
    assert_legend_apart(figure)
    colours = [x.get_color() for x in loss.lines if not x.get_label().startswith("_")]
    assert len(set(colours)) == 6


def test_many_runs_leave_their_panels_as_tall_as_few(tmp_path):
    few, many = (
        dynamics([made_up_run(tmp_path / str(n), f"run-{i}", lr=0.1 + 0.01 * i) for i in range(n)]) for n in (2, 12)
    )
    assert_legend_apart(many)
    few.draw_without_rendering()
    assert many.axes[0].get_window_extent().height > 0.9 * few.axes[0].get_window_extent().height


def test_the_legend_of_one_run_lies_outside_too_and_no_colour_means_two_things(run):
    figure = dynamics([run], scores=[score_table(ATTENTION, STEPS)], bump=(880.0, 1120.0))
    assert entries(figure)[:3] == ["validation", "training", "loss bump, steps 880 to 1120"]
    assert_legend_apart(figure)
    loss, _, scores = figure.axes
    assert {x.get_color() for x in loss.lines}.isdisjoint(x.get_color() for x in scores.lines)


def test_steps_can_be_limited_and_on_a_log_axis(run):
    loss, accuracy = dynamics([run], axis=StepAxis(first=100, last=500)).axes
    assert loss.get_xlim() == accuracy.get_xlim() == (100, 500)
    assert loss.get_ylim()[1] - loss.get_ylim()[0] < 2.5  # before the turn, where validation and train differ by 10%
    assert accuracy.get_ylim() == (-0.02, 1.02)
    loss, accuracy = dynamics([run], axis=StepAxis(log=True)).axes
    assert (loss.get_xscale(), accuracy.get_xscale(), accuracy.get_xlabel()) == ("symlog", "symlog", "step (log scale)")
    with pytest.raises(cs.UserError, match="steps are 0 to 2000"):
        dynamics([run], axis=StepAxis(first=3000))


STEPS = [0, 1000, 2000]
ATTENTION = {
    ("binding", 0, 0, "pattern"): [0.2, 0.3, 0.9],
    ("binding", 1, 0, "pattern"): [0.3, 0.8, 0.4],
    ("recall", 0, 0, "pattern"): [0.1, 0.1, 0.1],
    ("recall", 1, 0, "pattern"): [0.1, 0.5, 0.8],
    ("induction", 1, 0, "pattern"): [0.0, 0.1, 0.2],
}


def test_scores_of_one_run_are_drawn_where_they_end_highest_with_their_error(run):
    figure = dynamics([run], scores=[score_table(ATTENTION, STEPS)])
    _, _, scores = figure.axes
    np.testing.assert_array_equal(drawn(scores, "binding, L0H0 (highest)"), [STEPS, [0.2, 0.3, 0.9]])
    np.testing.assert_array_equal(drawn(scores, "recall, L1H0 (highest)"), [STEPS, [0.1, 0.5, 0.8]])
    np.testing.assert_array_equal(
        drawn(scores, "induction on repeated blocks, L1H0 (highest)"), [STEPS, [0.0, 0.1, 0.2]]
    )
    assert len(scores.lines) == 3
    assert band_at(scores.collections[0], 2000) == pytest.approx((0.88, 0.92))
    assert len({x.get_color() for x in scores.lines}) == 3


def test_a_layer_of_channels_is_drawn_as_a_whole(run):
    places = {("recall", 0, None, "composed"): [0.1, 0.4, 0.5], ("recall", 0, 3, "composed"): [0.1, 0.9, 0.9]}
    _, _, scores = dynamics([run], scores=[score_table(places, STEPS)]).axes
    np.testing.assert_array_equal(drawn(scores, "recall, L0 composed (highest)"), [STEPS, [0.1, 0.4, 0.5]])
    assert len(scores.lines) == 1


def test_the_single_head_of_any_mixer_is_drawn(run):
    places = {("recall", 1, 0, "linear_attention"): [0.1, 0.5, 0.8], ("recall", 0, None, "conv"): [0.1, 0.1, 0.1]}
    _, _, scores = dynamics([run], scores=[score_table(places, STEPS)]).axes
    np.testing.assert_array_equal(drawn(scores, "recall, L1H0 (highest)"), [STEPS, [0.1, 0.5, 0.8]])


def test_a_score_is_drawn_where_the_circuit_has_it(run):
    table = score_table(
        {("recall", 0, None, "composed"): [0.1, 0.4, 0.5], ("recall+1", 0, None, "ssm"): [0.0, 0.3, 0.4]}, STEPS
    )
    circuit = made_up_circuit(("recall", "recall+1", 0, None, "ssm"))
    figure = dynamics([run], scores=[table], circuits=[circuit])
    np.testing.assert_array_equal(drawn(figure.axes[2], "recall+1, L0 ssm (circuit)"), [STEPS, [0.0, 0.3, 0.4]])
    assert "recall+1, L0 ssm" in set(figure.data.curve)
    with pytest.raises(UserError, match="circuits are one for each of 1 runs, got 2"):
        dynamics([run], scores=[table], circuits=[circuit, None])


def test_scores_of_several_runs_have_a_panel_each(tmp_path):
    runs = [made_up_run(tmp_path, "one"), made_up_run(tmp_path, "two", lr=0.5)]
    other = score_table({("recall", 0, None, "composed"): [0.1, 0.2, 0.3]}, STEPS)
    figure = dynamics(runs, scores=[score_table(ATTENTION, STEPS), other])
    _, accuracy, binding, recall, induction = figure.axes
    assert [a.get_ylabel().split("\n")[0] for a in (binding, recall, induction)] == ["binding", "recall", "induction"]
    np.testing.assert_array_equal(drawn(recall, "recall, L1H0 (highest)")[1], [0.1, 0.5, 0.8])
    np.testing.assert_array_equal(drawn(recall, "recall, L0 composed (highest)")[1], [0.1, 0.2, 0.3])
    colours = {x.get_label(): x.get_color() for x in accuracy.lines}
    assert [x.get_color() for x in recall.lines] == [colours["one"], colours["two"]]
    places = [(t.get_text(), t.get_color()) for t in recall.texts]  # named beside the panel, the highest first
    assert places == [("L1H0", colours["one"]), ("L0 composed", colours["two"])]
    assert len(binding.lines) == 1


def test_the_data_are_the_curves(run):
    data = dynamics([run], scores=[score_table(ATTENTION, STEPS)]).data
    assert list(data) == ["run", "curve", "step", "value", "low", "high"]
    assert set(data.curve) == {
        "train loss",
        "validation loss",
        "validation accuracy",
        "binding, L0H0",
        "recall, L1H0",
        "induction, L1H0",
    }
    held = run.metrics[run.metrics.split == "validation"]
    found = data[data.curve == "validation accuracy"]
    np.testing.assert_array_equal(found[["step", "value"]], held[["step", "accuracy"]])
    np.testing.assert_array_equal(found.high, held.accuracy_per_batch.map(max))


@pytest.mark.parametrize(("suffix", "magic"), [(".png", b"\x89PNG"), (".svg", b"<?xml"), (".pdf", b"%PDF")])
def test_the_figure_is_written_where_asked_and_folders_are_made(run, tmp_path, suffix, magic):
    path = save_dynamics([run], tmp_path / "new" / f"figure{suffix}")
    assert path == tmp_path / "new" / f"figure{suffix}"
    assert path.read_bytes().startswith(magic)


def test_a_file_that_cannot_be_written_is_bad_input(run, tmp_path):
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "figure.nonsense", tmp_path / "file" / "figure.png"):
        with pytest.raises(cs.UserError, match="cannot write"):
            save_dynamics([run], path)


def test_a_run_without_metrics_says_so(run, tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "config.yaml").write_text(run.config.dump())
    with pytest.raises(cs.UserError, match="no metrics"):
        dynamics([cs.Run(tmp_path / "empty")])


def test_too_few_tables_and_no_runs_are_refused(run):
    with pytest.raises(cs.UserError, match="one for each of 2 runs"):
        dynamics([run, run], scores=[None])
    with pytest.raises(cs.UserError, match="at least one run"):
        dynamics([])
