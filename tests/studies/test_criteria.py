"""Criteria of a study, judged on tables with known numbers."""

import math

import numpy as np
import pytest

from circuitscope.errors import UserError
from circuitscope.studies.criteria import judge
from circuitscope.studies.study import Criterion
from circuitscope.studies.verdict import outcome_words
from made_up_sweeps import RATES, made_up_sweep

AXES = {"train.seed": [1, 2, 3], "model.preset": ["attention", "mamba"], "train.lr": RATES}
CHANCE = 0.25  # four pairs


def judged(folder, accuracy, exclude=(), **criterion):
    """A criterion on a sweep whose trials have the accuracy that a function of (preset, rate, seed) gives, or none."""

    def row(trial):
        values = trial.values
        found = accuracy(values["model.preset"], values["train.lr"], values["train.seed"])
        return found if found is None or isinstance(found, dict) else {"accuracy": found}

    sweep = made_up_sweep(folder, row, axes=AXES, exclude=list(exclude))
    data = {"name": "it", "quantity": "best_test_accuracy", **criterion}
    return judge(Criterion.model_validate(data), sweep.grid, sweep.results)


def outcomes(found):
    return {cell.label: cell.outcome for cell in found.cells}


def test_a_criterion_holds_where_every_seed_of_every_cell_does(tmp_path):
    found = judged(tmp_path, lambda *_: 0.96, holds_if={"at_least": 0.95})
    assert found.outcome == "holds"
    assert len(found.cells) == 2 * len(RATES)


def test_one_seed_below_the_bound_makes_its_cell_and_the_criterion_fail(tmp_path):
    found = judged(
        tmp_path,
        lambda preset, rate, seed: 0.9 if (preset, seed) == ("mamba", 2) else 0.96,
        rate="best",
        holds_if={"at_least": 0.95},
    )
    assert outcomes(found) == {"preset attention": "holds", "preset mamba": "fails"}
    assert found.outcome == "fails"


def test_two_of_three_seeds_may_be_enough(tmp_path):
    def accuracy(_preset, _rate, seed):
        return 0.9 if seed == 2 else 0.96

    assert judged(tmp_path / "a", accuracy, seeds=2, holds_if={"at_least": 0.95}).outcome == "holds"
    assert judged(tmp_path / "b", accuracy, seeds=3, holds_if={"at_least": 0.95}).outcome == "fails"


def test_a_missing_seed_leaves_a_cell_open_until_it_cannot_change_the_answer(tmp_path):
    def accuracy(preset, _rate, seed):
        if seed == 3:
            return None
        return 0.96 if preset == "attention" else 0.5

    found = judged(tmp_path, accuracy, where={"train.lr": 1e-3}, holds_if={"at_least": 0.95})
    assert outcomes(found) == {"preset attention, lr 0.001": "open", "preset mamba, lr 0.001": "fails"}


def test_a_cell_has_the_seeds_that_the_grid_gives_it(tmp_path):
    def accuracy(preset, _rate, seed):
        return {"attention": 0.96, "mamba": 0.5}[preset]

    only_one = [{"train.seed": [2, 3], "model.preset": "mamba"}]
    bound = {"where": {"train.lr": 1e-3}, "holds_if": {"at_least": 0.95}}
    found = judged(tmp_path / "a", accuracy, exclude=only_one, **bound)
    assert {cell.label: list(cell.values) for cell in found.cells} == {
        "preset attention, lr 0.001": [(1,), (2,), (3,)],
        "preset mamba, lr 0.001": [(1,)],
    }
    assert outcomes(found) == {"preset attention, lr 0.001": "holds", "preset mamba, lr 0.001": "fails"}

    compared = {"where": {"model.preset": "attention"}, "than": {"model.preset": "mamba"}, "by": "difference"}
    found = judged(tmp_path / "b", accuracy, exclude=only_one, **compared, holds_if={"at_least": 0.4})
    assert {tuple(cell.values) for cell in found.cells} == {((1,),)}
    assert found.outcome == "holds"

    with pytest.raises(UserError, match=r"seeds: 2, and a cell of .* has 1"):
        judged(tmp_path / "c", accuracy, exclude=only_one, seeds=2, **bound)


def test_nothing_done_is_not_run(tmp_path):
    assert judged(tmp_path, lambda *_: None, holds_if={"at_least": 0.95}).outcome == "not run"


def test_the_best_rate_is_chosen_on_validation_and_judged_on_test(tmp_path):
    def accuracy(_preset, rate, _seed):
        good = rate == 1e-3
        return {"best_validation_accuracy": 0.9 if good else 0.8, "best_test_accuracy": 0.7 if good else 1.0}

    found = judged(tmp_path, accuracy, rate="best", holds_if={"at_least": 0.95})
    assert [cell.mean.value for cell in found.cells] == pytest.approx([0.7, 0.7])
    assert found.outcome == "fails"


def test_no_rate_is_chosen_while_one_is_missing(tmp_path):
    found = judged(
        tmp_path, lambda _p, rate, _s: None if rate == 1e-1 else 0.99, rate="best", holds_if={"at_least": 0.95}
    )
    assert found.outcome == "open"
    assert outcome_words(found) == "open: 2 of 2 cells lack trials"


@pytest.mark.parametrize(
    ("accuracy", "condition", "holds"),
    [
        (CHANCE + 0.015, {"at_most": 0.02, "above": "chance"}, True),
        (CHANCE + 0.03, {"at_most": 0.02, "above": "chance"}, False),
        (CHANCE - 0.03, {"at_most": 0.02, "above": "chance"}, True),
        (CHANCE - 0.03, {"within": 0.02, "above": "chance"}, False),
        (CHANCE - 0.03, {"at_least": -0.02, "above": "chance"}, False),
        (CHANCE - 0.01, {"at_least": -0.02, "above": "chance"}, True),
    ],
)
def test_conditions_relative_to_chance(tmp_path, accuracy, condition, holds):
    found = judged(tmp_path, lambda *_: accuracy, holds_if=condition)
    assert found.outcome == ("holds" if holds else "fails")
    assert found.cells[0].mean.value == pytest.approx(accuracy - CHANCE)


def test_a_trial_that_diverged_has_an_accuracy_of_nothing(tmp_path):
    found = judged(tmp_path, lambda *_: {"state": "diverged"}, holds_if={"at_least": 0.95})
    assert found.outcome == "fails"
    assert {cell.mean.value for cell in found.cells} == {0.0}


def test_windows_are_compared_seed_by_seed(tmp_path):
    def accuracy(preset, rate, seed):
        wide = {"attention": 3, "mamba": 1 if seed < 3 else 2}[preset]
        return 0.99 if RATES.index(rate) in range(1, 1 + wide) else 0.1

    ratio = {"where": {"model.preset": "attention"}, "than": {"model.preset": "mamba"}, "by": "ratio"}
    found = judged(tmp_path, accuracy, quantity="window", **ratio, holds_if={"at_least": 1.2})
    (cell,) = found.cells  # windows of 2.5 decades (up to the end of the grid) against 1, 1 and 2
    assert sorted(cell.values.values()) == [pytest.approx(1.25), pytest.approx(2.5), pytest.approx(2.5)]
    assert cell.outcome == "holds"


def test_something_is_infinitely_more_than_nothing(tmp_path):
    def accuracy(preset, rate, seed):
        return 0.99 if rate == RATES[1] and (preset == "attention" or seed == 2) else 0.1

    ratio = {"where": {"model.preset": "attention"}, "than": {"model.preset": "mamba"}, "by": "ratio"}
    found = judged(tmp_path, accuracy, quantity="window", **ratio, holds_if={"at_least": 1})
    assert sorted(found.cells[0].values.values()) == [1.0, math.inf, math.inf]
    assert found.outcome == "holds"
    assert math.isinf(found.cells[0].mean.value)


@pytest.mark.parametrize(
    ("passing", "holds_if", "outcome"),
    [
        ({"attention": range(4), "mamba": range(4)}, {"at_least": 0}, "open"),  # either may be the wider one
        ({"attention": range(4), "mamba": range(4)}, {"at_most": 0}, "open"),
        ({"attention": range(4), "mamba": range(1, 3)}, {"at_least": 0.5}, "holds"),  # 3 decades or more against 2
        ({"attention": range(4), "mamba": range(1, 3)}, {"at_least": 1.5}, "open"),
        ({"attention": range(4), "mamba": range(1, 3)}, {"at_most": 0.5}, "fails"),
        ({"attention": range(1, 3), "mamba": range(4)}, {"at_least": 0}, "fails"),
        ({"attention": range(1, 3), "mamba": range(1, 3)}, {"at_least": 0}, "holds"),
    ],
)
def test_a_window_that_reaches_an_end_of_the_grid_may_be_wider(tmp_path, passing, holds_if, outcome):
    def accuracy(preset, rate, seed):
        return 0.99 if RATES.index(rate) in passing[preset] else 0.1

    compared = {"where": {"model.preset": "attention"}, "than": {"model.preset": "mamba"}, "by": "difference"}
    found = judged(tmp_path, accuracy, quantity="window", **compared, holds_if=holds_if)
    assert found.outcome == outcome


def test_a_window_that_is_compared_with_itself_is_known(tmp_path):
    compared = {"than": {"model.preset": "mamba"}, "by": "difference"}
    found = judged(tmp_path, lambda *_: 0.99, quantity="window", **compared, holds_if={"at_least": 0})
    labels = dict(zip(found.short_labels(), (cell.outcome for cell in found.cells), strict=True))
    assert labels == {"preset attention": "open", "what is compared with": "holds"}
    assert outcome_words(found) == "open: 1 of 2 cells depend on windows that reach an end of the grid"


def test_a_cell_is_named_by_what_differs_from_what_it_is_compared_with(tmp_path):
    than = {"model.preset": "attention", "train.lr": RATES[0]}
    found = judged(tmp_path, lambda *_: 0.9, than=than, by="difference", holds_if={"at_least": 0})
    labels = dict(zip((cell.label for cell in found.cells), found.short_labels(), strict=True))
    assert labels[f"preset attention, lr {RATES[0]:g}"] == "what is compared with"
    assert labels[f"preset attention, lr {RATES[1]:g}"] == f"lr {RATES[1]:g}"
    assert labels[f"preset mamba, lr {RATES[0]:g}"] == "preset mamba"
    assert labels[f"preset mamba, lr {RATES[1]:g}"] == f"preset mamba, lr {RATES[1]:g}"


def test_cells_that_are_compared_with_themselves_have_names_of_their_own(tmp_path):
    found = judged(tmp_path, lambda *_: 0.9, than={"model.preset": "mamba"}, by="difference", holds_if={"at_least": 0})
    assert len(set(found.short_labels())) == len(found.cells) == 2 * len(RATES)
    assert f"what is compared with, lr {RATES[1]:g}" in found.short_labels()


def test_what_a_finer_grid_of_rates_gains(tmp_path):
    """The rate is chosen on validation in both grids; only the finer one holds the rate that works."""

    def accuracy(preset, rate, seed):
        works = {"attention": (RATES[0], RATES[1]), "mamba": (RATES[1],)}[preset]
        return 0.9 + 0.01 * seed if rate in works else 0.1

    criterion = {"rate": "best", "than_rates": [RATES[0], RATES[2]], "holds_if": {"at_least": 0.1}}
    found = judged(tmp_path, accuracy, **criterion)
    assert outcomes(found) == {"preset attention": "fails", "preset mamba": "holds"}
    (gained,) = [cell for cell in found.cells if cell.label == "preset mamba"]
    assert sorted(gained.values.values()) == pytest.approx([0.81, 0.82, 0.83])
    with pytest.raises(UserError, match=r"has no rate 0\.5"):
        judged(tmp_path, accuracy, **{**criterion, "than_rates": [0.5]})


def test_a_trial_that_fails_may_lack_binding_and_one_that_passes_says_nothing(tmp_path):
    missing = {RATES[0]: "values, binding and recall", RATES[1]: "recall", RATES[2]: None, RATES[3]: "binding"}

    def row(_preset, rate, _seed):
        passes = rate in RATES[2:]
        return {"best_test_accuracy": 0.99 if passes else 0.2, "circuit": "not found", "missing": missing[rate]}

    found = judged(tmp_path, row, quantity="lacks_binding", holds_if={"at_least": 1})
    by_rate = {cell.label.rpartition(" ")[2]: cell.outcome for cell in found.cells if "mamba" in cell.label}
    assert list(by_rate.values()) == ["holds", "fails", "open", "open"]


@pytest.mark.parametrize(
    ("circuit", "missing", "outcome"),
    [
        ("not found", "match", "open"),  # no place of the model could tell which step it is
        ("a recall circuit is looked for elsewhere", "match", "open"),
        ("not found", "values and match", "holds"),  # without values, nothing is bound
        ("not found", "recall", "fails"),
        (None, None, "open"),
    ],
)
def test_what_cannot_be_told_of_a_circuit_decides_nothing(tmp_path, circuit, missing, outcome):
    row = {"best_test_accuracy": 0.2, "circuit": circuit, "missing": missing}
    found = judged(tmp_path, lambda *_: row, quantity="lacks_binding", holds_if={"at_least": 1})
    assert found.outcome == outcome


def test_the_cell_that_is_compared_has_the_same_rates(tmp_path):
    few = {"where": {"model.preset": "attention", "train.lr": RATES[1:3]}, "than": {"model.preset": "mamba"}}
    found = judged(tmp_path, lambda *_: 0.99, quantity="window", **few, by="ratio", holds_if={"at_least": 1})
    assert set(found.cells[0].values.values()) == {1.0}


def test_a_diverged_trial_is_not_judged_by_an_earlier_checkpoint(tmp_path):
    row = {"state": "diverged", "evaluated_accuracy_after_16_examples": 0.99}
    found = judged(
        tmp_path, lambda *_: row, quantity="evaluated_accuracy_after_16_examples", holds_if={"at_least": 0.5}
    )
    assert found.outcome == "fails"


def test_the_interval_of_an_accuracy_ends_at_one(tmp_path):
    found = judged(tmp_path, lambda _p, _r, seed: 0.9 + 0.03 * seed, holds_if={"at_least": 0.9})
    assert found.cells[0].mean.high == 1.0


@pytest.mark.parametrize(
    ("comparison", "low"), [({}, 0.0), ({"by": "ratio"}, 0.0), ({"by": "difference"}, pytest.approx(-3.1, abs=0.1))]
)
def test_the_interval_of_a_window_does_not_begin_below_nothing(tmp_path, comparison, low):
    def accuracy(preset, rate, seed):
        return 0.97 if preset == "mamba" or rate in RATES[1 : 2 + seed % 3] else 0.3

    than = {"than": {"model.preset": "mamba"}, **comparison} if comparison else {}
    where = {"model.preset": "attention"}
    found = judged(tmp_path, accuracy, quantity="window", where=where, holds_if={"at_least": 9}, **than)
    assert found.cells[0].mean.low == low


def test_a_curve_without_a_row_counts_for_nothing(tmp_path):
    sweep = made_up_sweep(tmp_path, lambda _: {"accuracy": 0.5}, lambda _: [(0, 0.1), (10, 0.5)], axes=AXES)
    digest = sweep.grid.trials[0].digest
    del sweep.results.rows[digest]
    criterion = Criterion.model_validate({"name": "it", "quantity": "bump", "holds_if": {"at_least": 1}})
    assert judge(criterion, sweep.grid, sweep.results).cells[0].outcome == "open"


@pytest.mark.parametrize(
    ("criterion", "says"),
    [
        ({"where": {"model.preset": ["attention", "mmaba"]}}, "has no value 'mmaba'; it has attention, mamba"),
        ({"where": {"train.lr": []}}, "empty list"),
        ({"than": {"model.preset": "mmaba"}}, "has no value 'mmaba'"),
        ({"than": {"train.seed": 1}}, "than cannot name train.seed"),
        ({"than": {"train.lr": RATES[0]}, "rate": "best"}, "than cannot name train.lr"),
        ({"quantity": "best_test_acuracy"}, "unknown quantity .*did you mean 'best_test_accuracy'"),
        ({"quantity": "step_09"}, "unknown quantity .*did you mean 'step_9"),
    ],
)
def test_what_would_be_judged_wrongly_is_refused(tmp_path, criterion, says):
    with pytest.raises(UserError, match=says):
        judged(tmp_path, lambda *_: 0.99, **{"holds_if": {"at_least": 0.95}, **criterion})


def test_rates_as_yaml_reads_them_are_the_rates_of_the_grid(tmp_path):
    found = judged(tmp_path, lambda *_: 0.99, where={"train.lr": ["1e-3", 1e-2]}, holds_if={"at_least": 0.95})
    assert len(found.cells) == 4


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ({"than": {"a": [1]}}, "one value for each axis"),
        ({"than": {"a": 1}, "holds_if": {"at_most": 0.1, "above": "chance"}}, "above: chance is for a value"),
    ],
)
def test_comparisons_that_mean_nothing_are_refused(keys, says):
    with pytest.raises(ValueError, match=says):
        Criterion.model_validate({"name": "it", "quantity": "q", "holds_if": {"at_most": 0.1}, **keys})


def test_a_trial_that_never_gets_there_takes_infinitely_many_steps(tmp_path):
    def row(preset, _rate, seed):
        return {} if preset == "attention" or seed == 3 else {"step_90": 400 + seed}

    ratio = {"where": {"model.preset": "mamba"}, "than": {"model.preset": "attention"}, "by": "ratio"}
    found = judged(tmp_path, row, quantity="step_90", **ratio, holds_if={"at_most": 0.99}, seeds=2)
    values = list(found.cells[0].values.values())
    assert values[:2] == [0.0, 0.0]
    assert math.isnan(values[2])
    assert found.outcome == "holds"


def test_a_ratio_of_nothing_to_nothing_is_not_known(tmp_path):
    ratio = {"where": {"model.preset": "attention"}, "than": {"model.preset": "mamba"}, "by": "ratio"}
    found = judged(tmp_path, lambda *_: 0.0, quantity="window", **ratio, holds_if={"at_least": 2})
    assert all(math.isnan(value) for value in found.cells[0].values.values())
    assert found.outcome == "open"
    assert outcome_words(found) == "open: 1 of 1 cells have all trials and no answer"


@pytest.mark.parametrize(
    ("criterion", "says"),
    [
        ({"where": {"model.prset": "mamba"}}, r"axis in criterion 'it' 'model\.prset'; did you mean 'model\.preset'"),
        ({"where": {"model.preset": "hyena"}}, "has no value 'hyena'"),
        ({"seeds": 4}, "seeds: 4, and .* has 3"),
        ({"where": {"model.preset": "mamba"}, "than": {"model.preset": "hyena"}}, "has no value 'hyena'"),
    ],
)
def test_what_no_table_can_answer_is_refused_in_one_line(tmp_path, criterion, says):
    with pytest.raises(UserError, match=says):
        judged(tmp_path, lambda *_: 0.5, **criterion, holds_if={"at_least": 0.95})


def test_a_bump_with_or_without_accuracy_is_read_off_the_curves(tmp_path):
    """The loss falls in a step in both presets; the accuracy passes 1/k in one of them only."""

    def row(trial):
        return {"accuracy": 0.5}

    sweep = made_up_sweep(tmp_path, row, axes={**AXES, "train.lr": [1e-3]})
    steps = np.arange(0, 1001, 20)
    turn = 1 / (1 + np.exp(-(steps - 500) / 15))
    for trial in sweep.grid.trials:
        noise = 0.01 * np.random.default_rng(trial.values["train.seed"]).standard_normal(len(steps))
        top = CHANCE if trial.values["model.preset"] == "attention" else 1.0
        points = zip(steps.tolist(), (4 - 3 * turn + noise).tolist(), (top * turn).tolist(), strict=True)
        curve = [{"step": step, "loss": loss, "accuracy": accuracy} for step, loss, accuracy in points]
        sweep.results.add(sweep.results.rows[trial.digest], curve, write=False)
    attention, mamba = "preset attention, lr 0.001", "preset mamba, lr 0.001"
    expected = {
        "bump_without_accuracy": {attention: "holds", mamba: "fails"},
        "bump_with_accuracy": {attention: "fails", mamba: "holds"},
        "bump": {attention: "holds", mamba: "holds"},
    }
    for quantity, cells in expected.items():
        criterion = {"name": "it", "quantity": quantity, "holds_if": {"at_least": 1}, "seeds": 2}
        found = judge(Criterion.model_validate(criterion), sweep.grid, sweep.results)
        assert outcomes(found) == cells


def test_a_curve_that_ends_before_its_run_tells_nothing_of_a_bump(tmp_path):
    steps = np.arange(0, 1001, 25)

    def judged_with(folder, last):
        def curve(_):
            return [(int(step), 0.25 + 0.7 / (1 + math.exp(-(step - 400) / 30))) for step in steps if step <= last]

        sweep = made_up_sweep(folder, lambda _: {"accuracy": 0.95}, curve, axes=AXES)
        bump = Criterion.model_validate({"name": "it", "quantity": "bump", "holds_if": {"at_most": 1}})
        return judge(bump, sweep.grid, sweep.results)

    assert judged_with(tmp_path / "cut", 500).outcome == "open"


def test_of_a_trial_that_diverged_only_the_metric_is_the_worst_and_a_step_is_never_reached(tmp_path):
    row = {
        "state": "diverged",
        "accuracy": 0.97,
        "step_90": 200,
        "any_value_accuracy": 0.25,
        "best_validation_loss": 0.1,
    }
    for k, (quantity, holds_if, outcome) in enumerate(
        [
            ("best_test_accuracy", {"at_most": 0.5}, "holds"),
            ("step_90", {"at_most": 500}, "fails"),
            ("any_value_accuracy", {"at_least": 0.2}, "holds"),
            ("best_validation_loss", {"at_most": 1}, "fails"),
        ]
    ):
        found = judged(tmp_path / str(k), lambda *_: dict(row), quantity=quantity, holds_if=holds_if)
        assert found.outcome == outcome, quantity


@pytest.mark.parametrize(
    ("criterion", "said"),
    [
        ({"rate": "best", "where": {"train.lr": RATES[:2]}, "than_rates": [RATES[0], RATES[2]]}, "lacks the rates"),
        ({"where": {"model.preset": "mamba"}, "than": {"model.preset": "mamba"}}, "compared with itself alone"),
    ],
)
def test_a_comparison_that_means_nothing_is_refused(tmp_path, criterion, said):
    with pytest.raises(UserError, match=said):
        judged(tmp_path, lambda *_: 0.9, holds_if={"at_least": 0}, **criterion)


def test_a_window_needs_the_same_seeds_at_every_rate(tmp_path):
    left_out = [{"train.seed": 2, "train.lr": RATES[1]}]
    with pytest.raises(UserError, match="window needs the same seeds at every rate"):
        judged(tmp_path, lambda *_: 0.99, exclude=left_out, quantity="window", holds_if={"at_least": 1})


def test_two_rates_can_be_compared(tmp_path):
    at = {"where": {"train.lr": RATES[0]}, "than": {"train.lr": RATES[1]}}
    found = judged(tmp_path, lambda _, rate, __: 0.5 + rate, holds_if={"at_most": 0}, **at)
    assert found.outcome == "holds"
