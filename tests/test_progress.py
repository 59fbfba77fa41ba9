"""What people see of work that takes its time: lines in a pipe, a bar on a terminal, for every kind of work."""

import io
import re
from functools import partial

import pytest

import circuitscope as cs
from circuitscope import progress as module
from circuitscope.analysis.checkpoints.runner import analyze
from circuitscope.cli import main as program
from circuitscope.progress import Bar, Lines, Silent, telling, watching, working
from circuitscope.runs.run import Run
from circuitscope.training.repeat import repeat
from circuitscope.training.trainer import train
from circuitscope.zoom import zoom_in
from tiny_run import Listens, tiny


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Full(io.StringIO):
    def write(self, text: str) -> int:
        raise OSError(28, "No space left on device")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    return train(tiny(save_every=6), root=tmp_path_factory.mktemp("runs"), name="tiny").path


@pytest.fixture
def run(trained, tmp_path):
    import shutil

    shutil.copytree(trained, tmp_path / "runs" / "tiny")
    return Run(tmp_path / "runs" / "tiny")


def plain(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)


def test_training_prints_a_line_at_each_evaluation_as_the_readme_shows_it(tmp_path):
    out = io.StringIO()
    train(tiny(), root=tmp_path, progress=Lines(out))
    lines = out.getvalue().splitlines()
    assert len(lines) == 4
    shape = r"step +(\d+)/12  validation loss  ?\d+\.\d{4}  accuracy +\d+\.\d%  "
    speed = r" +\d+\.\d steps/s  +\d+ s left  \d checkpoints?"
    assert [re.match(shape, line)[1] for line in lines] == ["0", "4", "8", "12"]
    assert re.fullmatch(shape + r" +\d checkpoints?", lines[0])  # nothing is known of the speed yet
    assert all(re.fullmatch(shape + speed, line) for line in lines[1:])


def test_lines_never_stay_silent_for_long(run, tmp_path):
    out = io.StringIO()
    train(tiny(), root=tmp_path, progress=Lines(out, seconds=0))
    told = out.getvalue().splitlines()
    assert [line.split()[1] for line in told if "validation" not in line] == [f"{s}/12" for s in range(2, 13, 2)]
    out = io.StringIO()
    analyze(run, progress=Lines(out, seconds=0))
    assert out.getvalue().splitlines() == [
        "scores: step 0, 1 of 3 checkpoints",
        "scores: step 6, 2 of 3 checkpoints",
        "scores: step 12, 3 of 3 checkpoints",
    ]


def test_a_bar_tells_of_training_and_of_analysis(run, tmp_path):
    screen = Terminal()
    train(tiny(), root=tmp_path, progress=Bar(screen))
    seen = plain(screen.getvalue())
    for expected in ("12/12", "loss ", "accuracy ", "steps/s", "checkpoints"):
        assert expected in seen, expected
    screen = Terminal()
    with Bar(screen) as bar:
        analyze(run, progress=bar)
        bar.say("[bold] is said as it is")
    assert re.search(r"scores 3/3", plain(screen.getvalue()))
    assert "[bold] is said as it is" in plain(screen.getvalue())


def test_a_terminal_gets_a_bar_and_a_pipe_gets_lines(capsys):
    assert isinstance(watching(Terminal()), Bar)
    assert isinstance(watching(io.StringIO()), Lines)
    watching().say("on stderr by default")
    assert capsys.readouterr() == ("", "on stderr by default\n")


def test_repeating_enters_its_listener_and_tells_it_of_every_step(run):
    told = Listens()
    repeat(run, first=3, last=6, every=1, progress=told)
    assert told.entered
    assert told.steps == [1, 2, 3, 4, 5, 6]


def test_zoom_says_in_a_pipe_how_far_it_is(run):
    out = io.StringIO()
    zoom_in(run, first=3, last=6, every=1, progress=Lines(out, seconds=0))
    lines = out.getvalue().splitlines()
    assert lines[0] == f"repeating steps 0 to 6 of {run.path}"
    assert [" ".join(line.split()[:3]) for line in lines[1:]] == [f"repeat step {s}/6" for s in range(1, 7)]
    assert all("steps/s" in line and "checkpoint" in line for line in lines[1:])


@pytest.mark.parametrize("terminal", [True, False])
def test_the_zoom_command_shows_its_progress_beside_its_output(run, monkeypatch, capsys, terminal):
    stderr = Terminal() if terminal else io.StringIO()
    monkeypatch.setattr(module, "Lines", partial(Lines, seconds=0))
    monkeypatch.setattr("sys.stderr", stderr)
    monkeypatch.setattr("sys.argv", ["circuitscope", "zoom", str(run.path), "--from", "3", "--to", "6", "--every", "1"])
    with pytest.raises(SystemExit) as ended:
        program.main()
    assert ended.value.code == 0
    seen = plain(stderr.getvalue())
    assert "repeating steps 0 to 6" in seen
    assert re.search("repeat +6/6" if terminal else "repeat step +6/6", seen)
    assert "scores" in seen
    assert capsys.readouterr().out.startswith("repeated from step 0; 3 checkpoints added between 3 and 6")


def test_a_run_whose_lines_cannot_be_written_trains_to_its_end(tmp_path):
    train(tiny(), root=tmp_path, name="mute", progress=Lines(Full()))
    assert cs.Run(tmp_path / "mute").status["state"] == "finished"


def test_silent_is_silent(tmp_path, capsys):
    train(tiny(), root=tmp_path, progress=Silent())
    assert capsys.readouterr() == ("", "")


def test_lines_say_what_is_done_within_a_checkpoint_once_it_takes_long():
    out = io.StringIO()
    for seconds in (60.0, 0.0):
        lines = Lines(out, seconds=seconds)
        lines.start("scores", 3)
        with telling(lines.doing):
            working("step 4, ssm, channel 64 of 512")
    working("nobody listens")
    assert out.getvalue() == "scores: step 4, ssm, channel 64 of 512; 0 of 3 checkpoints\n"


def test_a_bar_shows_what_is_done_within_a_checkpoint():
    out = Terminal()
    with Bar(out) as bar:
        bar.start("scores", 3)
        bar.doing("step 4, ssm")
    assert "step 4, ssm" in plain(out.getvalue())
