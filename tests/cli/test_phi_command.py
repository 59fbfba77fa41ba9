"""`circuitscope phi` and `circuitscope plot`: files, names, numbers beside them, one line for bad input."""

import sys

import pandas as pd
import pytest

from circuitscope.cli import main as program
from circuitscope.training.trainer import train
from tiny_run import tiny

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """Runs `attention`, `other` (the same with another seed) and `lstm`; checkpoints at 0, 6 and 12."""
    root = tmp_path_factory.mktemp("runs")
    for name, options in (("lstm", {"mixers": "lstm"}), ("other", {"seed": 1}), ("attention", {})):
        train(tiny(save_every=6, eval_every=1, **options), root=root, name=name)
    return root


@pytest.fixture
def circuitscope(monkeypatch, capsys, root):
    """Runs the program on these runs; gives exit code, what it printed, and what it complained about."""
    monkeypatch.setenv("CIRCUITSCOPE_RUNS", str(root))
    monkeypatch.setenv("COLUMNS", "200")

    def run(*arguments: object) -> tuple[int, list[str], str]:
        monkeypatch.setattr(sys, "argv", ["circuitscope", *map(str, arguments)])
        with pytest.raises(SystemExit) as stop:
            program.main()
        printed = capsys.readouterr()
        code = stop.value.code or 0
        assert isinstance(code, int)
        return code, printed.out.split("\n")[:-1], printed.err

    return run


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ("", "phi-L0-step12"),
        ("--layer 1 --step 6", "phi-L1-step6"),
        ("--layer -1 --step 6", "phi-L1-step6"),
        ("--step 6 --example 3", "phi-L0-step6-example3"),
        ("--step 6 --mark recall,binding", "phi-L0-step6-markrecall-binding"),
        ("--steps 0,6,12", "phi-L0-steps0-6-12"),
        ("--steps 0:12:6 --head 0 --scale log", "phi-L0-steps0-12-6-head0-scalelog"),
        ("--factors pattern --top 1 --by query<-value", "phi-L0-step12-pattern-top1-byquery--value"),
    ],
)
def test_the_figure_of_the_newest_run_lies_in_its_folder_under_a_name_that_says_what_it_is(
    circuitscope, root, arguments, name
):
    code, out, err = circuitscope("phi", *arguments.split())
    assert (code, err) == (0, "")
    assert out == [str(root / "attention" / "figures" / f"{name}.png")]
    assert (root / "attention" / "figures" / f"{name}.png").read_bytes().startswith(b"\x89PNG")


def test_a_file_and_the_numbers_behind_it(circuitscope, root, tmp_path):
    target = tmp_path / "a" / "phi.pdf"
    code, out, _ = circuitscope("phi", root / "attention", "--step", 6, "--mark", "recall", "--out", target, "--data")
    assert (code, out) == (0, [str(target), str(target.with_suffix(".csv"))])
    assert target.read_bytes().startswith(b"%PDF")
    data = pd.read_csv(target.with_suffix(".csv"))
    assert set(data.step) == {6}
    assert len(data) == 16 * 17 / 2
    assert data.groupby("dest").value.sum().tolist() == pytest.approx([1] * 16, rel=1e-5)  # attention


BAD = {
    "phi --step 7": "nearest: 6",
    "phi --steps 0,7": "nearest: 6",
    "phi --step 6 --steps 6": "not both",
    "phi --layer 2": "from 0 to 1",
    "phi --head 4": "head must be from 0 to 0, got 4",
    "phi --heads some": "mean_abs",
    "phi --heads all,0": "--heads: expected all, mean, mean_abs, or numbers such as 0,2, got 'all,0'",
    "phi --factors all,pattern": "all stands for every factor and goes with no other name, got 'all,pattern'",
    "phi --mark ,": "--mark: expected names separated by commas, got ','",
    "phi --steps ,": "got ''",
    "phi --factors pattrn": "did you mean 'pattern'",
    "phi --scale logg": "did you mean 'log'",
    "phi --out phi.jpg": ".png, .svg, .pdf",
    "phi --top 2 --by recal": "did you mean 'recall'",
    "phi --mark recal": "did you mean 'recall'",
    "phi --example -2": "example",
    "phi nowhere": "nowhere",
    "plot dynamics --out a.gif": ".png, .svg, .pdf",
    "plot decay --out a": ".png, .svg, .pdf",
    "plot decay --layers one": "--layers: expected numbers such as 0,2, got 'one'",
    "plot scores --scores recal --sequences 8": "did you mean 'recall'",
    "plot probes --probe bound-vale": "did you mean 'bound-value'",
    "plot dynamics --no-scores --from 9 --to 3": "below the last, got 9 and 3",
    "plot dynamics --no-scores --from 900": "the steps are",
    "plot decay --to -1": "0 or more, got -1",
    "plot dynamix": "dynamics",
}


@pytest.mark.parametrize("arguments", list(BAD))
def test_bad_input_is_one_line_and_exit_code_2(circuitscope, monkeypatch, tmp_path, arguments):
    monkeypatch.chdir(tmp_path)
    code, out, err = circuitscope(*arguments.split())
    lines = [x for x in err.splitlines() if not x.startswith("scores: ")]  # how far the analysis is
    assert (code, out) == (2, [])
    assert len(lines) == 1
    assert lines[0].startswith("circuitscope: ")
    assert BAD[arguments] in lines[0]
    assert list(tmp_path.iterdir()) == []


def test_an_lstm_has_no_phi(circuitscope, root):
    code, _, err = circuitscope("phi", root / "lstm")
    assert code == 2
    assert "lstm" in err
    assert "no mixing matrix" in err


def test_dynamics_of_seeds_decay_and_scores_are_drawn_with_their_numbers(circuitscope, root, tmp_path):
    both = [root / "attention", root / "other"]
    code, out, _ = circuitscope("plot", "dynamics", *both, "--sequences", 8, "--out", tmp_path / "d.svg", "--data")
    assert (code, out) == (0, [str(tmp_path / "d.svg"), str(tmp_path / "d.csv")])
    data = pd.read_csv(tmp_path / "d.csv")
    assert set(data.run) == {"attention, 2 seeds"}
    assert {c.split(",")[0] for c in data.curve} >= {"train loss", "validation loss", "binding", "recall", "induction"}
    code, _, _ = circuitscope(
        "plot", "dynamics", *both, "--no-scores", "--no-together", "--out", tmp_path / "e.png", "--data"
    )
    data = pd.read_csv(tmp_path / "e.csv")
    assert code == 0
    assert set(data.run) == {"attention", "other"}
    assert set(data.curve) == {"train loss", "validation loss", "validation accuracy"}
    code, out, _ = circuitscope(
        "plot", "scores", *both, "--scores", "recall", "--sequences", 8, "--steps", "0,12", "--data"
    )
    assert (code, out[0]) == (0, str(root / "attention" / "figures" / "scores-with-other.png"))
    assert set(pd.read_csv(out[1]).score) == {"recall"}
    assert set(pd.read_csv(out[1]).step) == {0, 12}
    code, out, _ = circuitscope("plot", "decay", *both, "--layers", "1", "--sequences", 8, "--steps", "12", "--data")
    assert code == 0
    assert set(pd.read_csv(out[1]).layer) == {1}


def test_a_run_without_checkpoints_still_has_dynamics(circuitscope, root, tmp_path):
    bare = tmp_path / "bare"
    bare.mkdir()
    for name in ("config.yaml", "metrics.jsonl"):
        (bare / name).write_bytes((root / "attention" / name).read_bytes())
    code, out, err = circuitscope("plot", "dynamics", bare)
    assert (code, out) == (0, [str(bare / "figures" / "dynamics.png")])
    assert "no checkpoints" in err


def test_what_an_lstm_does_not_have_is_left_out_or_refused(circuitscope, root, tmp_path):
    code, _, _ = circuitscope(
        "plot", "dynamics", root / "lstm", "--sequences", 8, "--out", tmp_path / "d.png", "--data"
    )
    assert code == 0
    assert set(pd.read_csv(tmp_path / "d.csv").curve) == {"train loss", "validation loss", "validation accuracy"}
    for kind, says in (("scores", "no scores"), ("decay", "no mixing matrix")):
        code, out, err = circuitscope("plot", kind, root / "lstm", "--sequences", 8)
        assert (code, out) == (2, [])
        assert says in err.splitlines()[-1]


@pytest.mark.slow
def test_a_probe_of_several_runs_is_one_figure_with_a_panel_each(circuitscope, root):
    code, out, _ = circuitscope("plot", "probes", root / "attention", root / "other", "--steps", "0,12", "--data")
    assert code == 0
    assert out[0] == str(root / "attention" / "figures" / "probe-bound-value-with-other.png")
    assert set(pd.read_csv(out[1]).run) == {"attention", "other"}
