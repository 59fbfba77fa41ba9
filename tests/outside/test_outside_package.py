"""A package outside of circuitscope brings a mixer, a task, a score and an analysis, and every command takes them."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest

PACKAGE = Path(__file__).parent / "toy_package"
_SMALL = ["--steps", "60", "--save-every", "30", "--layers", "1", "--d-model", "16", "--vocab-size", "32"]


def test_each_part_of_the_package_is_short():
    lines = {path.name: len(path.read_text().splitlines()) for path in (PACKAGE / "toy_scope").glob("*.py")}
    assert {"mixer.py", "task.py", "score.py"} <= lines.keys()
    assert max(lines.values()) < 60, lines


@pytest.fixture(scope="module")
def circuitscope(tmp_path_factory):
    """The command line in a process that sees the package, installed without network in a folder of its own."""
    folder = tmp_path_factory.mktemp("outside")
    source = shutil.copytree(PACKAGE, folder / "source")
    offline = ["--no-index", "--no-deps", "--no-build-isolation", "--quiet", "--target", str(folder / "installed")]
    subprocess.run([sys.executable, "-m", "pip", "install", *offline, str(source)], check=True, timeout=300)
    paths = [str(folder / "installed"), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(paths),
        "CIRCUITSCOPE_RUNS": str(folder / "runs"),
        "OMP_NUM_THREADS": "1",
    }

    def run(*words: str) -> str:
        command = [sys.executable, "-c", "from circuitscope.cli.main import main; main()", *words]
        done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, done.stderr
        return done.stdout

    run.folder = folder
    return run


@pytest.fixture(scope="module")
def run_folder(circuitscope):
    """A run of the toy mixer on the toy task."""
    said = circuitscope("train", "--model", "toy", "--task", "echo", "--name", "toy", *_SMALL)
    assert "validation accuracy" in said
    return circuitscope.folder / "runs" / "toy"


@pytest.mark.slow
def test_training_records_the_outside_names(run_folder):
    config = (run_folder / "config.yaml").read_text()
    assert "name: toy" in config
    assert "name: echo" in config


@pytest.mark.slow
def test_tasks_and_models_list_them(circuitscope):
    assert "echo" in circuitscope("tasks")
    assert "cue" in circuitscope("tasks", "show", "echo")
    assert "channel 64" in circuitscope("models", "hooks", "toy")


@pytest.mark.slow
def test_analyze_all_measures_the_outside_score_and_analysis(circuitscope, run_folder):
    said = circuitscope("analyze", str(run_folder), "--all")
    scores = pd.read_parquet(run_folder / "analysis" / "scores.parquet")
    assert {"two_back", "previous_token"} <= set(scores.score)
    assert set(scores[scores.score == "two_back"].factor) == {"average"}
    assert "two back" in said
    assert len(pd.read_parquet(run_folder / "analysis" / "toy_mass.parquet")) == 3
    decay = pd.read_parquet(run_folder / "analysis" / "decay.parquet")
    assert "transition_norm" in set(decay.quantity)


@pytest.mark.slow
def test_probe_phi_plot_and_report_show_them(circuitscope, run_folder):
    assert "cue" in circuitscope("probe", str(run_folder), "--probe", "previous-token", "--sequences", "300")
    for words in (
        ["phi", str(run_folder), "--layer", "0", "--top", "2", "--by", "two_back"],
        ["plot", "dynamics", str(run_folder)],
        ["plot", "scores", str(run_folder)],
        ["plot", "decay", str(run_folder)],
    ):
        figure = Path(circuitscope(*words).strip())
        assert (circuitscope.folder / figure).stat().st_size > 10_000
    circuitscope("report", str(run_folder))
    page = (run_folder / "report.html").read_text()
    assert "two_back" in page
    assert "#E69F00" in page
