"""The reference of the config's fields: complete, true, and the same in the terminal and in docs/config.md."""

import sys
from pathlib import Path
from typing import Annotated, Literal

import pytest
import yaml
from pydantic import Field

from circuitscope.cli import main as program
from circuitscope.config import RunConfig
from circuitscope.config.fields import find, markdown, parts, recipe_parts
from circuitscope.errors import UserError
from circuitscope.section import DefaultBy, Section, Unit
from circuitscope.tasks import MQAR, TASKS, register
from registered import added_to

PAGE = Path(__file__).parents[1] / "docs" / "config.md"


def names(word):
    return [f"{part.name}.{row.field}" for part in find(word) for row in part.fields]


@pytest.fixture
def printed(monkeypatch, capsys):
    """What `circuitscope train --fields WORDS` prints, and its exit code."""

    def run(*words: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["circuitscope", "train", "--fields", *words])
        with pytest.raises(SystemExit) as stop:
            program.main()
        return stop.value.code or 0, *capsys.readouterr()

    return run


def test_the_page_is_what_the_code_says():
    assert PAGE.read_text() == markdown([*parts(own=True), *recipe_parts()]), (
        "docs/config.md is stale; write it again with: make reference"
    )


def test_every_field_says_what_it_means():
    for part in parts(own=True):
        assert part.about, part.name
        assert all(row.meaning for row in part.fields), part


def test_every_count_says_what_it_counts():
    without = {"seed", "data_seed", "hmm_seed", "version"}
    for part in parts(own=True):
        for row in part.fields:
            assert row.unit or row.field in without or not row.type.startswith("integer"), (part.name, row)


def test_every_value_of_a_run_is_in_the_reference():
    config = yaml.safe_load(RunConfig().dump())
    listed = {part.name: {row.field for row in part.fields} for part in parts()}
    assert config["model"].keys() == listed["model"]
    assert config["train"].keys() == listed["train"]
    assert config["task"].keys() - {"name"} == listed["task.mqar"]
    assert config["model"]["mixers"][0].keys() - {"name"} == listed["mixer.attention"]


def test_a_default_that_depends_on_something_says_on_what():
    """Beside the fields whose value a config without them finds by itself, for at least one model and task."""
    plain = RunConfig().model.model_dump()
    other = RunConfig.build("mambaformer", "ar", length=16, n_layers=3).model.model_dump()
    found = {name for name in plain if plain[name] != other[name]} - {"mixers"}
    assert found == {"n_layers", "positions", "init", "rescale_residual", "vocab_size", "max_length", "state_mixer"}
    (model,) = find("model")
    says = {row.field for row in model.fields if row.default != str(plain[row.field]).lower()} - {
        "mixers",
        "norm_eps",
        "embed_dropout",
        "d_input",  # a task on vectors gives them
        "d_output",
    }
    assert says == found - {"state_mixer"}  # the preset gives it


def test_types_bounds_and_units_are_in_words():
    class Words(Section):
        """For this test."""

        count: Annotated[int | None, Unit("steps"), DefaultBy("none: all")] = Field(default=None, ge=1, lt=2**40)
        share: float = Field(default=0.5, ge=0, le=1, description="a | b")
        choice: Literal["", "a", "b"] = ""
        flag: bool = True
        even: int = Field(default=10**6, multiple_of=2)
        must: str

    from circuitscope.config.fields import _part

    words = _part("words", Words, "")
    assert [tuple(row) for row in words.fields] == [
        ("count", "integer ≥ 1 and < 2^40 or none", "none: all", "steps", ""),
        ("share", "number from 0 to 1", "0.5", "", "a | b"),
        ("choice", '"", a or b', '""', "", ""),
        ("flag", "true or false", "true", "", ""),
        ("even", "integer a multiple of 2", "10^6", "", ""),
        ("must", "text", "must be given", "", ""),
    ]
    assert "a &#124; b" in markdown([words])


def test_a_word_picks_sections_or_fields():
    assert {name.rpartition(".")[0] for name in names("task")} == {f"task.{name}" for name in TASKS}
    assert {name.rpartition(".")[0] for name in names("mamba")} == {"mixer.mamba"}
    assert names("warmup") == names("train.warmup") == ["train.warmup"]
    assert names("task.mqar.filler") == ["task.mqar.filler"]
    assert names("task.length") == [f"task.{n}.length" for n in sorted(TASKS) if "length" in TASKS[n].model_fields]
    assert "mixer.attention.n_heads" in names("model.mixers.*.n_heads") == names("model.mixers.0.n_heads")
    assert names("queries and keys")[0].startswith("model.positions")  # a word of the meaning


@pytest.mark.parametrize(
    ("word", "nearest"), [("wramup", "'warmup'"), ("task.mqra", "'task.mqar'"), ("zzz", "sections")]
)
def test_a_word_for_nothing_is_one_line_with_the_nearest(printed, word, nearest):
    code, out, err = printed(word)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert nearest in err
    with pytest.raises(UserError):
        find(word)


def test_the_command_prints_every_field(printed):
    code, out, err = printed()
    assert (code, err) == (0, "")
    for part in parts():
        assert f"\n{part.name}: " in "\n" + out
        assert all(row.field in out for row in part.fields)
    assert "number from 0 to 1; unit: share of the steps; default: 0.1" in printed("warmup")[1]


def test_the_command_takes_no_other_option_and_help_points_to_it(printed, monkeypatch, capsys):
    code, _, err = printed("--steps", "3")
    assert (code, err.count("\n")) == (2, 1)
    monkeypatch.setattr(sys, "argv", ["circuitscope", "train", "--help"])
    with pytest.raises(SystemExit):
        program.main()
    assert "--fields" in capsys.readouterr().out


def test_a_task_of_another_package_is_listed_and_not_on_our_page(printed):
    with added_to(TASKS):

        @register("theirs")
        class Theirs(MQAR):
            """A task of someone else."""

            name: Literal["theirs"] = "theirs"
            hops: int = Field(default=2, description="how often to follow")

        Theirs.__module__ = "elsewhere"
        TASKS._from["theirs"] = "elsewhere"
        out = printed("theirs")[1]
        assert "A task of someone else." in out
        assert "how often to follow" in out
        assert "theirs" not in markdown(parts(own=True))
