"""A grid file is a base config with axes, and every combination is a trial named by its digest."""

import re
from pathlib import Path

import pytest
import yaml

from circuitscope.config import RunConfig
from circuitscope.errors import UserError
from circuitscope.sweeps.grid import make_grid, read_grid
from circuitscope.sweeps.measures import check_measures

BASE = {"task": {"length": 16, "pairs": 2, "vocab_size": 64}, "train": {"steps": 10}}


def grid(**parts):
    return make_grid("g", {"base": BASE, **parts})


def test_every_combination_is_a_trial_and_the_last_axis_changes_fastest():
    found = grid(axes={"model.preset": ["attention", "mamba"], "train.seed": {"seeds": 3}})
    assert [(t.values["model.preset"], t.values["train.seed"]) for t in found.trials] == [
        (model, seed) for model in ("attention", "mamba") for seed in range(3)
    ]
    assert [t.config.train.seed for t in found.trials[:3]] == [0, 1, 2]
    assert found.trials[3].config.model.mixers[0].name == "mamba"


def test_a_trial_is_a_complete_config_and_its_name_is_the_digest_of_that():
    (trial,) = grid(axes={"train.lr": [0.002]}).trials
    same = RunConfig.parse({**BASE, "train": {"steps": 10, "lr": 0.002}})
    assert trial.digest == same.digest
    assert trial.config.train.threads == 1


def test_a_log_axis_has_equal_ratios_and_includes_its_ends():
    found = grid(axes={"train.lr": {"log": ["1e-4", 1e-2], "points": 7}})
    rates = [t.config.train.lr for t in found.trials]
    assert rates == [0.0001, 0.0002154, 0.0004642, 0.001, 0.002154, 0.004642, 0.01]


def test_yaml_reads_one_e_minus_four_as_text_and_the_grid_as_a_number():
    assert [t.values["train.lr"] for t in grid(axes={"train.lr": ["1e-4", "2.5E-3"]}).trials] == [1e-4, 2.5e-3]


def test_zipped_axes_change_together():
    found = grid(axes={"train.seed": {"seeds": 2}}, zipped=[{"task.length": [16, 32], "task.pairs": [2, 4]}])
    assert {(t.config.task.length, t.config.task.pairs) for t in found.trials} == {(16, 2), (32, 4)}
    assert len(found.trials) == 4


def test_a_zipped_axis_may_repeat_a_value():
    found = grid(zipped=[{"model.preset": ["attention", "attention", "mamba"], "task.pairs": [2, 4, 4]}])
    assert [t.label for t in found.trials] == ["attention pairs=2", "attention pairs=4", "mamba pairs=4"]


def test_named_values_change_several_fields_and_the_base_keeps_the_others():
    models = {"one": {"preset": "attention", "n_layers": 1}, "two": {"preset": "attention", "n_layers": 2}}
    found = make_grid("g", {"base": {**BASE, "model": {"d_model": 32}}, "axes": {"model": {"named": models}}})
    assert [t.values["model"] for t in found.trials] == ["one", "two"]
    assert [t.config.model.n_layers for t in found.trials] == [1, 2]
    assert all(t.config.model.d_model == 32 for t in found.trials)


def test_an_axis_over_learning_rates_by_group_takes_patterns_as_they_are():
    slow = {"*.A_log": 0.1, "embed.weight": 2.0}
    found = grid(axes={"train.lr_groups": {"named": {"all": {}, "slow": slow}}})
    assert [trial.config.train.lr_groups for trial in found.trials] == [{}, slow]


def test_an_exclusion_of_a_seed_leaves_its_neighbours():
    grid = make_grid("g", {"base": {}, "axes": {"train.seed": [1000, 1001]}, "exclude": [{"train.seed": 1000}]})
    assert [trial.values["train.seed"] for trial in grid.trials] == [1001]


def test_exclusions_leave_out_combinations():
    found = grid(
        axes={"model.preset": ["attention", "mamba"], "train.lr": ["1e-3", "1e-2"]},
        exclude=[{"model.preset": "mamba", "train.lr": "1e-2"}],
    )
    assert [t.label for t in found.trials] == ["attention lr=0.001", "attention lr=0.01", "mamba lr=0.001"]


@pytest.mark.parametrize(
    ("parts", "says"),
    [
        ({}, "the grid is empty"),
        ({"axes": {"train.lr": []}}, "axes.train.lr has no values"),
        ({"axes": {"train.lrr": [1]}}, "lrr"),
        ({"axes": {"train.lr": ["fast"]}}, "train.lr: expected a number"),
        ({"axes": {"train.lr": [1e-3, 1e-3]}}, "a value twice"),
        ({"axes": {"train.lr": {"from": 1}}}, "axes.train.lr: expected a list"),
        ({"axes": {"train.lr": {"log": [0, 1], "points": 3}}}, "above 0"),
        ({"axes": {"train.seed": {"seeds": 0}}}, "a number of seeds"),
        ({"axes": {"model": {"named": {"a": "mamba"}}, "model.preset": ["mamba"]}}, "two axes set the same field"),
        ({"axes": {"train.lr": [1.0]}, "zipped": [{"train.lr": [2.0]}]}, "two axes set the same field"),
        ({"zipped": [{"task.length": [16, 32], "task.pairs": [2]}]}, "as many values as each other"),
        ({"axes": {"train.eval_every": [5, 10]}}, "two trials are the same run"),
        ({"axes": {"train.lr": [1e-3]}, "exclude": [{"train.seed": 0}]}, "unknown axis in exclude 'train.seed'"),
        ({"axes": {"train.lr": [1e-3]}, "exclude": [{"train.lr": 5}]}, "has no value 5"),
        ({"axes": {"train.lr": [1e-3]}, "exclude": [{"train.lr": [1e-3, 5]}]}, "has no value 5"),
        ({"axes": {"train.lr": [1e-3]}, "exclude": [{"train.lr": []}]}, "empty list"),
        ({"axes": {"train.lr": [1e-3]}, "exclude": [{}]}, "leave out everything"),
        ({"axes": {"train.lr": [1e-3]}, "exclude": [{"train.lr": 1e-3}]}, "the grid is empty"),
        ({"axes": {"train.lr": [1e-3]}, "fractions": [2]}, "shares of the steps"),
        ({"axis": {"train.lr": [1e-3]}}, "axis"),
    ],
)
def test_a_wrong_grid_is_one_line(parts, says):
    with pytest.raises(UserError, match=says) as error:
        grid(**parts)
    assert "\n" not in str(error.value)


def test_an_error_names_the_file(tmp_path):
    file = tmp_path / "g.yaml"
    file.write_text("axes: {train.lr: []}")
    with pytest.raises(UserError, match=r"g\.yaml: axes\.train\.lr has no values"):
        read_grid(file)
    with pytest.raises(UserError, match="does not exist; a grid is a YAML file, or a folder"):
        read_grid(tmp_path)


def test_the_grids_of_the_documentation_are_grids():
    page = (Path(__file__).parents[2] / "docs" / "sweeps.md").read_text()
    found = [make_grid("g", yaml.safe_load(text)) for text in re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)]
    assert [len(one.trials) for one in found] == [24, 3]
    check_measures(found[1].measure)


def test_the_trials_of_a_committed_study_keep_their_digests_whatever_recipes_say(monkeypatch):
    """Its table has rows that count as done; another digest would train them again."""
    from circuitscope.config.recipes import RECIPES, Recipe
    from circuitscope.sweeps.results import ResultsTable

    for name in list(RECIPES):
        monkeypatch.setitem(RECIPES, name, Recipe("made up", {"train.beta2": 0.5, "model.embed_std": 0.5}))
    study = Path(__file__).parents[2] / "studies/one_layer_attention"
    rows = ResultsTable(study).rows
    assert len(rows) > 5
    assert rows.keys() <= {trial.digest for trial in read_grid(study).trials}
