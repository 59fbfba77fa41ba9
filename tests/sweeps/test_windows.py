"""The rate is chosen on validation and reported on test; a window reaches half a step beyond the rates that pass."""

import math
import re
from pathlib import Path

import pytest

from circuitscope.errors import UserError
from circuitscope.sweeps.cells import Cells
from circuitscope.sweeps.sweep import Sweep
from circuitscope.sweeps.windows import Mean, choices, window, windows, windows_by_budget
from made_up_sweeps import RATES, made_up_sweep

STUDY = Path(__file__).parents[2] / "studies" / "one_layer_attention"


def cells_of(sweep, column=None):
    return Cells.of(sweep.grid, sweep.results, column)


@pytest.mark.parametrize(
    ("values", "decades", "at_least"),
    [
        ([0, 1, 0, 0], 1.0, False),  # one rate: half a decade to either side
        ([0, 1, 1, 0], 2.0, False),
        ([1, 1, 0, 0], 1.5, True),  # the first rate stands for nothing below the grid
        ([0, 0, 0, 1], 0.5, True),
        ([1, 1, 1, 1], 3.0, True),
        ([0, 0, 0, 0], 0.0, False),
        ([1, 0, 1, 0], 0.5, True),  # two stretches do not add up; of equal rates the smallest is the best
        ([0.96, 0, 0.97, 0.96], 1.5, True),  # the stretch around the best one counts
    ],
)
def test_each_rate_stands_for_half_the_way_to_its_neighbours(values, decades, at_least):
    found = window(RATES, values)
    assert found.decades == pytest.approx(decades)
    assert found.at_least is at_least


def test_rates_may_be_uneven_and_in_any_order_and_one_rate_has_no_window():
    found = window([1e-1, 1e-4, 1e-3], [0.2, 0.3, 0.99])  # neighbours one and two decades away
    assert found.decades == pytest.approx(1.5)
    assert math.isnan(window([1e-3], [1.0]).decades)


def test_an_interval_over_seeds_is_students_and_one_seed_has_none():
    found = Mean.of([1.0, 2.0, 3.0])
    assert (found.value, found.seeds) == (2.0, 3)
    assert found.high - found.value == pytest.approx(4.30265 / math.sqrt(3), rel=1e-5)  # t at 97.5%, 2 degrees
    assert (found.low, Mean.of([1.0, 2.0, 3.0], least=0.0).low) == (pytest.approx(-0.48414, rel=1e-4), 0.0)
    one = Mean.of([2.0, math.nan])
    assert (one.value, one.seeds) == (2.0, 1)
    assert math.isnan(one.low)
    assert math.isnan(one.high)


def test_the_rate_is_chosen_on_validation_and_reported_on_test(tmp_path):
    validation = {1e-4: 0.5, 1e-3: 0.97, 1e-2: 0.96, 1e-1: 0.2}
    test = {1e-4: 0.5, 1e-3: 0.90, 1e-2: 0.99, 1e-1: 0.2}

    def row(trial):
        rate, shift = trial.config.train.lr, 0.01 * (trial.values["train.seed"] - 1)
        return {"best_validation_accuracy": validation[rate], "best_test_accuracy": test[rate] + shift}

    (found,) = choices(cells_of(made_up_sweep(tmp_path, row))).to_dict("records")
    assert (found["rate"], found["seeds"]) == (1e-3, 3)
    assert found["value"] == pytest.approx(0.90)
    assert found["high"] - found["value"] == pytest.approx(4.30265 * 0.01 / math.sqrt(3), rel=1e-4)


def test_of_errors_the_smallest_is_the_best_and_there_are_no_windows(tmp_path):
    errors = {1e-4: 4.0, 1e-3: 0.7, 1e-2: 0.5, 1e-1: 3.0}

    def row(trial):
        if trial.config.train.lr == 1e-2 and trial.values["train.seed"] == 0:
            return {"state": "diverged", "steps": 300, "best_validation_error": 0.1}
        return {f"best_{split}_error": errors[trial.config.train.lr] for split in ("validation", "test")}

    base = {"model": {"d_model": 8, "n_layers": 1}, "task": {"name": "linear_regression", "dims": 2, "points": 4}}
    cells = cells_of(made_up_sweep(tmp_path, row, base={**base, "train": {"steps": 1000}}))
    (found,) = choices(cells).to_dict("records")
    assert (found["rate"], found["value"]) == (1e-3, pytest.approx(0.7))  # a diverged seed rules 1e-2 out
    assert len(windows(cells)) == 0


def test_of_rates_that_are_equally_good_the_smallest_is_chosen(tmp_path):
    sweep = made_up_sweep(tmp_path, lambda t: {"accuracy": 1.0 if t.config.train.lr in (1e-3, 1e-2) else 0.3})
    assert choices(cells_of(sweep)).rate.tolist() == [1e-3]


def test_a_seed_that_diverged_counts_as_failing_in_the_choice_and_in_the_window(tmp_path):
    def row(trial):
        if trial.config.train.lr == 1e-2 and trial.values["train.seed"] == 0:
            return {"state": "diverged", "steps": 300, "best_validation_accuracy": 1.0}
        return {"accuracy": {1e-3: 0.96, 1e-2: 0.99}.get(trial.config.train.lr, 0.2)}

    cells = cells_of(made_up_sweep(tmp_path, row))
    assert choices(cells).rate.tolist() == [1e-3]
    (found,) = windows(cells).to_dict("records")
    assert found["value"] == pytest.approx((1 + 2 + 2) / 3)
    assert not found["at_least"]
    assert found["grid_step"] == pytest.approx(1.0)


def test_a_seed_without_all_its_trials_has_no_window_and_the_others_do(tmp_path):
    def row(trial):
        if trial.values["train.seed"] == 2 and trial.config.train.lr == 1e-1:
            return {"state": "failed", "message": "disk full"} if trial.values["model.preset"] == "mamba" else None
        return {"accuracy": 0.99 if trial.config.train.lr == 1e-3 else 0.2}

    models = {"model.preset": ["attention", "mamba"], "train.lr": RATES, "train.seed": {"seeds": 3}}
    found = windows(cells_of(made_up_sweep(tmp_path, row, axes=models)))
    assert found[["line", "value", "low", "high", "seeds"]].to_dict("records") == [
        {"line": name, "value": 1.0, "low": 1.0, "high": 1.0, "seeds": 2} for name in ("attention", "mamba")
    ]


def test_the_threshold_is_passed_at_the_threshold(tmp_path):
    cells = cells_of(made_up_sweep(tmp_path, lambda t: {"accuracy": 0.95 if t.config.train.lr == 1e-3 else 0.9499}))
    assert windows(cells).value.tolist() == [1.0]
    assert windows(cells, 0.9).value.tolist() == [3.0]
    assert windows(cells, 0.96).value.tolist() == [0.0]


def rising(trial):
    """At 1e-3 the threshold is reached at step 200, at 1e-2 at step 600, elsewhere never."""
    reached = {1e-3: 200, 1e-2: 600}.get(trial.config.train.lr, 10**9)
    return [(step, 0.99 if step == reached else 0.5) for step in range(0, 1001, 100)]  # the best so far counts


def test_the_window_by_budget_is_that_of_the_best_validation_so_far(tmp_path):
    sweep = made_up_sweep(tmp_path, lambda t: {"accuracy": 0.5}, rising)
    found = windows_by_budget(cells_of(sweep), sweep.grid, sweep.results)
    assert found.steps.tolist() == [100.0 * i for i in range(1, 11)]
    assert found.value.tolist() == [0, 1, 1, 1, 1, 2, 2, 2, 2, 2]


def test_a_trial_that_diverges_late_answers_for_the_budgets_before(tmp_path):
    def row(trial):
        return {"state": "diverged", "steps": 450} if trial.config.train.lr == 1e-3 else {"accuracy": 0.5}

    sweep = made_up_sweep(tmp_path, row, rising)
    found = windows_by_budget(cells_of(sweep), sweep.grid, sweep.results)
    assert found.value.tolist() == [0, 1, 1, 1, 0, 1, 1, 1, 1, 1]


def test_without_curves_the_fractions_of_the_table_are_the_budgets(tmp_path):
    def row(trial):
        return {
            "accuracy": 0.99,
            "accuracy_at_0.5": 0.99 if trial.config.train.lr == 1e-3 else 0.2,
            "accuracy_at_1": 0.99,
        }

    sweep = made_up_sweep(tmp_path, row, fractions=[0.5, 1])
    found = windows_by_budget(cells_of(sweep), sweep.grid, sweep.results)
    assert found[["steps", "value", "at_least"]].values.tolist() == [[500.0, 1.0, False], [1000.0, 3.0, True]]


@pytest.mark.parametrize("train", [{"schedule": "cosine"}, {"warmup_steps": None, "warmup": 0.1}])
def test_a_run_whose_rate_depends_on_its_length_answers_for_no_shorter_one(tmp_path, train):
    sweep = made_up_sweep(tmp_path, lambda t: {"accuracy": 0.5}, rising, train=train)
    with pytest.raises(UserError, match=r"train.schedule constant and a warmup given in steps \(train.warmup_steps\)"):
        windows_by_budget(cells_of(sweep), sweep.grid, sweep.results)


def test_rates_are_horizontal_models_are_lines_and_other_axes_are_panels(tmp_path):
    sweep = made_up_sweep(
        tmp_path,
        lambda t: {"accuracy": 0.5},
        axes={"task.pairs": [2, 4], "train.seed": {"seeds": 2}, "train.lr": [1e-3, 1e-2]},
        zipped=[{"model.preset": ["attention", "mamba"], "model.n_layers": [2, 1]}],
    )
    cells = cells_of(sweep)
    assert (cells.x, cells.line, cells.panels) == ("train.lr", "model.preset", ("task.pairs",))  # n_layers follows
    assert set(cells.trials.panel) == {"pairs 2", "pairs 4"}
    assert set(cells.trials.chance) == {0.5, 0.25}
    assert not cells.trials.duplicated(["panel", "line", "x", "seed"]).any()


def test_a_grid_without_rates_is_drawn_along_its_first_axis_of_numbers(tmp_path):
    axes = {"model.preset": ["attention", "mamba"], "task.filler": ["clean", "random"], "task.pairs": [2, 4]}
    cells = cells_of(made_up_sweep(tmp_path, lambda t: {"accuracy": 0.5}, axes=axes))
    assert (cells.x, cells.line, cells.panels) == ("task.pairs", "model.preset", ("task.filler",))
    assert not cells.by_rate
    assert len(windows(cells)) == len(choices(cells)) == 0


def test_what_cannot_be_drawn_is_said_in_one_line(tmp_path):
    named = made_up_sweep(tmp_path / "a", lambda t: {"accuracy": 0.5}, axes={"model.preset": ["attention", "mamba"]})
    with pytest.raises(UserError, match=re.escape("no axis to draw along: give train.lr or another field two numbers")):
        cells_of(named)
    with pytest.raises(UserError, match="no trial of b that is done"):
        cells_of(made_up_sweep(tmp_path / "b", lambda t: None))
    some = made_up_sweep(tmp_path / "c", lambda t: {"accuracy": 0.5, "message": "text"})
    with pytest.raises(UserError, match="unknown column of numbers 'best_test_accurcy'; did you mean"):
        cells_of(some, "best_test_accurcy")


def test_every_row_of_a_committed_study_is_a_trial_of_its_grid(tmp_path):
    study = Sweep.open(STUDY, tmp_path)
    assert set(study.results.rows) <= {trial.digest for trial in study.grid.trials}
    assert (cells_of(study).trials.state != "").sum() == len(study.results.rows)
