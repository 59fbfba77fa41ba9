"""A short form of `make fuzz`, and that the walk would notice what it looks for."""

import os
import re
import subprocess
import sys
from pathlib import Path

import outcome
import pytest
import walk
from outcome import Finding

from circuitscope.cli import main as program
from circuitscope.errors import UserError

PLACE = Path(walk.__file__)


def test_two_hundred_inputs_meet_no_traceback_and_no_bug(tmp_path):
    done = subprocess.run(
        [sys.executable, PLACE, "--inputs", "200", "--seed", "1"],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    assert re.search(r"^fuzz passed: 200 inputs in 1 process,", done.stdout, re.MULTILINE), done.stdout


def test_an_input_is_a_function_of_seed_and_number():
    for number in range(40):
        one, again, other = walk.make(3, number), walk.make(3, number), walk.make(4, number)
        assert repr(one.parts) == repr(again.parts)
        assert one.kind == again.kind == other.kind
    assert repr([walk.make(3, n).parts for n in range(40)]) != repr([walk.make(4, n).parts for n in range(40)])


def test_every_command_is_walked():
    walked = {_command(walk.make(0, number)) for number in range(0, 4000, 4)}
    assert {("train",), ("analyze",), ("plot", "decay"), ("models", "hooks"), ("doctor",)} <= walked
    assert walked == set(walk.flags.commands())


def _command(step):
    line = step.words(step.parts, Path())
    known = [words for words in walk.flags.commands() if tuple(line[: len(words)]) == words]
    return max(known, key=len)


@pytest.mark.parametrize(
    ("raised", "group"),
    [
        (KeyError("x"), r"^command: KeyError in"),
        (UserError(""), "empty message"),
        (UserError("1 validation error for RunConfig"), "words of another library"),
    ],
)
def test_a_command_that_fails_in_a_bad_way_is_a_finding(monkeypatch, raised, group):
    def app(args, prog_name, standalone_mode):
        raise raised

    monkeypatch.setattr(program, "app", app)
    found = outcome.command(["train"])
    assert isinstance(found, Finding)
    assert re.search(group, found.group), found.group


def test_control_characters_that_reach_the_terminal_are_a_finding(monkeypatch):
    def app(args, prog_name, standalone_mode):
        print("circuitscope: a\x1b[31mb", file=sys.stderr)
        return 2

    monkeypatch.setattr(program, "app", app)
    found = outcome.command(["train"])
    assert isinstance(found, Finding)
    assert "control characters" in found.group


def test_a_command_that_refuses_in_one_line_is_fine_and_so_is_one_that_works():
    assert outcome.command(["tasks"]) == "done"
    assert outcome.command(["tasks", "show", "mqra"]) == "refused"
    assert outcome.command(["nothing"]) == "refused"


def test_a_command_without_an_end_is_a_finding(monkeypatch):
    def app(args, prog_name, standalone_mode):
        while True:
            pass

    monkeypatch.setattr(program, "app", app)
    monkeypatch.setattr(outcome, "SECONDS", 0.1)
    found = outcome.command(["train"])
    assert isinstance(found, Finding)
    assert "TooLong" in found.group


def test_a_call_may_refuse_with_our_error_or_for_a_wrong_number_of_arguments_and_nothing_else():
    from circuitscope.tasks import task

    assert outcome.call(lambda: task("mqar", length=16, pairs=2)) == "done"
    assert outcome.call(lambda: task("mqra")) == "refused"
    assert outcome.call(lambda: task("mqar", "surplus")) == "refused"
    found = outcome.call(lambda: {}["x"])
    assert isinstance(found, Finding)
    assert found.group == "call: KeyError in outside"
