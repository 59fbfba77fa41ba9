"""`circuitscope analyze` and `zoom`: what they print, keep and refuse."""

import sys

import pytest

from circuitscope.analysis.scores import rows as scoring
from circuitscope.cli import main as program
from circuitscope.config import RunConfig
from circuitscope.runs.run import Run
from circuitscope.training.trainer import train
from tiny_run import tiny


@pytest.fixture
def circuitscope(monkeypatch, capsys, tmp_path):
    """Runs the program in this process, in a folder with one tiny run."""
    train(tiny(), root=tmp_path / "runs", name="tiny")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("CIRCUITSCOPE_RUNS", raising=False)
    monkeypatch.setenv("COLUMNS", "200")

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["circuitscope", *map(str, arguments)])
        with pytest.raises(SystemExit) as stop:
            program.main()
        printed = capsys.readouterr()
        return stop.value.code or 0, printed.out, printed.err

    return run


def test_analyze_reads_the_newest_run_and_leads_with_binding_and_recall(circuitscope):
    code, out, _ = circuitscope("analyze", "--induction")
    assert code == 0
    lines = out.splitlines()
    assert lines[0].startswith("runs/tiny: attention + attention on mqar (length 16, pairs 2); 5 checkpoints (0 to 12)")
    assert lines[1].split()[:2] == ["score", "where"]
    assert [line.split()[0] for line in lines[2:4]] == ["binding", "recall"]
    assert "off-distribution" in out
    assert "no recall to explain: accuracy 0.0" in out
    assert lines[-1] == "tables: runs/tiny/analysis"
    assert {p.name for p in (Run("runs/tiny").path / "analysis").glob("*.parquet")} == {
        "scores.parquet",
        "circuit.parquet",
        "phases.parquet",
    }


def test_everything_at_once(circuitscope):
    code, out, _ = circuitscope("analyze", "runs/tiny", "--all", "--steps", "0:12:6", "--sequences", "16")
    assert code == 0
    for expected in ("3 checkpoints (0 to 12), 16 held", "accuracy lost", "mean ablation", "knockout in Φ", "rate κ"):
        assert expected in out
    saved = {p.name for p in (Run("runs/tiny").path / "analysis").glob("*.parquet")}
    assert {"scores-16.parquet", "decay-16.parquet", "causal-16.parquet", "circuit-16.parquet"} <= saved


def test_two_runs_decay_side_by_side(circuitscope, tmp_path):
    train(tiny(seed=1), root=tmp_path / "runs", name="other")
    code, out, _ = circuitscope("analyze", "runs/tiny", "runs/other", "--decay", "--steps", "12", "--sequences", "16")
    assert code == 0
    header = next(line for line in out.splitlines() if line.split()[:1] == ["decay"])
    assert header.split() == ["decay", "tiny", "other"]


def test_a_run_on_a_task_without_pairs_is_analyzed_without_a_circuit(circuitscope, tmp_path):
    config = RunConfig.build(
        "attention", "induction", block=4, repeats=2, vocab_size=16, d_model=8, steps=4, eval_every=1, threads=1
    )
    train(config, root=tmp_path / "runs", name="blocks")
    code, out, _ = circuitscope("analyze", "runs/blocks")
    assert code == 0
    assert "induction" in out
    assert "off-distribution" not in out
    code, _, err = circuitscope("analyze", "runs/blocks", "--circuit")
    assert (code, err.count("\n")) == (2, 1)
    assert "needs a task with keys, values and queries" in err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["analyze", "--steps", "7"], "no checkpoint at step 7; nearest: 6"),
        (["analyze", "--steps", "x"], "steps are all, numbers such as"),
        (["analyze", "runs/tyni"], "did you mean 'tiny'"),
        (["zoom", "--from", "3"], "give both ends of the stretch"),
        (["zoom"], "no bump in the validation loss of runs/tiny; name a stretch with --from and --to"),
    ],
)
def test_bad_input_is_one_line_and_code_2(circuitscope, arguments, says):
    code, _, err = circuitscope(*arguments)
    assert code == 2
    assert says in err
    assert err.startswith("circuitscope: ")
    assert err.count("\n") == 1


def test_no_checkpoints_and_one_checkpoint(circuitscope):
    folder = Run("runs/tiny").checkpoints.folder
    for path in sorted(folder.glob("step-*"))[1:]:
        path.unlink()
    code, out, _ = circuitscope("analyze")
    assert code == 0
    assert "1 checkpoint (0 to 0)" in out
    assert "too few points to judge: 1" in out
    for path in folder.glob("step-*"):
        path.unlink()
    code, _, err = circuitscope("analyze")
    assert (code, "has no checkpoints to analyze" in err) == (2, True)


def test_a_damaged_checkpoint_among_good_ones_is_named(circuitscope):
    (Run("runs/tiny").checkpoints.folder / "step-00000006.safetensors").write_bytes(b"torn")
    code, _, err = circuitscope("analyze", "--induction")
    assert code == 0
    assert "warning: checkpoint 6 left out" in err


def test_ctrl_c_keeps_what_is_done(circuitscope, monkeypatch):
    real, seen = scoring.score_rows, []

    def interrupted(*arguments):
        seen.append(1)
        if len(seen) == 3:
            raise KeyboardInterrupt
        return real(*arguments)

    monkeypatch.setattr(scoring, "score_rows", interrupted)
    code, _, err = circuitscope("analyze")
    assert code == 130
    assert "what is done is kept" in err
    monkeypatch.setattr(scoring, "score_rows", real)
    _, _, err = circuitscope("analyze")
    assert "scores: 2 of 5 checkpoints were analyzed before" in err


def test_zoom_repeats_a_stretch_and_analyzes_it(circuitscope):
    code, out, _ = circuitscope("zoom", "--from", "4", "--to", "9", "--every", "1")
    assert code == 0
    assert "came out equal bit by bit" in out
    assert "checkpoints added between 4 and 9, every 1 steps" in out
    assert "6 checkpoints (4 to 9)" in out
    assert Run("runs/tiny").steps == [0, 3, 4, 5, 6, 7, 8, 9, 12]


@pytest.mark.parametrize("command", ["analyze", "zoom"])
def test_help_teaches(circuitscope, command):
    code, out, _ = circuitscope(command, "--help")
    assert code == 0
    assert "newest" in out
