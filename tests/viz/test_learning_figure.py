"""Curves of a sweep, read from its tables, and the figure of them."""

import pytest

from circuitscope.errors import UserError
from circuitscope.sweeps.learning import learning_curves
from circuitscope.viz.learning import learning
from made_up_sweeps import made_up_sweep

RATES = [1e-3, 4.642e-3]


def curves(folder, **axes):
    sweep = made_up_sweep(folder, lambda _: {"accuracy": 0.9}, axes=axes)
    for number, trial in enumerate(sweep.grid.trials):
        sweep.results.curves[trial.digest] = [
            {"step": step, "loss": 6.0 - step, "accuracy": 0.1 * (number + step)} for step in (0, 1)
        ] + [{"step": 2, "recall": 0.5}]  # a score at a step without an evaluation
    return sweep


def test_every_trial_has_its_points_with_model_rate_and_seed(tmp_path):
    sweep = curves(tmp_path, **{"train.seed": [1, 2], "model.preset": ["attention", "mamba"], "train.lr": RATES})
    table = learning_curves(sweep.grid, sweep.results)
    assert len(table) == 8 * 2
    last = table.iloc[-1]
    assert (last.model, last.rate, last.seed, last.step, last.loss) == ("preset mamba", RATES[1], "2", 1, 5.0)
    assert last.value == pytest.approx(0.8)
    assert set(table.chance) == {0.25}
    assert set(table.groupby("model").size()) == {8}


def test_lines_are_coloured_by_rate_and_by_seed_if_there_is_one_rate(tmp_path):
    by_rate = curves(
        tmp_path / "a", **{"train.seed": [1, 2], "model.preset": ["attention", "mamba"], "train.lr": RATES}
    )
    by_seed = curves(tmp_path / "b", **{"train.seed": [1, 2], "model.preset": ["attention", "mamba"]})
    for sweep, words in ((by_rate, ["1e-3", "4.6e-3"]), (by_seed, ["seed 1", "seed 2"])):
        table = learning_curves(sweep.grid, sweep.results)
        figure = learning(table, title="it", value="accuracy", level="guessing")
        assert [text.get_text() for text in figure.legends[0].get_texts()] == [*words, "guessing"]
        loss = figure.axes[0]
        assert loss.get_title(loc="left") == "preset attention"
        assert len(loss.lines) == len(sweep.grid.trials) / 2
        assert len({line.get_color() for line in loss.lines}) == 2


def test_a_sweep_without_curves_is_refused_in_one_line(tmp_path):
    sweep = made_up_sweep(tmp_path, lambda _: {"accuracy": 0.9})
    with pytest.raises(UserError, match="no curve"):
        learning_curves(sweep.grid, sweep.results)
