"""`circuitscope probe`: the list, a table and a figure, and refusals in one line."""

import re
import sys

import pytest

from circuitscope.cli import main as program
from circuitscope.cli import probe as command
from circuitscope.training.trainer import train
from tiny_run import tiny

if not any(c.name == "probe" for c in program.app.registered_commands):
    program.app.command("probe")(command.probe)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    train(tiny(), root=folder, name="tiny")
    return folder


@pytest.fixture
def circuitscope(monkeypatch, capsys, tmp_path, runs):
    """Runs the program in this process, in an empty folder; its runs are elsewhere."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CIRCUITSCOPE_RUNS", str(runs))
    monkeypatch.setenv("COLUMNS", "200")

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["circuitscope", *map(str, arguments)])
        with pytest.raises(SystemExit) as stop:
            program.main()
        printed = capsys.readouterr()
        return stop.value.code or 0, re.sub(r"\x1b\[[0-9;]*m", "", printed.out), printed.err

    return run


def test_without_a_probe_it_lists_them(circuitscope):
    code, out, _ = circuitscope("probe")
    assert code == 0
    for name in ("own-token", "previous-token", "bound-key", "bound-value", "position", "weight-vector"):
        assert re.search(rf"^{name} +(embedding|logistic|ridge) +\w", out, re.MULTILINE)


def test_a_probe_of_the_newest_run_prints_the_last_step_and_draws(circuitscope, runs):
    code, out, err = circuitscope("probe", "--probe", "bound-value", "--sequences", 60)
    assert code == 0, err
    lines = out.splitlines()
    assert lines[0].startswith("tiny, step 12, bound-value: At a query")
    assert lines[1].split()[:3] == ["hook", "role", "accuracy"]
    assert "step 0" in lines[1]
    assert [line.split()[0] for line in lines[2:4]] == ["blocks.0.hook_resid_post", "blocks.1.hook_resid_post"]
    assert lines[-1] == str(runs / "tiny" / "figures" / "probe-bound-value.png")
    assert (runs / "tiny" / "figures" / "probe-bound-value.png").read_bytes().startswith(b"\x89PNG")


def test_a_file_steps_hooks_and_a_figure_of_ones_own(circuitscope, runs, tmp_path):
    (tmp_path / "mine.yaml").write_text(
        "about: mine\ntarget: previous-token\nroles: [value]\nmodel: candidates\ncandidates: sequence\n"
    )
    arguments = ["--probe", "mine.yaml", "--steps", "0,12", "--hooks", "hook_embed, blocks.1.*resid_post"]
    code, out, err = circuitscope("probe", runs / "tiny", *arguments, "--sequences", 60, "--out", "f.svg", "--data")
    assert code == 0, err
    assert "tiny, step 12, mine: mine" in out
    assert re.search(r"^hook_embed +value", out, re.MULTILINE)
    assert re.search(r"^blocks.1.hook_resid_post +value", out, re.MULTILINE)
    assert out.splitlines()[-2:] == ["f.svg", "f.csv"]
    header, *rows = (tmp_path / "f.csv").read_text().splitlines()
    assert "selectivity" in header
    assert len(rows) == 4


def test_causal_prints_what_is_lost(circuitscope):
    code, out, err = circuitscope(
        "probe", "--probe", "bound-key", "--steps", 12, "--sequences", 60, "--causal", "--directions", 2
    )
    assert code == 0, err
    assert "projected out" in out
    assert re.search(r"^blocks.0.hook_resid_post +value +2 +0\.\d{3}", out, re.MULTILINE)


def test_dashes_are_explained_once(circuitscope, tmp_path):
    (tmp_path / "mine.yaml").write_text(
        "about: m\ntarget: bound-key\nroles: [value]\nmodel: candidates\ncontrol: none\n"
    )
    code, out, err = circuitscope("probe", "--probe", "mine.yaml", "--steps", 12, "--sequences", 60)
    assert code == 0, err
    assert out.count("a dash stands where no control was fitted: the probe says control: none\n") == 1


def test_twice_is_once(circuitscope):
    circuitscope("probe", "--probe", "bound-value", "--sequences", 63, "--steps", "0,3")
    code, _, err = circuitscope("probe", "--probe", "bound-value", "--sequences", 63, "--steps", "0,3")
    assert code == 0
    assert "2 of 2 checkpoints were analyzed before" in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--probe", "bound-vale"], "unknown probe 'bound-vale'; did you mean 'bound-value'"),
        (["--probe", "missing.yaml"], "there is no probe file missing.yaml"),
        (["--probe", "bad.yaml"], "bad.yaml: unknown key 'targt'; did you mean 'target'"),
        (["nowhere", "--probe", "bound-key"], "nowhere"),
        (["--probe", "bound-key", "--hooks", "hook_embd"], "unknown hook 'hook_embd'; did you mean 'hook_embed'"),
        (["--probe", "bound-key", "--steps", "x"], "steps are all"),
        (["--probe", "bound-key", "--out", "figure.txt"], "figures end in"),
        (["--probe", "bound-key", "--probe", "position", "--out", "a.png"], "one --probe"),
        (["--probe", "bound-key", "--directions", "2"], "give --causal too"),
        (["--probe", "weight-vector"], "weight-vector needs a batch that carries"),
        (["--probe", "bound-key", "--sequences", "3"], "at least 6 sequences"),
        (["--probe", "bound-value-in-state"], "no layer of this model has one: they are attention"),
    ],
)
def test_bad_input_is_one_line_and_code_2(circuitscope, tmp_path, arguments, message):
    (tmp_path / "bad.yaml").write_text("targt: own-token\ntarget: own-token\nroles: each\nmodel: embedding\n")
    code, _, err = circuitscope("probe", *arguments)
    assert code == 2
    assert message in err
    assert len(err.strip().splitlines()) == 1


def test_help_does_not_load_the_engine():
    """The module of the command imports nothing but typer at its top."""
    import subprocess

    script = (
        "import sys, circuitscope.cli.probe; print([m for m in ('torch', 'sklearn', 'pandas') if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    assert out.strip() == "[]"
