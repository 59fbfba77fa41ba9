"""Files that are not what they should be are named in one line, and the rest of the run is read."""

import hashlib
import json
import os
import shutil

import pytest
import torch

from circuitscope.analysis.checkpoints.runner import analyze
from circuitscope.analysis.pictures.layer import layer_pictures
from circuitscope.errors import UserError
from circuitscope.runs.checkpoints import write_checkpoint
from circuitscope.runs.damage import RecordWarning
from circuitscope.runs.run import Run
from circuitscope.runs.store import read_tensors, write_tensors
from circuitscope.training.repeat import repeat
from circuitscope.training.trainer import resume, train
from tiny_run import Crash, CrashAt, Listens, same_run, tiny

SMALL = {"steps": 6, "save_every": 2, "resume_every": 2}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run, and the same with another seed."""
    root = tmp_path_factory.mktemp("runs")
    return train(tiny(**SMALL), root=root, name="mine"), train(tiny(seed=1, **SMALL), root=root, name="other")


@pytest.fixture
def run(trained, tmp_path):
    """A copy of the run: what copies a run changes nothing about it."""
    return Run(shutil.copytree(trained[0].path, tmp_path / "mine"))


def with_bad_offsets(path):
    """Rewrites a header so that a tensor lies outside of the file, under a digest that is right."""
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    name = next(n for n in header if n != "__metadata__")
    header[name]["data_offsets"] = [0, 10**9]
    header["__metadata__"]["digest"] = "0" * 64
    text = json.dumps(header, separators=(",", ":")).encode()
    made = len(text).to_bytes(8, "little") + text + data[8 + size :]
    digest = hashlib.sha256(made).hexdigest()
    path.write_bytes(made.replace(b"0" * 64, digest.encode()))


def damage(run, other, kind):
    """Damages the checkpoint of step 4 and gives what is said of it."""
    path = run.checkpoints.path(4)
    weights = run.checkpoints.load(4)
    if kind == "pipe":
        path.unlink()
        os.mkfifo(path)
        return "is not a regular file"
    if kind == "folder":
        path.unlink()
        path.mkdir()
        return "is not a regular file"
    if kind == "link":
        path.unlink()
        path.symlink_to("nowhere")
        return "is a link that leads nowhere"
    if kind == "nan":
        write_checkpoint(path, 4, {n: t * float("nan") for n, t in weights.items()}, run.digest)
        return "holds values that are not finite"
    if kind == "offsets":
        with_bad_offsets(path)
        return "its header is wrong"
    if kind == "shape":
        write_checkpoint(path, 4, {n: t[:1] for n, t in weights.items()}, run.digest)
        return "does not fit the model of the run's config"
    if kind == "names":
        write_checkpoint(path, 4, {f"x{n}": t for n, t in weights.items()}, run.digest)
        return "is missing"
    shutil.copy(other.checkpoints.path(4), path)
    return f"is of another run: its digest is {other.digest}, that of this run is {run.digest}"


@pytest.mark.parametrize("kind", ["pipe", "folder", "link", "nan", "offsets", "shape", "names", "another run"])
def test_a_checkpoint_that_cannot_be_used_is_named_and_the_others_are_read(run, trained, kind):
    says = damage(run, trained[1], kind)
    file = f"{run.checkpoints.path(4)}"
    with pytest.raises(UserError) as error:
        run.load(4)
    assert str(error.value).startswith(file)
    assert says in str(error.value)
    assert "\n" not in str(error.value)
    told = Listens()
    frame = analyze(run, ["recall"], sequences=4, progress=told)
    assert sorted(frame.step.unique()) == [0, 2, 6]
    assert [line for line in told.lines if line.startswith(f"warning: checkpoint 4 left out: {file}") and says in line]
    with pytest.warns(RecordWarning, match="it is left out$"):
        assert layer_pictures(run, steps="0,4").steps == [0]
    told = Listens()
    assert repeat(run, 1, 5, 1, progress=told).equal == ([2, 6] if kind not in ("shape", "names") else [2])


def test_rows_of_another_runs_checkpoint_are_not_used_even_if_its_tables_came_along(run, trained):
    other = trained[1]
    analyze(other, sequences=4)
    for folder in ("checkpoints", "analysis"):
        shutil.rmtree(run.path / folder, ignore_errors=True)
        shutil.copytree(other.path / folder, run.path / folder)
    with pytest.raises(UserError, match=r"no checkpoint of .*mine could be read"):
        analyze(run, sequences=4)


def test_resuming_uses_no_resume_point_of_another_run(trained, tmp_path):
    mine, other = trained
    with pytest.raises(Crash):
        train(tiny(**SMALL), root=tmp_path, name="broken", progress=CrashAt(4))
    run = Run(tmp_path / "broken")
    shutil.copy(other.path / "resume/step-00000004.safetensors", run.path / "resume/step-00000004.safetensors")
    told = Listens()
    resume(run, progress=told)
    assert any(
        line.startswith("warning: resume point 4 cannot be used: ") and "another run" in line for line in told.lines
    )
    assert f"resuming {run.path} from step 2" in told.lines
    assert same_run(run.path, mine.path)


def test_checkpoints_that_do_not_say_their_run_are_read_with_one_warning_for_the_run(run):
    for path in [*(run.path / "checkpoints").glob("*"), *(run.path / "resume").glob("*")]:
        tensors, metadata = read_tensors(path)
        del metadata["run"]
        write_tensors(path, tensors, metadata)
    with pytest.warns(RecordWarning, match="do not say which run they are of") as told:
        loaded = [run.load(step) for step in run.steps] + [Run(run.path).load()]
    assert len(loaded) == 5
    assert len(told) == 1
    done = repeat(run, 1, 5, 1)
    assert (done.equal, done.added) == ([2, 4, 6], [1, 3, 5])
    assert read_tensors(run.checkpoints.path(3))[1]["run"] == run.digest


def test_a_checkpoint_says_its_run_by_what_determines_the_weights(trained, tmp_path):
    """A run that only saves at other steps, elsewhere, has the same weights and the same digest."""
    dense = train(tiny(**SMALL | {"save_every": 1, "log_every": 1}), root=tmp_path, name="dense")
    shutil.copy(dense.checkpoints.path(3), trained[0].path / "borrowed")
    assert read_tensors(trained[0].path / "borrowed")[1]["run"] == trained[0].digest


def test_a_finished_run_whose_status_lost_its_step_is_still_finished(run):
    (run.path / "status.json").write_text('{"state": "finished"}')
    told = Listens()
    resume(run, progress=told)
    assert told.lines == [f"{run.path} is already finished, at step 6"]


@pytest.mark.parametrize("threads", [0, -3, "two", None, 10**6, [1]])
def test_a_number_of_threads_that_cannot_be_is_not_used(run, threads):
    path = run.path / "environment.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"threads": threads}))
    assert run.threads is None


def test_a_stretch_that_cannot_be_repeated_says_where_the_run_ends(run):
    with pytest.raises(
        UserError, match=r"cannot repeat steps 9 to 6 every 1 of .*mine: its last checkpoint is at step 6$"
    ):
        repeat(run, 9, 12, 1)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_loaded_model_has_the_saved_weights_whatever_the_default_dtype(run, dtype):
    torch.set_default_dtype(dtype)
    try:
        model = run.load()
        frame = analyze(run, ["recall"], sequences=4)
        pictures = layer_pictures(run).pictures
    finally:
        torch.set_default_dtype(torch.float32)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert (pictures[0].values == layer_pictures(run).pictures[0].values).all()
    plain = run.load()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), plain.parameters(), strict=True))
    shutil.rmtree(run.path / "analysis")
    assert frame.equals(analyze(run, ["recall"], sequences=4))
