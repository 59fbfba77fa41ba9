"""Why trials fail, read from rows with known numbers, and the figure of it."""

import math

import pytest

from circuitscope.errors import UserError
from circuitscope.sweeps.cells import Cells
from circuitscope.sweeps.reasons import reasons
from circuitscope.viz.why import why
from made_up_sweeps import RATES, made_up_sweep

AXES = {"train.seed": [1, 2], "model.preset": ["attention", "mamba"], "train.lr": RATES}
MISSING = dict(zip(RATES, ("values, binding and recall", "", "binding", "match"), strict=True))


def found(folder, **more):
    def row(trial):
        lr, preset = trial.values["train.lr"], trial.values["model.preset"]
        if trial.values["train.seed"] == 2 and lr == RATES[0]:
            return None
        gradients = {"grad_norm/embed": 10 * lr} | ({"grad_norm/conv": lr} if preset == "mamba" else {})
        circuit = {"circuit": "found" if not MISSING[lr] else "not found", "missing": MISSING[lr]}
        return {"accuracy": 0.99 if not MISSING[lr] else 0.25, **circuit, "clipped": 0.5, **gradients, **more}

    sweep = made_up_sweep(folder, row, axes=AXES)
    return reasons(Cells.of(sweep.grid, sweep.results), sweep.results)


def test_each_word_for_what_is_missing_says_which_steps_formed(tmp_path):
    table = found(tmp_path)
    one = table[(table["line"] == "mamba") & (table["seed"] == "1")].set_index("x")
    formed = {rate: tuple(one.loc[rate, ["values", "binding", "recall"]]) for rate in RATES}
    assert formed[RATES[0]] == (0, 0, 0)
    assert formed[RATES[1]] == (1, 1, 1)
    assert formed[RATES[2]] == (1, 0, 1)
    assert formed[RATES[3]][0] == 1
    assert all(math.isnan(step) for step in formed[RATES[3]][1:])  # no place could tell which step


def test_gradients_belong_to_the_models_that_have_the_group(tmp_path):
    table = found(tmp_path)
    conv = table.groupby("line")["gradient/conv"].count()
    assert (conv["attention"], conv["mamba"]) == (0, 7)  # a trial that is not done has no row
    assert table["stability"].isna().all()


def test_a_sweep_without_measured_circuits_is_refused_in_one_line(tmp_path):
    with pytest.raises(UserError, match=r"measure: .circuit, curvature."):
        found(tmp_path, circuit="", missing="")


def test_the_figure_shows_the_share_of_seeds_in_which_a_step_formed(tmp_path):
    table = found(tmp_path)
    second = (table["seed"] == "2") & (table["x"] == RATES[2])
    words = {"title": "it", "value": "accuracy", "level": "1/k"}
    figure = why(table.assign(binding=table["binding"].mask(second, 1.0)), threshold=0.95, **words)
    titles = [axes.get_title(loc="left") for axes in figure.axes]
    assert [title for title in titles if title] == ["attention", "mamba"]
    circuit = next(axes for axes in figure.axes if [t.get_text() for t in axes.get_yticklabels()][:1] == ["values"])
    binding = [-bar.get_height() / 0.8 for bar in circuit.patches if bar.get_facecolor()[:3] == pytest.approx(PURPLE)]
    assert binding == pytest.approx([1.0, 0.5])  # at the second and third rate


PURPLE = (0xAA / 255, 0x44 / 255, 0x99 / 255)
