"""A run's folder: it appears whole, is never overwritten, and one definition says which is the newest."""

import json
import os
import subprocess
import threading
import time

import pytest
import yaml

from circuitscope.errors import UserError
from circuitscope.runs.checkpoints import write_checkpoint
from circuitscope.runs.damage import RecordWarning
from circuitscope.runs.metrics import last_step
from circuitscope.runs.run import Run, create_run, newest_run, runs_in
from circuitscope.training.trainer import train
from tiny_run import Listens, listing, tiny


def command(monkeypatch, capsys, *argv):
    """Exit code and lines on stderr of the command."""
    from circuitscope.cli.main import main

    monkeypatch.setattr("sys.argv", ["circuitscope", *map(str, argv)])
    with pytest.raises(SystemExit) as ended:
        main()
    return ended.value.code, capsys.readouterr().err.splitlines()


def created_at(run, when):
    path = run.path / "environment.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"created": when}))


def test_an_existing_name_is_refused_and_nothing_is_touched(tmp_path):
    train(tiny(steps=2), root=tmp_path, name="mine")
    before = listing(tmp_path)
    with pytest.raises(UserError, match="exists already; resume it with --resume"):
        train(tiny(steps=4), root=tmp_path, name="mine")
    assert listing(tmp_path) == before
    assert os.listdir(tmp_path) == ["mine"]


@pytest.mark.parametrize("kind", ["file", "empty folder", "dangling link"])
def test_anything_that_has_the_name_is_left_alone(tmp_path, kind):
    path = tmp_path / "mine"
    if kind == "file":
        path.write_text("precious")
    elif kind == "empty folder":
        path.mkdir()
    else:
        path.symlink_to(tmp_path / "nowhere")
    with pytest.raises(UserError):
        create_run(tiny(), root=tmp_path, name="mine")
    assert os.listdir(tmp_path) == ["mine"]
    assert path.is_symlink() == (kind == "dangling link")


def test_without_a_name_runs_are_numbered(tmp_path):
    assert [create_run(tiny(), root=tmp_path).name for _ in range(3)] == [f"attention-mqar-{n}" for n in (1, 2, 3)]


def test_runs_made_at_once_all_get_a_folder_of_their_own(tmp_path):
    made = []
    threads = [threading.Thread(target=lambda: made.append(create_run(tiny(), root=tmp_path).name)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(made) == sorted(f"attention-mqar-{n}" for n in range(1, 9))
    assert sorted(os.listdir(tmp_path)) == sorted(made)


@pytest.mark.parametrize("name", ["a/b", "../a", "/tmp/a", "a\\b", ".hidden", ".", "..", "", "a\0b"], ids=repr)
def test_a_name_that_is_not_one_plain_folder_name_is_refused(tmp_path, name):
    with pytest.raises(UserError, match="one folder name"):
        create_run(tiny(), root=tmp_path / "runs", name=name)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["run\udcff", "two\nlines", "bell\a"], ids=ascii)
def test_a_name_that_is_no_text_in_one_line_is_refused_before_training(tmp_path, name):
    with pytest.raises(UserError, match=r"one folder name of printable characters .* got '[ -~]*'$"):
        create_run(tiny(), root=tmp_path, name=name)
    assert list(tmp_path.iterdir()) == []


def test_a_run_that_was_renamed_to_what_is_no_text_hides_no_other(tmp_path):
    run = create_run(tiny(), root=tmp_path, name="real")
    os.rename(create_run(tiny(), root=tmp_path, name="other").path, tmp_path / "other\udcff")
    with pytest.warns(RecordWarning, match="it is left out"):
        assert newest_run(tmp_path).path == run.path


def test_a_name_too_long_for_the_disk_is_bad_input(tmp_path):
    with pytest.raises(UserError):
        create_run(tiny(), root=tmp_path, name="x" * 300)
    assert list(tmp_path.iterdir()) == []


def test_a_root_that_is_a_file_is_bad_input(tmp_path):
    (tmp_path / "runs").write_text("precious")
    with pytest.raises(UserError, match="cannot create a run"):
        create_run(tiny(), root=tmp_path / "runs")
    assert (tmp_path / "runs").read_text() == "precious"


def test_a_run_that_cannot_be_made_leaves_nothing(tmp_path, monkeypatch):
    def fail(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("circuitscope.runs.run.write_text", fail)
    with pytest.raises(UserError, match="No space left on device"):
        create_run(tiny(), root=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_the_newest_run_is_the_one_created_last_whatever_was_touched_since(tmp_path):
    first, second = (create_run(tiny(), root=tmp_path, name=name) for name in ("b", "a"))
    future = time.time() + 1000
    for path in (first.path, first.path / "config.yaml", first.path / "environment.json"):
        os.utime(path, (future, future))
    first.write_status("running", 5)
    assert newest_run(tmp_path).path == second.path


def test_a_run_whose_process_is_gone_is_killed(tmp_path):
    run = create_run(tiny(), root=tmp_path, name="gone")
    run.write_status("running", 5)
    assert run.status["state"] == "running"
    with subprocess.Popen(["true"]) as process:
        process.wait()
    record = json.loads((run.path / "status.json").read_text())
    for host, state in ((record["host"], "killed"), ("elsewhere", "running")):
        (run.path / "status.json").write_text(json.dumps(record | {"pid": process.pid, "host": host}))
        assert (run.status["state"], run.status["step"]) == (state, 5)


def test_runs_created_at_one_instant_are_ordered_by_name(tmp_path):
    for name in ("b", "c", "a"):
        created_at(create_run(tiny(), root=tmp_path, name=name), 1000)
    assert [r.name for r in runs_in(tmp_path)] == ["a", "b", "c"]
    assert newest_run(tmp_path).name == "c"


def test_only_runs_count_as_runs(tmp_path):
    run = create_run(tiny(), root=tmp_path, name="real")
    (tmp_path / "notes").mkdir()
    (tmp_path / "config.yaml").write_text("")
    (tmp_path / ".new-1-2").mkdir()
    (tmp_path / ".new-1-2" / "config.yaml").write_text("")
    assert [r.path for r in runs_in(tmp_path)] == [run.path]


def test_a_folder_called_config_yaml_makes_no_run(tmp_path):
    run = create_run(tiny(), root=tmp_path, name="real")
    (tmp_path / "odd" / "config.yaml").mkdir(parents=True)
    assert newest_run(tmp_path).path == run.path


@pytest.mark.parametrize("text", ["", "{", "[]", '{"created": "yesterday"}', '{"created": null}'])
def test_a_run_with_a_damaged_environment_is_older_than_any_other(tmp_path, text):
    whole, damaged = (create_run(tiny(), root=tmp_path, name=name) for name in ("a", "b"))
    (damaged.path / "environment.json").write_text(text)
    assert newest_run(tmp_path).path == whole.path


@pytest.mark.parametrize("file", ["environment.json", "status.json"])
def test_a_deep_nest_in_a_file_of_one_run_is_one_line_and_hides_no_other_run(tmp_path, file):
    whole, damaged = (create_run(tiny(), root=tmp_path, name=name) for name in ("a", "b"))
    (damaged.path / file).write_text("[" * 100_000)
    with pytest.warns(RecordWarning, match=rf"b/{file} is damaged and is not used$") as told:
        newest = [(newest_run(tmp_path).path, damaged.status)[0] for _ in range(2)]
    assert newest == [whole.path if file == "environment.json" else damaged.path] * 2
    assert len(told) == 1


def test_the_environment_variable_says_where_runs_live(tmp_path, monkeypatch):
    monkeypatch.setenv("CIRCUITSCOPE_RUNS", str(tmp_path / "there"))
    run = create_run(tiny())
    assert run.path.parent == tmp_path / "there"
    assert newest_run().path == run.path
    elsewhere = create_run(tiny(), root=tmp_path / "here")
    assert newest_run(tmp_path / "here").path == elsewhere.path


def test_no_runs_at_all_names_the_command_that_makes_one(tmp_path):
    with pytest.raises(UserError, match="circuitscope train"):
        newest_run(tmp_path)


def test_a_misspelt_run_gets_the_nearest_name(tmp_path):
    create_run(tiny(), root=tmp_path, name="attention")
    with pytest.raises(UserError, match="did you mean 'attention'"):
        Run(tmp_path / "atention")


def test_a_folder_that_is_no_run_is_told_what_it_lacks(tmp_path):
    create_run(tiny(), root=tmp_path, name="real")
    (tmp_path / "bare").mkdir()
    with pytest.raises(UserError, match=r"bare is not a run: it has no config\.yaml$"):
        Run(tmp_path / "bare")
    (tmp_path / "bare" / "config.yaml").symlink_to("nowhere")
    with pytest.raises(UserError, match=r"bare is not a run: .*config\.yaml is a link that leads nowhere$"):
        Run(tmp_path / "bare")
    with pytest.raises(UserError, match=r"config\.yaml is a file, and a run is a folder$"):
        Run(tmp_path / "real" / "config.yaml")


@pytest.mark.parametrize(
    ("change", "missing"),
    [
        (lambda data: data.clear(), "model is missing (and 2 more)"),
        (lambda data: data.pop("train"), "train is missing;"),
        (lambda data: data["train"].pop("lr"), "train.lr is missing;"),
        (lambda data: data["model"]["mixers"][1].pop("n_heads"), "model.mixers.1.n_heads is missing;"),
        (lambda data: data["model"].update(mixers=["attention", "attention"]), "model.mixers.0.name is missing"),
    ],
)
def test_an_incomplete_config_of_a_run_is_not_taken_for_the_default(tmp_path, monkeypatch, capsys, change, missing):
    run = create_run(tiny(steps=2), root=tmp_path, name="mine")
    data = yaml.safe_load(run.config.dump())
    change(data)
    (run.path / "config.yaml").write_text(yaml.safe_dump(data) if data else "")
    before = listing(tmp_path)
    code, lines = command(monkeypatch, capsys, "train", "--resume", run.path)
    assert (code, len(lines)) == (2, 1)
    assert f"mine/config.yaml is incomplete: {missing}" in lines[0]
    assert listing(tmp_path) == before


def test_a_missing_checkpoint_names_the_nearest(tmp_path):
    run = train(tiny(steps=4, save_every=2), root=tmp_path)
    with pytest.raises(UserError, match=r"no checkpoint at step 3; nearest: [24]"):
        run.load(3)


def test_a_damaged_checkpoint_is_bad_input_to_load(tmp_path):
    run = train(tiny(steps=1), root=tmp_path)
    path = run.path / "checkpoints/step-00000001.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(UserError, match="is damaged"):
        run.load(1)


@pytest.mark.parametrize(
    "other", ["--steps 5", "--name x", "--set train.lr=1", "--runs x", "--dry-run", "--tensorboard", "config.yaml"]
)
def test_resume_takes_no_other_option(tmp_path, monkeypatch, capsys, other):
    run = create_run(tiny(steps=2), root=tmp_path)
    before = listing(tmp_path)
    code, lines = command(monkeypatch, capsys, "train", "--resume", run.path, *other.split())
    assert code == 2
    assert len(lines) == 1
    assert "takes no other option" in lines[0]
    assert listing(tmp_path) == before


def test_resuming_what_is_no_run_is_bad_input(tmp_path, monkeypatch, capsys):
    code, lines = command(monkeypatch, capsys, "train", "--resume", tmp_path / "nowhere")
    assert code == 2
    assert len(lines) == 1


def test_resuming_a_finished_run_by_the_command_is_no_error(tmp_path, monkeypatch, capsys):
    run = train(tiny(steps=2), root=tmp_path)
    code, lines = command(monkeypatch, capsys, "train", "--resume", run.path)
    assert code == 0
    assert lines == []


def test_a_run_is_itself_or_is_found_by_its_folder(tmp_path):
    run = create_run(tiny(), root=tmp_path)
    assert Run.of(run) is run
    assert Run.of(run.path).path == Run.of(str(run.path)).path == run.path


def test_a_checkpoint_of_another_model_is_refused_in_words(tmp_path):
    run = train(tiny(steps=2), root=tmp_path, name="mine")
    other = train(tiny(steps=2, d_model=16), root=tmp_path, name="other")
    write_checkpoint(run.checkpoints.path(2), 2, other.checkpoints.load(2), run.digest)
    says = r"mine/.*2\.safetensors does not fit the model of the run's config: \S+ has the shape \d+ × 16 in place of"
    with pytest.raises(UserError, match=says):
        run.load(2)


@pytest.mark.usefixtures("without_type_checks")
def test_a_step_may_be_text_or_come_from_a_table(tmp_path):
    run = train(tiny(steps=4, save_every=2), root=tmp_path, name="tiny")
    weight = run.load(2).embed.weight
    for step in ("2", 2.0, run.metrics.step[run.metrics.step == 2].iloc[0]):
        assert (run.load(step).embed.weight == weight).all()
    for step in ("two", 2.5, True, "2:4"):
        with pytest.raises(UserError, match=r"^step: expected a whole number, such as 100, got"):
            run.load(step)
    with pytest.raises(UserError, match=r"no checkpoint at step 3; nearest: 2"):
        run.load("3")


@pytest.mark.usefixtures("without_type_checks")
def test_a_run_gives_batches_of_its_own_task_and_seed(tmp_path):
    run = create_run(tiny(seed=5), root=tmp_path)
    held, task = run.batch(), run.config.task
    assert (held.tokens == task.batch(0, split="test", seed=5).tokens).all()
    assert len(held) == 64
    assert (run.batch(3, split="train", size=8).tokens == task.batch(3, split="train", size=8, seed=5).tokens).all()
    assert not (held.tokens == task.batch(0, split="test", seed=0).tokens).all()
    with pytest.raises(UserError, match="unknown split 'tset'; did you mean 'test'"):
        run.batch(split="tset")


def test_the_status_of_a_run_in_training_is_as_new_as_its_metrics(tmp_path):
    class Watches(Listens):
        def advance(self, step, loss=None, saved=None):
            seen.append((step, watched[0].status["step"]) if (watched := runs_in(tmp_path)) else None)

    seen = []
    run = train(tiny(), root=tmp_path, progress=Watches())
    assert seen == [(step, step) for step in range(2, 13, 2)]
    assert run.status["state"] == "finished"
    before = run.status
    Run(run.path).write_status("stopped", 7)
    assert (before["state"], run.status["state"], run.status["step"]) == ("finished", "stopped", 7)


def test_the_last_step_of_long_metrics_is_found_from_their_end(tmp_path):
    assert last_step(tmp_path) is None
    lines = [json.dumps({"step": step, "loss": 0.1, "filling": "x" * 900}) for step in range(200)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + '\n{"step": 2')
    assert last_step(tmp_path) == 199
    (tmp_path / "metrics.jsonl").write_text("\n".join([*lines, '{"resumed_from": 40}', ""]))
    assert last_step(tmp_path) == 40


def test_a_run_shows_itself_in_one_line(tmp_path):
    run = create_run(tiny(), root=tmp_path, name="mine")
    assert repr(run) == f"Run('{tmp_path}/mine': attention on mqar, not started, 0 checkpoints)"
    run.write_status("stopped", 7)
    assert "stopped at step 7" in repr(run)
    (run.path / "config.yaml").write_text("model: [")
    assert "config.yaml cannot be read" in repr(Run(run.path))


def test_a_name_alone_is_looked_for_among_the_runs(tmp_path, monkeypatch):
    create_run(tiny(), root=tmp_path / "there", name="mine")
    monkeypatch.setenv("CIRCUITSCOPE_RUNS", str(tmp_path / "there"))
    monkeypatch.chdir(tmp_path)
    assert Run("mine").path == tmp_path / "there" / "mine"
    with pytest.raises(UserError, match="unknown run 'mien'; did you mean 'mine'"):
        Run("mien")
    monkeypatch.chdir(tmp_path / "there")
    assert str(Run("mine").path) == "mine"  # a folder of that name comes first


@pytest.mark.parametrize("name", ["a" * 300, "a" * 5000])
def test_a_name_longer_than_names_can_be_is_not_a_run(tmp_path, name):
    with pytest.raises(UserError, match=r"is not a run: it has no config\.yaml"):
        Run(tmp_path / name)


def test_a_name_that_starts_with_a_tilde_need_not_be_a_home():
    with pytest.raises(UserError, match="is not a run"):
        Run("~nobody at all/run")
