"""The study of recipes: its grids are as it says, and what `circuitscope models` shows comes from its tables."""

import importlib.util
import sys
from pathlib import Path

import pytest

from circuitscope.cli import main as program
from circuitscope.config import reached
from circuitscope.config.reached import FILE, Reached, as_csv, in_words
from circuitscope.config.recipes import FAMILIES, RECIPES
from circuitscope.models.presets import PRESETS
from circuitscope.sweeps.grid import read_grid
from circuitscope.sweeps.results import ResultsTable

STUDY = Path(__file__).parents[1] / "studies/recipes"
SIX = [preset for preset in PRESETS if FAMILIES.get(preset) == preset]


@pytest.fixture
def study(monkeypatch):
    """The script that makes the column."""
    spec = importlib.util.spec_from_file_location("recipe_study", STUDY / "reached.py")
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)  # type: ignore[union-attr]
    return module


def test_what_models_shows_is_what_the_tables_say(study):
    assert FILE.read_text() == as_csv(study.rows()), "config/reached.csv is stale; write it again with: make reached"


def test_rows_are_taken_where_every_seed_ran_with_todays_recipe(study, tmp_path):
    for name in study.GRIDS:
        (tmp_path / name).mkdir()
        (tmp_path / name / "grid.yaml").write_text((STUDY / name / "grid.yaml").read_text())
    table = ResultsTable(tmp_path / "verify")
    for number, trial in enumerate(read_grid(tmp_path / "verify").trials):
        preset, seed = trial.values["model.preset"], trial.values["train.seed"]
        row = {"digest": trial.digest, **trial.values, "state": "finished"}
        if preset == "mamba":
            table.add({**row, "last_test_accuracy": 0.99 - number / 1000}, [], write=False)
        if preset == "hyena" and seed != 103:
            table.add({**row, "last_test_accuracy": 1.0}, [], write=False)
        if preset == "based":
            table.add({**row, "state": "diverged"}, [], write=False)
        if preset == "attention":  # with a recipe of before
            table.add({**row, "digest": f"0000{number:08}", "last_test_accuracy": 1.0}, [], write=False)
    table.write()
    (mamba, based) = study.rows(tmp_path)
    assert mamba == Reached("mamba", 3, pytest.approx(0.99 - 13 / 1000))
    assert based.lowest_accuracy == 0.0


def test_the_grids_cover_the_six_on_fresh_seeds_and_nearby_and_every_other_preset_once():
    verify, nearby, others = (read_grid(STUDY / name).trials for name in ("verify", "nearby", "others"))
    assert {(t.values["model.preset"], t.values["train.seed"]) for t in verify} == {
        (preset, seed) for preset in SIX for seed in (101, 102, 103)
    }
    settings = {(t.config.task.length, t.config.task.pairs, t.config.task.vocab_size) for t in nearby}
    assert len(SIX) == 6
    assert len(settings) == 8
    assert len(nearby) == 48
    assert all(16 <= n <= 128 and 2 <= k <= 8 and 128 <= v <= 8192 for n, k, v in settings)
    assert {t.values["model.preset"] for t in others} == PRESETS.keys() - set(SIX)
    for trial in verify:
        rate = RECIPES[str(trial.values["model.preset"])].fields.get("train.lr")
        assert not isinstance(rate, float) or trial.config.train.lr == rate


def test_what_was_reached_is_said_in_a_few_words(monkeypatch):
    rows = {"mamba": Reached("mamba", 3, 0.9899), "rwkv": Reached("rwkv", 1, 0.241)}
    monkeypatch.setattr(reached, "reached", lambda: rows)
    assert [in_words(preset) for preset in ("mamba", "rwkv", "s4")] == ["98%", "untuned: 24%", "not run"]


@pytest.mark.parametrize("columns", [80, 160])
def test_the_table_of_models_fits_its_terminal_with_a_row_per_model(monkeypatch, capsys, columns):
    rows = {preset: Reached(preset, 3, 1.0) for preset in PRESETS}
    monkeypatch.setattr(reached, "reached", lambda: rows)
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setattr(sys, "argv", ["circuitscope", "models"])
    with pytest.raises(SystemExit):
        program.main()
    lines = capsys.readouterr().out.splitlines()
    sizes = [line for line in lines if line.split("  ")[0].strip() in PRESETS and ("untuned" in line or "100%" in line)]
    assert len(sizes) == len(PRESETS)
    assert sum("untuned" not in line for line in sizes) == 6
    end = next(i for i, line in enumerate(lines) if line.startswith("counted"))
    assert max(map(len, map(str.rstrip, lines[:end]))) <= columns
    assert max(map(len, lines[end:])) <= 100
    for preset in PRESETS.values():
        assert preset.about.split()[0] in "\n".join(lines)
