"""`circuitscope sweep` and `circuitscope runs` on the command line."""

import pandas as pd
import pytest
import yaml

from made_up_sweeps import made_up_sweep

TRAIN = {"steps": 4, "batch_size": 8, "eval_every": 2, "eval_batches": 1, "eval_batch_size": 8}
BASE = {"model": {"d_model": 8, "n_layers": 1}, "task": {"length": 16, "pairs": 2, "vocab_size": 64}, "train": TRAIN}


@pytest.fixture
def circuitscope(monkeypatch, capsys, tmp_path):
    """Runs the program in this process, in a folder with a grid of two tiny trials."""
    import sys

    from circuitscope.cli import main as program

    grid = {"base": BASE, "axes": {"train.seed": {"seeds": 2}}}
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(grid))
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


def test_a_dry_run_lists_trials_with_an_estimate_and_trains_nothing(circuitscope, tmp_path):
    code, out, _ = circuitscope("sweep", "tiny.yaml", "--dry-run")
    assert code == 0
    assert "2 trials, 0 done; the rest takes about" in out
    assert not (tmp_path / "runs").exists()


def test_trials_by_digest_leave_rows_that_the_sweep_collects(circuitscope):
    from circuitscope.sweeps.grid import read_grid

    for trial in read_grid("tiny.yaml").trials:
        code, out, _ = circuitscope("sweep", "tiny.yaml", "--trial", trial.digest)
        assert code == 0
        assert f"seed={trial.values['train.seed']}: finished, test accuracy" in out
    code, out, _ = circuitscope("sweep", "tiny.yaml")
    assert code == 0
    assert "2 trials, 2 done before, 2 of them from other tables or from runs that had ended" in out
    assert "2 of 2 trials done; runs/tiny/results.csv" in out
    code, out, _ = circuitscope("runs", "--sweep", "tiny")
    assert code == 0
    assert out.count("finished") == 2
    code, out, err = circuitscope("runs")
    assert code == 2
    assert "no runs in runs; sweeps: tiny" in err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["sweep", "nothing.yaml"], "no grid: nothing.yaml does not exist"),
        (["sweep", "tiny.yaml", "--trial", "abc"], "unknown trial 'abc'"),
        (["sweep", "tiny.yaml", "--pause", "--dry-run"], "give one of"),
        (["sweep", "tiny.yaml", "--jobs", "0"], "jobs"),
        (["runs", "--sweep", "tinny"], "unknown sweep 'tinny'"),
        (["plot", "sweep", "nothing.yaml"], "no grid: nothing.yaml does not exist"),
        (["plot", "sweep", "tiny.yaml"], "no trial of tiny that is done"),
        (["plot", "sweep", "tiny.yaml", "--out", "a.gif"], ".png, .svg, .pdf"),
        (["plot", "curves", "nothing.yaml"], "no grid: nothing.yaml does not exist"),
        (["plot", "curves", "tiny.yaml"], "has no curve of tiny"),
        (["plot", "curves", "tiny.yaml", "--out", "a.gif"], ".png, .svg, .pdf"),
        (["plot", "why", "nothing.yaml"], "no grid: nothing.yaml does not exist"),
        (["plot", "why", "tiny.yaml"], "no trial of tiny that is done"),
        (["plot", "why", "tiny.yaml", "--out", "a.gif"], ".png, .svg, .pdf"),
        (["sweep", "tiny.yaml", "--executor", "rey"], "executor"),
        (["sweep", "tiny.yaml", "--address", "auto"], "--address needs --executor ray, not local"),
        (["sweep", "tiny.yaml", "--executor", "ray", "--time", "9"], "--time needs --executor slurm, not ray"),
        (["sweep", "tiny.yaml", "--executor", "slurm", "--minutes", "9"], "--minutes needs --executor local or ray"),
        (["sweep", "tiny.yaml", "--executor", "slurm", "--gpus", "0.25"], "Slurm gives whole cores and GPUs"),
        (["sweep", "tiny.yaml", "--executor", "ray", "--address", "127.0.0.1:1"], "no Ray answers at 127.0.0.1:1"),
        (["sweep", "tiny.yaml", "--executor", "ray", "--runs", "tiny.yaml/in/it"], "cannot write to tiny.yaml/in/it"),
        (["sweep", "tiny.yaml", "--executor", "slurm", "--runs", "tiny.yaml/in/it"], "cannot write to tiny.yaml/in/it"),
        (["analyze", "--jobs", "2"], "--jobs needs --executor local or ray"),
        (["analyze", "--address", "auto"], "--address needs --executor ray"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(circuitscope, arguments, says):
    code, _, err = circuitscope(*arguments)
    assert code == 2
    assert says in err
    assert len(err.splitlines()) == 1


def test_pausing_what_does_not_run_says_so(circuitscope):
    code, _, err = circuitscope("sweep", "tiny.yaml", "--pause")
    assert code == 1
    assert "no sweep is running" in err


def test_a_folder_with_too_long_a_name_holds_no_sweeps(circuitscope):
    code, _, err = circuitscope("runs", "--sweep", "x", "--runs", "a" * 3000)
    assert code == 2
    assert len(err.splitlines()) == 1


def at_one_rate(trial):
    """Every seed passes at 1e-3 alone; the last rate of the last seed is not done."""
    if (trial.values["train.lr"], trial.values["train.seed"]) == (1e-1, 2):
        return None
    return {"accuracy": 0.98 if trial.values["train.lr"] == 1e-3 else 0.2}


def test_a_sweep_is_drawn_from_its_tables_without_any_run(circuitscope, tmp_path):
    made_up_sweep(tmp_path / "study", at_one_rate)
    (tmp_path / "study" / "results.parquet").unlink()
    (tmp_path / "study" / "curves.csv").unlink()  # left: grid.yaml and results.csv
    code, out, err = circuitscope("plot", "sweep", "study", "--data")
    assert code == 0, err
    assert out.split() == ["study/figures/sweep.png", "study/figures/sweep.csv"]
    assert err.splitlines() == [
        "no window by budget: it needs curves.csv, or a grid with fractions: [0.25, 0.5, 1]",
        "1 of 12 trials are not done; a seed has a window when all its rates are",
    ]
    drawn = pd.read_csv("study/figures/sweep.csv").set_index("curve")
    assert drawn.loc["test accuracy"].value.tolist() == [0.2, 0.98, 0.2, 0.2]
    assert drawn.loc["chosen on validation"].x == 1e-3
    assert drawn.loc["window on test"][["value", "seeds"]].tolist() == [1.0, 2]
    assert sorted(path.name for path in (tmp_path / "study").iterdir()) == ["figures", "grid.yaml", "results.csv"]


def test_any_column_of_numbers_can_be_drawn_and_has_no_window(circuitscope, tmp_path):
    made_up_sweep(tmp_path / "study", lambda trial: {"accuracy": 0.99, "seconds": 12.5})
    code, out, err = circuitscope("plot", "sweep", "study", "--metric", "seconds", "--out", "s.svg", "--data")
    assert (code, out.split(), err) == (0, ["s.svg", "s.csv"], "")
    assert set(pd.read_csv("s.csv").curve) == {"seconds"}
    code, _, err = circuitscope("plot", "sweep", "study", "--metric", "second")
    assert code == 2
    assert "unknown column of numbers 'second'; did you mean 'seconds'?" in err


def test_why_rates_fail_is_drawn_from_the_table_or_refused_in_one_line(circuitscope, tmp_path):
    measured = {"circuit": "not found", "missing": "binding", "clipped": 0.5, "grad_norm/embed": 0.1}
    made_up_sweep(tmp_path / "study", lambda trial: {"accuracy": 0.2, **measured})
    code, out, err = circuitscope("plot", "why", "study", "--data")
    assert (code, out.split(), err) == (0, ["study/figures/why.png", "study/figures/why.csv"], "")
    drawn = pd.read_csv("study/figures/why.csv")
    assert set(drawn.binding) == {0}
    assert set(drawn.recall) == {1}
    for name, row in (("plain", {"accuracy": 0.2}), ("empty", None)):
        made_up_sweep(tmp_path / name, lambda trial, row=row: row)
        code, _, err = circuitscope("plot", "why", name)
        assert code == 2, err
        assert len(err.splitlines()) == 1


def test_a_sweep_ends_with_the_rate_chosen_on_validation_and_its_accuracy_on_test(circuitscope, tmp_path):
    made_up_sweep(tmp_path / "study", lambda trial: at_one_rate(trial) or {"accuracy": 0.2})
    code, out, _ = circuitscope("sweep", "study")
    assert code == 0
    *_, columns, numbers, last = out.splitlines()
    assert columns.split("  ")[0].strip() == "rate chosen on validation"
    assert numbers.split() == ["0.001", "0.980", "(0.980", "to", "0.980)", "3", "1.00", "(1.00", "to", "1.00)"]
    assert last.startswith("12 of 12 trials done")


def test_a_job_array_is_shown_submitted_and_collected(circuitscope, tmp_path, monkeypatch):
    import os

    from circuitscope.sweeps.grid import read_grid

    code, script, _ = circuitscope("sweep", "tiny.yaml", "--executor", "slurm", "--dry-run", "--slurm", "--partition=p")
    assert code == 0
    assert script.startswith("#!/bin/bash\n")
    assert "#SBATCH --partition=p\n" in script
    assert not (tmp_path / "runs").exists()

    sbatch = tmp_path / "bin" / "sbatch"
    sbatch.parent.mkdir()
    sbatch.write_text("#!/bin/sh\necho 123\n")
    sbatch.chmod(0o755)
    monkeypatch.setenv("PATH", f"{sbatch.parent}:{os.environ['PATH']}")
    code, out, _ = circuitscope("sweep", "tiny.yaml", "--executor", "slurm")
    assert code == 0
    assert "submitted 2 as job 123" in out
    assert "collect their rows with: circuitscope sweep tiny.yaml --runs runs --minutes 0" in out

    for trial in read_grid("tiny.yaml").trials:  # as the tasks do
        circuitscope("sweep", "tiny.yaml", "--trial", trial.digest)
    code, out, _ = circuitscope("sweep", "tiny.yaml", "--minutes", "0")
    assert code == 0
    assert "2 of 2 trials done" in out
    code, out, _ = circuitscope("sweep", "tiny.yaml", "--executor", "slurm")
    assert code == 0
    assert "2 of 2 trials done" in out


def test_sbatch_that_refuses_is_one_line_and_exit_code_1(circuitscope, tmp_path, monkeypatch):
    import os

    sbatch = tmp_path / "bin" / "sbatch"
    sbatch.parent.mkdir()
    sbatch.write_text("#!/bin/sh\necho sbatch: error: invalid partition >&2\nexit 1\n")
    sbatch.chmod(0o755)
    monkeypatch.setenv("PATH", f"{sbatch.parent}:{os.environ['PATH']}")
    code, _, err = circuitscope("sweep", "tiny.yaml", "--executor", "slurm")
    assert code == 1
    assert "sbatch: error: invalid partition; the script is" in err
    assert len(err.splitlines()) == 1
