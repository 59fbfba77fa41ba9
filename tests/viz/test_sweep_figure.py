"""The figure of a sweep draws the numbers of its table, and needs no runs."""

import numpy as np
import pytest
from laid_out import assert_legend_apart, entries

from circuitscope.sweeps.cells import Cells, level_words
from circuitscope.sweeps.windows import choices, windows, windows_by_budget
from circuitscope.viz.sweep import MISSING, sweep
from made_up_sweeps import RATES, made_up_sweep

AXES = {"model.preset": ["attention", "mamba"], "train.lr": RATES, "train.seed": {"seeds": 3}}


def row(trial):
    """Attention passes at 1e-3 and 1e-2, Mamba at 1e-3 with two seeds of three and diverges at 1e-1."""
    rate, seed, mamba = trial.config.train.lr, trial.values["train.seed"], trial.values["model.preset"] == "mamba"
    if mamba and rate == 1e-1:
        return {"state": "diverged", "steps": 300}
    good = rate == 1e-3 and seed < 2 if mamba else rate in (1e-3, 1e-2)
    missing = "" if good else "binding" if rate < 1e-3 else "binding and recall"
    return {
        "accuracy": 0.99 - 0.01 * seed if good else 0.25,
        "circuit": "found" if good else "not found",
        "missing": missing,
    }


def curve(trial):
    return [(step, 0.99 if step >= 500 and trial.config.train.lr == 1e-3 else 0.2) for step in range(0, 1001, 100)]


def drawn(found, **options):
    cells = Cells.of(found.grid, found.results)
    tables = {"choices": choices(cells), "windows": windows(cells), "threshold": 0.95} if cells.by_rate else {}
    words = {"title": "made up", "x": cells.x_words, "value": cells.value_words, "level": level_words(found.grid)}
    return sweep(cells.trials, **{**words, **tables, **options})


@pytest.fixture
def made_up(tmp_path):
    return made_up_sweep(tmp_path / "made-up", row, curve, axes=AXES)


def test_curves_are_means_over_seeds_in_a_band_from_the_lowest_to_the_highest(made_up):
    figure = drawn(made_up)
    metric = figure.axes[0]
    by_label = {line.get_label(): line for line in metric.lines}
    np.testing.assert_allclose(by_label["attention"].get_xdata(), RATES)
    np.testing.assert_allclose(by_label["attention"].get_ydata(), [0.25, 0.98, 0.98, 0.25])
    np.testing.assert_allclose(by_label["mamba"].get_ydata(), [0.25, (0.99 + 0.98 + 0.25) / 3, 0.25, 0])
    data = figure.data
    band = data[(data.curve == "test accuracy") & (data.line == "mamba") & (data.x == 1e-3)].iloc[0]
    assert (band.low, band.high, band.seeds) == (0.25, 0.99, 3)
    rings = [line for line in metric.lines if line.get_markerfacecolor() == "none"]
    assert [list(ring.get_xdata()) for ring in rings] == [[1e-3], [1e-3]]
    (cross,) = [line for line in metric.lines if line.get_marker() == "x"]
    assert list(cross.get_xdata()) == [1e-1] * 3
    levels = {line.get_linestyle(): line.get_ydata()[0] for line in metric.lines if len(line.get_xdata()) == 2}
    assert levels[":"] == 0.25
    assert levels["--"] == 0.95


def test_colours_show_which_step_is_missing_in_shares_of_the_seeds(made_up):
    figure = drawn(made_up)
    data = figure.data
    shares = data[(data.line == "mamba") & (data.x == 1e-3)].set_index("curve").value
    assert shares["both steps formed"] == pytest.approx(2 / 3)
    assert shares["both missing"] == pytest.approx(1 / 3)
    strip = figure.axes[1]
    colours = {tuple(np.round(patch.get_facecolor(), 3)) for patch in strip.patches}
    assert len(colours) == 3
    assert not data[(data.line == "mamba") & (data.x == 1e-1)].curve.isin([word for word, _ in MISSING.values()]).any()
    assert {"both steps formed", "binding missing", "both missing"} <= set(entries(figure))
    assert "recall missing" not in entries(figure)  # nothing has that colour


def test_without_measured_circuits_there_is_no_strip(tmp_path):
    plain = made_up_sweep(tmp_path, lambda t: {"accuracy": row(t).get("accuracy", 0.0)}, axes=AXES)
    figure = drawn(plain)
    assert len(figure.axes) == 2
    assert not [word for word, _ in MISSING.values() if word in entries(figure)]


def test_windows_and_windows_by_budget_are_those_of_the_tables(made_up):
    cells = Cells.of(made_up.grid, made_up.results)
    budgets = windows_by_budget(cells, made_up.grid, made_up.results)
    figure = drawn(made_up, budgets=budgets)
    data = figure.data
    on_test = data[data.curve == "window on test"].set_index("line")
    assert on_test.value.to_dict() == {"attention": 2.0, "mamba": pytest.approx(2 / 3)}
    assert (on_test.low["mamba"], on_test.high["mamba"]) == (0.0, pytest.approx(2 / 3 + 4.30265 / 3, rel=1e-4))
    over = data[(data.curve == "window on validation") & (data.line == "attention")]
    assert over.value.tolist() == [0, 0, 0, 0, 1, 1, 1, 1, 1, 1]
    assert over.x.tolist() == [100 * i for i in range(1, 11)]
    assert_legend_apart(figure)


def test_a_window_at_an_end_of_the_grid_is_marked_as_at_least(tmp_path):
    figure = drawn(made_up_sweep(tmp_path, lambda t: {"accuracy": 0.99 if t.config.train.lr < 1e-2 else 0.2}))
    window = figure.axes[-1]
    assert [len(line.get_xdata()) for line in window.lines if line.get_marker() == "^"] == [1]
    assert "at least: at an end of the grid" in entries(figure)
    assert figure.data.at_least.dropna().tolist() == [True]


def test_if_no_trial_reaches_the_threshold_the_legend_says_so_and_no_window_is_drawn(tmp_path):
    figure = drawn(made_up_sweep(tmp_path, lambda t: {"accuracy": 0.25}))
    assert len(figure.axes) == 1
    assert "0.95, reached by no trial" in entries(figure)


def test_other_axes_are_panels_with_their_own_level_and_one_seed_has_no_band(tmp_path):
    axes = {"task.pairs": [1, 2, 3, 4], "model.preset": ["attention", "mamba"], "train.lr": RATES}
    figure = drawn(made_up_sweep(tmp_path, lambda t: {"accuracy": 0.25}, axes=axes))
    assert [axes.get_title(loc="left") for axes in figure.axes] == ["pairs 1", "pairs 2", "pairs 3", "pairs 4"]
    dotted = [next(line for line in a.lines if line.get_linestyle() == ":").get_ydata()[0] for a in figure.axes]
    assert dotted == [1, 0.5, 1 / 3, 0.25]
    assert not [text for text in entries(figure) if "band" in text]
    assert_legend_apart(figure)


def test_an_axis_that_is_no_rate_has_neither_choice_nor_window(tmp_path):
    figure = drawn(made_up_sweep(tmp_path, lambda t: {"accuracy": 0.99}, axes={"model.n_layers": [1, 2, 3]}))
    (axes,) = figure.axes
    assert axes.get_xlabel() == "model.n_layers"
    assert axes.get_xscale() == "linear"
    assert entries(figure) == ["any value of the context (1/k)"]
