"""Runs that differ in their seed alone are one curve."""

import numpy as np
import pytest
from made_up_runs import made_up_run

from circuitscope.viz.seeds import Band, groups_of


def test_runs_with_distinct_seeds_are_one_group_named_by_what_they_share(tmp_path):
    runs = [made_up_run(tmp_path, f"mamba-mqar-{s}", seed=s) for s in range(3)]
    (group,) = groups_of(runs)
    assert group.label == "mamba-mqar, 3 seeds"
    assert group.at == (0, 1, 2)
    assert [g.label for g in groups_of(runs, together=False)] == [r.name for r in runs]


@pytest.mark.parametrize("other", [{"lr": 0.5}, {"filler": "zero"}, {"n_layers": 1}, {"batch_size": 3}])
def test_runs_that_differ_in_anything_else_are_not(tmp_path, other):
    runs = [made_up_run(tmp_path, "one", seed=0), made_up_run(tmp_path, "two", seed=1, **other)]
    assert [g.label for g in groups_of(runs)] == ["one", "two"]


def test_what_does_not_change_training_does_not_part_them(tmp_path):
    runs = [
        made_up_run(tmp_path, "a-1", seed=0, save_every=10, threads=1),
        made_up_run(tmp_path, "a-2", seed=1, save_every=20, eval_every=7),
    ]
    assert [g.label for g in groups_of(runs)] == ["a, 2 seeds"]


def test_the_same_seed_twice_is_no_other_seed(tmp_path):
    runs = [made_up_run(tmp_path, "one", seed=3), made_up_run(tmp_path, "two", seed=3)]
    assert [g.label for g in groups_of(runs)] == ["one", "two"]
    assert len(groups_of([runs[0], runs[0]])) == 2
    named = made_up_run(tmp_path, "three", seed=3, data_seed=3)
    assert len(groups_of([runs[0], named])) == 2


def test_a_band_is_over_the_steps_that_all_have():
    band = Band.over([([0, 10, 20], [1.0, 2.0, 3.0]), ([0, 5, 10], [3.0, 9.0, 6.0])])
    np.testing.assert_array_equal(band.step, [0, 10])
    np.testing.assert_array_equal(band.value, [2, 4])
    np.testing.assert_array_equal(band.low, [1, 2])
    np.testing.assert_array_equal(band.high, [3, 6])
