"""The wheel, installed into an empty environment, does all that a user needs, from a folder of the user's own."""

import os
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
_OFFLINE = ["--no-index", "--no-deps", "--quiet", "--disable-pip-version-check"]
_SMALL = "--steps 20 --save-every 10 --length 16 --pairs 2 --vocab-size 64 --d-model 16 --threads 1"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The wheel, built without network by the installed hatchling."""
    folder = tmp_path_factory.mktemp("wheel")
    build = ["-m", "pip", "wheel", *_OFFLINE, "--no-build-isolation", "--wheel-dir", str(folder), str(ROOT)]
    subprocess.run([sys.executable, *build], check=True, timeout=300)
    return next(folder.glob("circuitscope-*.whl"))


@pytest.fixture(scope="module")
def environment(wheel, tmp_path_factory):
    """An environment that holds the wheel alone.

    Its dependencies come from the folder of installed packages that the tests use. That folder only follows the
    environment's own on the path and its .pth files are not read, so an editable install in it stays out of sight.
    """
    folder = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True, timeout=300)
    python = folder / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", *_OFFLINE]
    subprocess.run([*pip, str(wheel)], check=True, timeout=300)
    (site,) = folder.glob("lib/python*/site-packages")
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return folder


@pytest.fixture(scope="module")
def run(environment, tmp_path_factory):
    """Runs a program of the environment in an empty folder, which knows nothing of the repository."""
    folder = tmp_path_factory.mktemp("elsewhere")
    plain = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "CIRCUITSCOPE"))}

    def run(program: str, *words: str) -> str:
        command = [str(environment / "bin" / program), *words]
        done = subprocess.run(command, env=plain, cwd=folder, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        return done.stdout

    run.folder = folder
    return run


def test_the_wheel_holds_the_package_with_its_page_and_probes_and_nothing_else(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0].partition("-")[0] for name in names} == {"circuitscope"}
    source = ROOT / "src"
    shipped = {
        path.relative_to(source).as_posix()
        for path in (source / "circuitscope").rglob("*")
        if path.suffix in (".py", ".js", ".css", ".html", ".csv")
    }
    probes = {f"circuitscope/analysis/probes/definitions/{path.name}" for path in (ROOT / "probes").iterdir()}
    assert any(name.endswith(".js") for name in shipped)
    assert any(name.endswith(".yaml") for name in probes)
    assert shipped | probes == {name for name in names if ".dist-info/" not in name}


def test_the_environment_sees_the_wheel_and_not_the_repository(run, environment):
    said = run("python", "-c", "import sys, circuitscope; print(circuitscope.__file__, *sys.path, sep='\\n')")
    used, *path = said.splitlines()
    assert Path(used).is_relative_to(environment)
    assert not any(Path(folder).is_relative_to(ROOT / "src") for folder in path)


def test_it_trains_analyzes_probes_and_reports(run, environment):
    assert "run: runs/one" in run("circuitscope", "train", "--name", "one", *_SMALL.split())
    assert "binding" in run("circuitscope", "analyze", "--induction", "--sequences", "32")
    assert "bound-value" in run("circuitscope", "probe")
    assert "key" in run("circuitscope", "probe", "--probe", "previous-token", "--sequences", "200", "--steps", "20")
    run("circuitscope", "report")
    page = (run.folder / "runs" / "one" / "report.html").read_text()
    assert "<style>" in page
    (site,) = environment.glob("lib/python*/site-packages")
    drawing = site.joinpath("circuitscope", "viz", "report", "page", "heatmap.js").read_text()
    assert drawing.splitlines()[0] in page
