"""Several processes that train one run: the same weights as one process, one writer, and one line if a rank dies."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch
import two_ranks

from circuitscope.cli import main
from circuitscope.errors import UserError
from circuitscope.runs.run import Run
from circuitscope.tasks import TASKS
from circuitscope.training import ranks
from registered import added_to
from tiny_run import rows, same_run, saved

PATIENCE = 240.0  # seconds; the machine may be busy
TRAIN = ("-m", "circuitscope", "train")


def torchrun(*arguments: object) -> subprocess.Popen[str]:
    """Two ranks that start as a user starts them."""
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node=2",
        "--standalone",
        *map(str, arguments),
    ]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def ended(process: subprocess.Popen[str]) -> tuple[int, str, list[str]]:
    """Exit code, output, and the lines that circuitscope itself has written to stderr."""
    out, err = process.communicate(timeout=PATIENCE)
    return process.returncode, out, [line for line in err.splitlines() if line.startswith("circuitscope: ")]


def rank(process: subprocess.Popen[str], number: int) -> psutil.Process:
    children = psutil.Process(process.pid).children()
    return next(child for child in children if child.environ().get("RANK") == str(number))


@pytest.fixture(scope="module")
def by_two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("by_two")
    code, out, said = ended(torchrun(two_ranks.__file__, folder))
    assert (code, out, said) == (0, "", [])
    return folder


@pytest.fixture(scope="module")
def by_one(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("by_one")
    with added_to(TASKS):
        two_ranks.train_all(folder)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("name", ["attention", "mamba", "patchy"])
def test_two_ranks_reach_the_weights_of_one_process(by_one, by_two, name):
    one, two = saved(by_one / name), saved(by_two / name)
    assert list(one) == list(two) == [0, 10, 20, 30, 40, 50]
    for step, weights in one.items():
        for key, weight in weights.items():
            assert weight.dtype == torch.float64
            torch.testing.assert_close(two[step][key], weight, rtol=0, atol=1e-8)
        assert step == 0 or not torch.equal(weight, one[step - 10][key])


@pytest.mark.slow
def test_two_ranks_measure_what_one_process_measures(by_one, by_two):
    for one, two in zip(rows(by_one / "patchy"), rows(by_two / "patchy"), strict=True):
        assert one["loss"] == pytest.approx(two["loss"], abs=1e-6)
        assert one["accuracy"] == pytest.approx(two["accuracy"], abs=1e-6)


@pytest.mark.slow
def test_the_number_of_ranks_is_recorded_but_is_no_part_of_the_config(by_one, by_two):
    one, two = Run(by_one / "mamba"), Run(by_two / "mamba")
    assert (one.environment["ranks"], two.environment["ranks"]) == (1, 2)
    assert one.digest == two.digest


@pytest.mark.slow
def test_a_rank_that_dies_ends_all_with_one_line_and_the_run_resumes_to_the_same_bits(by_two, tmp_path):
    unbroken = by_two / "unbroken"
    killed = torchrun(*TRAIN, unbroken / "config.yaml", "--runs", tmp_path, "--name", "killed")
    wait_for(tmp_path / "killed" / "resume" / "step-00000040.safetensors")
    rank(killed, 1).send_signal(signal.SIGKILL)
    began = time.monotonic()
    code, _, said = ended(killed)
    assert code != 0
    assert time.monotonic() - began < 20
    assert len(said) <= 1  # none if torchrun ends the other rank before that one notices
    for line in said:
        assert "has lost another" in line
        assert "--resume" in line
    assert Run(tmp_path / "killed").status["state"] in (["failed"] if said else ["failed", "stopped", "running"])

    code, out, said = ended(torchrun(*TRAIN, "--resume", tmp_path / "killed"))
    assert (code, said) == (0, [])
    assert out.count("resuming ") == out.count("run: ") == 1  # rank 0 alone prints
    assert same_run(tmp_path / "killed", unbroken)
    assert rows(tmp_path / "killed") == rows(unbroken)


def wait_for(path: Path) -> None:
    until = time.monotonic() + PATIENCE
    while not path.exists():
        assert time.monotonic() < until, f"{path} does not come"
        time.sleep(0.005)


def started_by_torchrun(monkeypatch: pytest.MonkeyPatch, count: int, place: int = 0) -> None:
    for name, value in {"TORCHELASTIC_RUN_ID": "x", "WORLD_SIZE": count, "RANK": place, "LOCAL_RANK": place}.items():
        monkeypatch.setenv(name, str(value))


def test_a_batch_with_fewer_examples_than_ranks_is_refused(monkeypatch):
    started_by_torchrun(monkeypatch, count=4)
    with pytest.raises(UserError, match=r"train.batch_size: 3 examples cannot be shared out to 4 ranks; use 4 or more"):
        ranks.join(torch.device("cpu"), 3)


def test_only_several_processes_of_torchrun_are_ranks(monkeypatch):
    assert type(ranks.join(torch.device("cpu"), 1)) is ranks.Alone
    started_by_torchrun(monkeypatch, count=1)
    assert type(ranks.join(torch.device("cpu"), 1)) is ranks.Alone
    started_by_torchrun(monkeypatch, count=2, place=1)
    assert not ranks.leads()


def test_other_commands_than_train_have_no_ranks(monkeypatch, capsys):
    started_by_torchrun(monkeypatch, count=2)
    monkeypatch.setattr(sys, "argv", ["circuitscope", "runs"])
    with pytest.raises(SystemExit) as end:
        main.main()
    assert end.value.code == 2
    assert "for circuitscope train only" in capsys.readouterr().err


def test_python_m_circuitscope_is_the_command():
    done = subprocess.run([sys.executable, "-m", "circuitscope", "train", "--steps"], capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.startswith("circuitscope: ")
    assert len(done.stderr.splitlines()) == 1
