"""Output that cannot be written stops no command; any character can be printed; Ctrl-C ends in one line."""

import errno
import io
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from circuitscope.cli import interrupts, streams
from circuitscope.cli import main as program
from circuitscope.errors import UserError

EXECUTABLE = Path(sys.executable).with_name("circuitscope")


def opened(path: str, mode: int = os.O_WRONLY) -> streams.Kept:
    return streams.Kept(os.open(path, mode), "w")


def test_a_full_disk_is_remembered_and_the_rest_is_dropped():
    kept = opened("/dev/full")
    text = io.TextIOWrapper(io.BufferedWriter(kept))
    for _ in range(3):
        print("a line", file=text, flush=True)
    assert kept.failed is not None
    assert kept.failed.errno == errno.ENOSPC


def test_a_closed_descriptor_is_remembered_likewise():
    kept = opened(os.devnull, os.O_RDONLY)  # what takes the place of a closed one
    print("a line", file=io.TextIOWrapper(io.BufferedWriter(kept)), flush=True)
    assert kept.failed is not None
    assert kept.failed.errno == errno.EBADF


def test_a_reader_that_has_gone_is_an_error_once():
    reader, writer = os.pipe()
    os.close(reader)
    kept = streams.Kept(writer, "w")
    with pytest.raises(BrokenPipeError):
        kept.write(b"a line")
    assert kept.write(b"another") == 7


@pytest.fixture
def stdout_is(monkeypatch):
    """Makes a file the standard output of this process, as the program sees it."""

    def make(path: str | Path, **options: str) -> io.TextIOWrapper:
        stream = open(path, "w", **options)  # noqa: SIM115
        monkeypatch.setattr(sys, "__stdout__", stream)
        monkeypatch.setattr(sys, "stdout", stream)
        return stream

    return make


def run(monkeypatch, *words: str) -> int | str | None:
    monkeypatch.setattr(sys, "argv", ["circuitscope", *words])
    with pytest.raises(SystemExit) as stop:
        program.main()
    return stop.value.code


def test_a_command_whose_output_is_full_runs_to_its_end_and_says_so(monkeypatch, stdout_is, capsys, tmp_path):
    small = "--length 16 --pairs 2 --vocab-size 16 --d-model 8 --layers 1 --steps 2 --batch-size 8 --threads 1"
    stdout_is("/dev/full")
    assert run(monkeypatch, "train", *small.split(), "--runs", str(tmp_path), "--name", "one") == 1
    assert capsys.readouterr().err == (
        "circuitscope: cannot write the output: No space left on device; apart from that, the command ran to its end\n"
    )
    assert (tmp_path / "one/checkpoints/step-00000002.safetensors").exists()


def test_an_ascii_terminal_gets_question_marks(monkeypatch, stdout_is, tmp_path):
    stdout_is(tmp_path / "out", encoding="ascii")
    assert run(monkeypatch, "tasks", "show", "mqar") == 0
    assert "?" in (tmp_path / "out").read_text()


@pytest.mark.slow
def test_a_run_without_any_output_is_trained(tmp_path):
    small = "--length 16 --pairs 2 --vocab-size 16 --d-model 8 --layers 1 --steps 4 --batch-size 8 --threads 1"
    for closed, code in ((">&-", 1), ("<&- >&- 2>&-", 1)):
        name = f"run{len(list(tmp_path.iterdir()))}"
        command = f"{EXECUTABLE} train {small} --runs {tmp_path} --name {name} {closed}"
        done = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == code, (closed, done.stderr)
        assert "Traceback" not in done.stderr
        assert (tmp_path / name / "checkpoints/step-00000004.safetensors").exists(), closed
        assert '"finished"' in (tmp_path / name / "status.json").read_text()


def test_ctrl_c_in_a_command_is_one_line_and_code_130(monkeypatch, capsys):
    from circuitscope.cli import tasks

    def interrupted(*args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(tasks, "print_table", interrupted)
    assert run(monkeypatch, "tasks") == 130
    assert capsys.readouterr().err == "circuitscope: interrupted\n"


def test_ctrl_c_during_imports_ends_the_process_at_once():
    """Signals come while a module is being imported that catches KeyboardInterrupt, as some do."""
    script = (
        "import os, signal\n"
        "from circuitscope.cli import interrupts\n"
        "with interrupts.leaving_at_once():\n"
        "    try:\n        os.kill(os.getpid(), signal.SIGINT)\n"
        "    except KeyboardInterrupt:\n        print('caught')\n"
        "print('went on')\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "circuitscope: interrupted\n")


def test_the_handler_of_imports_is_gone_afterwards():
    before = signal.getsignal(signal.SIGINT)
    with interrupts.leaving_at_once():
        assert signal.getsignal(signal.SIGINT) is not before
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.slow
@pytest.mark.parametrize("signals", [1, 2])
@pytest.mark.parametrize("seconds", [0.1, 0.3, 1.0, 3.0])
def test_ctrl_c_at_any_moment_gives_no_traceback(tmp_path, seconds, signals):
    process = subprocess.Popen(
        [EXECUTABLE, "train", "--threads", "1", "--name", "one"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
    )
    time.sleep(seconds)
    for _ in range(signals):
        process.send_signal(signal.SIGINT)
        time.sleep(0.02)
    _, err = process.communicate(timeout=120)
    assert process.returncode in (130, -signal.SIGINT), err
    assert "Traceback" not in err
    assert len(err.splitlines()) <= 1
    assert not list(tmp_path.glob("runs/.new-*"))


@pytest.mark.parametrize(
    "error",
    [
        MemoryError("Unable to allocate 4 TiB"),
        RuntimeError("[enforce fail at alloc_cpu.cpp:124] . DefaultCPUAllocator: can't allocate memory: you tried"),
        RuntimeError("CUDA out of memory. Tried to allocate 20.00 MiB"),
    ],
)
def test_too_little_memory_says_what_to_reduce(monkeypatch, capsys, error):
    from circuitscope.cli import tasks

    def fails(*args: object) -> None:
        raise error

    monkeypatch.setattr(tasks, "print_table", fails)
    assert run(monkeypatch, "tasks") == 1
    said = capsys.readouterr().err
    assert said.startswith("circuitscope: out of memory: ")
    assert "--sequences" in said
    assert "--batch-size" in said
    assert ("--device cpu" in said) == ("CUDA" in str(error))
    assert "bug" not in said


def test_other_errors_are_still_what_they_are(monkeypatch, capsys):
    from circuitscope.cli import tasks

    for error, code, words in ((RuntimeError("no"), 1, "this is a bug"), (UserError("bad"), 2, "bad")):

        def fails(*args: object, error: Exception = error) -> None:
            raise error

        monkeypatch.setattr(tasks, "print_table", fails)
        assert run(monkeypatch, "tasks") == code
        assert words in capsys.readouterr().err
