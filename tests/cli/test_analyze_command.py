"""`circuitscope analyze` and `zoom`: what they print, keep and refuse."""

import inspect
import re
import sys

import pandas as pd
import pytest
import torch

from circuitscope.analysis.registry import ANALYSES, analysis, run_analysis
from circuitscope.analysis.scores import rows as scoring
from circuitscope.cli import main as program
from circuitscope.cli.analyze import analyze
from circuitscope.config import RunConfig
from circuitscope.errors import UserError
from circuitscope.progress import Silent
from circuitscope.runs.run import Run
from circuitscope.training.trainer import Diverged, train
from circuitscope.viz.registry import FIGURES, WORDS, TextTable, figure, words
from circuitscope.viz.report.facts import facts, results
from circuitscope.viz.style import Sheet
from registered import added_to
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


def test_a_run_on_repeated_blocks_is_analyzed_with_its_own_two_steps(circuitscope, tmp_path):
    config = RunConfig.build(
        "attention", "induction", block=4, repeats=2, vocab_size=16, d_model=8, steps=4, eval_every=1, threads=1
    )
    train(config, root=tmp_path / "runs", name="blocks")
    code, out, _ = circuitscope("analyze", "runs/blocks")
    assert code == 0
    assert "induction" in out
    assert "off-distribution" not in out
    code, out, _ = circuitscope("analyze", "runs/blocks", "--circuit", "--sequences", "16")
    assert code == 0
    assert "previous_token" in out
    assert "answering with any token of the block gives" in out

    code, out, _ = circuitscope("analyze", "runs/blocks", "--all", "--sequences", "16")
    assert code == 0
    assert re.findall("^.*left out.*$", out, re.MULTILINE) == [
        "binding, recall, value, match are left out: they need a task with keys, values and queries",
        "interchange is left out: it needs a task with keys and values",
    ]
    assert "mean ablation" in out
    assert "gradient reach" in out


def flag_of(name):
    """The option of `analyze` that asks for an analysis."""
    return inspect.signature(analyze).parameters[{"scores": "induction"}.get(name, name)].annotation.__metadata__[0]


def test_every_analysis_of_ours_has_a_flag_that_says_what_it_is():
    assert ANALYSES.own() == ["scores", "phases", "circuit", "causal", "decay"]
    for name in ANALYSES.own():
        assert flag_of(name).help.startswith(ANALYSES[name].about)


def test_every_analysis_of_ours_has_words():
    assert set(WORDS.own()) == set(ANALYSES.own())


@pytest.fixture
def toys():
    """An analysis from outside without words, and one of runs that reads its table."""
    with added_to(ANALYSES, WORDS, FIGURES):

        @analysis(
            "toy",
            "How many parameters are above zero.",
            {"layer": "Int64", "above": "int64", "share": "float64"},
            means={"above": "parameters above zero"},
        )
        def toy(model, data):
            every = list(model.parameters())
            above = sum(int((p > 0).sum()) for p in every)
            yield {"layer": None, "above": above, "share": above / sum(p.numel() for p in every)}

        @run_analysis("toy_span", "How far that moves.", {"span": "int64"}, needs=("toy",))
        def toy_span(found):
            yield {"span": int(found["toy"].above.max() - found["toy"].above.min())}

        yield


@pytest.mark.usefixtures("toys")
def test_an_analysis_from_outside_gets_a_plain_table_of_its_last_step_and_what_the_columns_mean(circuitscope):
    code, out, _ = circuitscope("analyze", "--analysis", "toy", "--analysis", "toy_span")
    assert code == 0
    table = pd.read_parquet("runs/tiny/analysis/toy.parquet")
    assert table.step.tolist() == [0, 3, 6, 9, 12]
    lines = [line.rstrip() for line in out.splitlines()]
    assert lines[1] == "toy at step 12: How many parameters are above zero."
    assert lines[2].split() == ["above", "share"]
    assert lines[3].split() == [str(table.above.iloc[-1]), f"{table.share.iloc[-1]:.4g}"]
    assert lines[4] == "  above: parameters above zero"
    assert lines[5] == "toy_span: How far that moves."
    assert lines[7] == str(table.above.max() - table.above.min())
    assert pd.read_parquet("runs/tiny/analysis/toy_span.parquet").columns.tolist() == ["run", "span"]


@pytest.mark.usefixtures("toys")
def test_all_runs_those_from_outside_too_and_their_words_and_figure_are_used(circuitscope):
    @words("toy", in_brief=lambda found: ["toys in brief"])
    def say(found):
        yield "toys in words"
        yield TextTable(("a", "b"), [("1", ""), ("2", "")])

    @figure("toy")
    def draw(frames):
        sheet = Sheet(table=lambda: pd.concat(frames.values()), figsize=(2, 2))
        sheet.subplots().plot(next(iter(frames.values())).above)
        return sheet

    code, out, _ = circuitscope("analyze", "--all", "--sequences", "16", "--steps", "12")
    assert code == 0
    assert "toys in words" in out
    assert "toy_span: How far that moves." in out
    code, out, _ = circuitscope("plot", "analysis", "toy", "--sequences", "16")
    assert (code, out) == (0, "runs/tiny/figures/toy.png\n")
    code, _, err = circuitscope("plot", "analysis", "toys")
    assert code == 2
    assert "unknown figure of an analysis 'toys'; did you mean 'toy'" in err


@pytest.mark.usefixtures("toys")
def test_names_of_ours_cannot_be_taken():
    for register in (analysis("scores", "", {}), run_analysis("phases", "", {}), words("decay"), figure("scores")):
        with pytest.raises(UserError, match="that name is circuitscope's own"):
            register(lambda *_: [])


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["analyze", "--analysis", "scors"], "unknown analysis 'scors'; did you mean 'scores'"),
        (["analyze", "--steps", "7"], "no checkpoint at step 7; nearest: 6"),
        (["analyze", "--steps", "x"], "steps are all, numbers such as"),
        (["analyze", "runs/tyni"], "did you mean 'tiny'"),
        (["zoom", "--from", "3"], "give both ends of the stretch"),
        (["zoom", "--every", "0"], "expected at least 1 step between checkpoints, got 0"),
        (["zoom", "--from", "0", "--to", "6", "--every", "-2"], "expected at least 1 step between checkpoints, got -2"),
        (["zoom", "--from", "0", "--to", "6", "--sequences", "9" * 30], "use fewer --sequences"),
        (["analyze", "--steps", "9" * 5000], "steps are all, numbers such as"),
        (["analyze", "--sequences", "1000000000"], "use fewer --sequences"),
        (["report", "--sequences", "1000000000"], "use fewer --sequences"),
        (["phi", "--heads", "9" * 5000], "--heads"),
        (
            ["phi", "--top", "1", "--by", "recall+" + "9" * 23],
            "an offset must be below the length of the sequences, 16",
        ),
        (["phi", "--example", "9" * 30], "batch needs step >= 0"),
        (["plot", "decay", "--layers", "9" * 5000], "--layers"),
        (
            ["zoom"],
            "no bump in the validation loss of runs/tiny (too few points to judge: 4 where at least 10 are needed);"
            " name a stretch with --from and --to",
        ),
        (["plot", "analysis", "causal"], "the analysis 'causal' has no figure; those with one: decay, scores"),
    ],
)
def test_bad_input_is_one_line_and_code_2(circuitscope, arguments, says):
    code, _, err = circuitscope(*arguments)
    assert code == 2
    assert says in err
    assert err.startswith("circuitscope: ")
    assert err.count("\n") == 1


def test_a_diverged_run_with_one_evaluation_is_analyzed_as_far_as_it_goes(circuitscope, tmp_path):
    with pytest.raises(Diverged):
        train(tiny(lr=1e30, clip=None), root=tmp_path / "runs", name="wild")
    code, out, _ = circuitscope("analyze", "runs/wild", "--phases", "--circuit")
    assert code == 0
    assert "phases is left out: it was evaluated fewer than two times" in out
    assert "no recall to explain" in out
    code, _, err = circuitscope("analyze", "runs/wild", "--phases")  # nothing else is asked for
    assert (code, err.count("\n")) == (2, 1)
    assert "evaluated fewer than two times" in err


def test_no_checkpoints_and_one_checkpoint(circuitscope):
    folder = Run("runs/tiny").checkpoints.folder
    for path in sorted(folder.glob("step-*"))[1:]:
        path.unlink()
    code, out, _ = circuitscope("analyze")
    assert code == 0
    assert "1 checkpoint (0 to 0)" in out
    assert "  not judged: binding L" in out
    assert out.count("(too few points to judge: 1 where at least 10 are needed)") == 1
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
    assert "9 checkpoints (0 to 12)" in out  # the stretch is read with the checkpoints around it
    assert Run("runs/tiny").steps == [0, 3, 4, 5, 6, 7, 8, 9, 12]


@pytest.mark.parametrize("command", ["analyze", "zoom"])
def test_help_teaches(circuitscope, command):
    code, out, _ = circuitscope(command, "--help")
    assert code == 0
    assert "newest" in out


def test_an_analysis_from_outside_that_raises_is_named_and_not_called_a_bug_of_ours(circuitscope):
    with added_to(ANALYSES):

        @analysis("broken", "It breaks.", {"value": "float64"})
        def broken(model, data):
            raise KeyError("lost")

        code, _, err = circuitscope("analyze", "--analysis", "broken")
    assert code == 1
    assert f"KeyError: 'lost' (in {__name__}, which another package brings; --debug shows where)" in err


def test_an_analysis_without_rows_says_so_and_all_the_others_are_told(circuitscope):
    with added_to(ANALYSES):
        analysis("nothing", "It finds nothing.", {"value": "float64"})(lambda model, data: [])
        code, out, _ = circuitscope("analyze", "--all", "--steps", "0,12", "--sequences", "16")
    assert code == 0
    assert "nothing at step 12: It finds nothing. It gives no rows here." in out
    assert "decay" in out


def test_all_leaves_out_what_needs_an_analysis_that_the_run_cannot_have(circuitscope):
    with added_to(ANALYSES):
        analysis("never", "Never.", {"value": "float64"}, refuses=lambda run: "it is Monday")(lambda model, data: [])
        run_analysis("after", "After it.", {"value": "float64"}, needs=("never",))(lambda found: [])
        code, out, _ = circuitscope("analyze", "--all", "--steps", "0", "--sequences", "16")
    assert code == 0
    assert "after is left out: it is Monday" in out


def test_more_sequences_than_fit_into_memory_are_not_called_a_bug(circuitscope, monkeypatch):
    def full(*args, **options):
        raise MemoryError("Unable to allocate 23.8 GiB")

    monkeypatch.setattr("circuitscope.analysis.checkpoints.runner.held_out", full)
    code, _, err = circuitscope("analyze")
    assert code == 1
    assert "out of memory; use fewer or shorter sequences (23.8 GiB were asked for at once" in err
    assert "bug" not in err


def test_a_gpu_without_room_for_an_analysis_says_what_to_reduce_and_that_the_cpu_can_read(circuitscope, monkeypatch):
    def full(*args, **options):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 8")

    monkeypatch.setattr("circuitscope.analysis.checkpoints.runner.held_out", full)
    code, _, err = circuitscope("analyze")
    assert (code, err.count("\n")) == (1, 1)
    assert "use fewer or shorter sequences, or read on the CPU (2.00 GiB were asked for at once)" in err


def test_the_heading_gives_the_sizes_that_the_task_names(circuitscope, monkeypatch):
    monkeypatch.setattr("circuitscope.tasks.MQAR.sizes", lambda self: {"depth": 7})
    _, out, _ = circuitscope("analyze", "--circuit", "--sequences", "16")
    assert "on mqar (depth 7); 5 checkpoints" in out


def test_the_name_of_a_run_and_what_its_files_say_reach_neither_the_terminal_nor_the_report_as_they_are(circuitscope):
    hostile = Run("runs/tiny").path.rename("runs/a\u202eb")
    (hostile / "status.json").write_text(
        '{"state": "stopped\\u001b[2J", "step": "1\\u001b[2J", "message": "\\u001b[2J"}'
    )
    for arguments in (
        ["analyze", "--sequences", "16", "--steps", "0,12"],
        ["plot", "dynamics", "--no-scores"],
        ["phi"],
    ):
        code, out, err = circuitscope(*arguments)
        assert code == 0
        assert all(line.isprintable() for line in [*out.splitlines(), *err.splitlines()]), arguments
        assert r"runs/a\u202eb" in out
    told = facts(results(Run(hostile), [0, 12], 16, Silent()))
    for key, written in (("name", r"a\u202eb"), ("heading", r"a\u202eb"), ("state", r"\x1b[2J")):
        assert told[key].isprintable()
        assert written in told[key]


def test_a_run_without_mixing_matrices_and_one_that_diverged_are_said_to_be_so(circuitscope, tmp_path):
    train(tiny(mixers="lstm", steps=2), root=tmp_path / "runs", name="lstm")
    _, out, _ = circuitscope("analyze", "runs/lstm", "--sequences", "16", "--steps", "0")
    assert out.splitlines()[1] == "no scores: no layer has a mixing matrix Φ, whose weight they measure"
    Run("runs/lstm").write_status("diverged", 1, "loss is nan at step 1")
    _, out, _ = circuitscope("analyze", "runs/lstm", "--sequences", "16", "--steps", "0")
    assert out.splitlines()[1] == "the run is not finished: diverged at step 1: loss is nan at step 1"


def test_a_figure_of_several_runs_does_not_take_the_place_of_that_of_the_first(circuitscope, tmp_path):
    train(tiny(seed=1), root=tmp_path / "runs", name="other")
    for runs in (["runs/tiny"], ["runs/tiny", "runs/other"]):
        code, _, _ = circuitscope("plot", "dynamics", *runs, "--no-scores")
        assert code == 0
    assert {p.name for p in (tmp_path / "runs/tiny/figures").glob("*")} == {"dynamics.png", "dynamics-with-other.png"}


@pytest.mark.slow
def test_several_runs_are_analyzed_in_processes_and_say_and_keep_the_same(circuitscope, tmp_path):
    train(tiny(seed=1), root=tmp_path / "runs", name="other")
    words = ["analyze", "runs/tiny", "runs/other", "--sequences", "8"]
    tables = lambda: {p: pd.read_parquet(p) for p in sorted(tmp_path.glob("runs/*/analysis/*.parquet"))}  # noqa: E731
    code, out, err = circuitscope(*words, "--executor", "local", "--jobs", "1")
    assert code == 0
    assert "2/2 other: finished" in err
    there = tables()
    assert len(there) == 6
    for path in there:
        path.unlink()
    assert circuitscope(*words)[:2] == (0, out)
    here = tables()
    assert here.keys() == there.keys()
    for path in here:
        pd.testing.assert_frame_equal(here[path], there[path], check_exact=True)


def test_a_run_that_a_process_cannot_analyze_is_named_and_exit_code_1(circuitscope, monkeypatch):
    from circuitscope.cli import analyze as command
    from circuitscope.sweeps.executor import failed

    def fails(jobs, watch):
        yield from (failed(job, "its process died 3 times") for job in jobs)

    monkeypatch.setattr(command, "rows_from", lambda *args, **options: fails)
    code, _, err = circuitscope("analyze", "--executor", "local")
    assert code == 1
    assert "1 of 1 runs were not analyzed" in err
    assert "runs/tiny: its process died 3 times" in err
