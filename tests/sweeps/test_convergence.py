"""The median step over seeds counts a seed that never converges as later than all others."""

import math

import pytest

from circuitscope.errors import UserError
from circuitscope.sweeps.convergence import lower_median, median_steps
from made_up_sweeps import made_up_sweep

AXES = {"model.d_model": [8, 16], "train.seed": [0, 1, 2, 3, 4]}
NEVER = math.nan


@pytest.mark.parametrize(
    ("steps", "median"),
    [
        ([300, 100, 200], 200),
        ([100, NEVER, 200], 200),  # later than all others, not left out
        ([100, 200, NEVER, NEVER], 200),  # half of them are there by 200
        ([100, NEVER, NEVER], NEVER),
        ([100, 200, 300, 400], 200),
        ([NEVER], NEVER),
        ([], NEVER),
    ],
)
def test_the_median_is_the_step_by_which_half_of_the_seeds_are_there(steps, median):
    assert lower_median(steps) == pytest.approx(median, nan_ok=True)


def test_the_seeds_of_each_combination_of_the_other_axes_have_a_median(tmp_path):
    steps = {8: (100.0, 500.0, 300.0, NEVER, NEVER), 16: (100.0, 50.0, NEVER, NEVER, NEVER)}

    def row(trial):
        return {"step_90": steps[trial.values["model.d_model"]][trial.values["train.seed"]]}

    sweep = made_up_sweep(tmp_path, row, axes=AXES)
    found = median_steps(sweep.grid, sweep.results).set_index("model.d_model")
    assert found.seeds.tolist() == [5, 5]
    assert found.converged.to_dict() == {8: 3, 16: 2}
    assert found.step_90[8] == 500
    assert math.isnan(found.step_90[16])


def test_trials_that_are_not_done_do_not_count_and_diverged_ones_never_converge(tmp_path):
    rows = [None, {"step_90": 400.0}, {"step_90": 100.0, "state": "diverged"}, None, None]
    sweep = made_up_sweep(tmp_path, lambda trial: rows[trial.values["train.seed"]], axes=AXES)
    found = median_steps(sweep.grid, sweep.results).iloc[0]
    assert (found.seeds, found.converged, found.step_90) == (2, 1, 400)


def test_a_column_that_holds_no_steps_is_refused(tmp_path):
    sweep = made_up_sweep(tmp_path, lambda trial: {"step_90": 100.0}, axes=AXES)
    with pytest.raises(UserError, match="step_90"):
        median_steps(sweep.grid, sweep.results, "step_9")
