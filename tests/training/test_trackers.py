"""TensorBoard and Weights & Biases are written for real and read back; without a network."""

import json
import struct
import sys
import time

import pytest

import circuitscope as cs
from circuitscope.errors import UserError
from circuitscope.runs.metrics import read_metrics
from circuitscope.training import trackers
from circuitscope.training.trainer import Interrupted, resume, train
from tiny_run import SignalAt, tiny


@pytest.fixture
def offline(monkeypatch, tmp_path):
    for name, value in {"MODE": "offline", "SILENT": "true", "CONFIG_DIR": str(tmp_path), "DIR": str(tmp_path)}.items():
        monkeypatch.setenv(f"WANDB_{name}", value)


def expected(run, split):
    """Step → loss, accuracy, rate and, in training, gradient norms and clipped steps as metrics.jsonl has them."""
    rows = [row for row in read_metrics(run.path) if row["split"] == split]
    fields = ("loss", "accuracy", "lr", *(("grad_norm", "clipped", "grad_norm/embed") if split == "train" else ()))
    return {row["step"]: {k: row[k] for k in fields} for row in rows}


def test_tensorboard_holds_what_metrics_jsonl_holds(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run = train(tiny(tensorboard=True), root=tmp_path)
    events = EventAccumulator(str(run.path / "tensorboard"))
    events.Reload()
    tags = {f"{split}/{field}" for split in ("train", "validation") for field in expected(run, split)[12]}
    assert tags <= set(events.Tags()["scalars"])
    for tag in tags:
        split, _, field = tag.partition("/")
        read = {event.step: event.value for event in events.Scalars(tag)}
        assert read == {step: pytest.approx(row[field]) for step, row in expected(run, split).items()}


def wandb_records(path):
    """Records of an offline file: a log in LevelDB's format, in blocks of 32 KiB, after 7 bytes of header."""
    from wandb.proto import wandb_internal_pb2

    data, at, record = path.read_bytes(), 7, b""
    assert data.startswith(b":W&B")
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:  # no header fits before the next block
            at += 32768 - at % 32768
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        record += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield wandb_internal_pb2.Record.FromString(record)
            record = b""


def wandb_runs(root):
    """Of every offline file below a folder: its run's id and name, and step → numbers."""
    found = []
    for path in sorted(root.rglob("run-*.wandb")):
        run_id, name, rows = "", "", {}
        deadline = time.monotonic() + 60
        while not any(record.HasField("exit") for record in wandb_records(path)):  # its service may write a bit later
            assert time.monotonic() < deadline, f"{path} has no end"
            time.sleep(0.05)
        for record in wandb_records(path):
            if record.HasField("run"):
                run_id, name = record.run.run_id, record.run.display_name
            if record.HasField("history"):
                items = {item.key or item.nested_key[0]: json.loads(item.value_json) for item in record.history.item}
                rows.setdefault(items.pop("_step"), {}).update(items)
        found.append((run_id, name, rows))
    return found


def test_wandb_holds_what_metrics_jsonl_holds(offline, tmp_path):
    run = train(tiny(wandb="project"), root=tmp_path, name="one")
    ((run_id, name, rows),) = wandb_runs(run.path)
    assert (run_id, name) == (run.environment["wandb_id"], "one")
    for split in ("train", "validation"):
        for step, row in expected(run, split).items():
            assert {f: rows[step][f"{split}/{f}"] for f in row} == pytest.approx(row)


def test_equal_folder_names_are_different_wandb_runs_and_a_resumed_run_finds_its_own(offline, tmp_path):
    """Two machines, each with a run called one; the second is stopped and resumed."""
    first = train(tiny(wandb="project"), root=tmp_path / "a", name="one")
    with pytest.raises(Interrupted):
        train(tiny(wandb="project"), root=tmp_path / "b", name="one", progress=SignalAt(6))
    second = resume(cs.Run(tmp_path / "b" / "one"))
    (ours,) = {run_id for run_id, _, _ in wandb_runs(first.path)}
    parts = wandb_runs(second.path)
    assert len(parts) == 2
    (theirs,) = {run_id for run_id, _, _ in parts}
    assert ours != theirs
    assert {step for _, _, rows in parts for step in rows} == {0, 2, 4, 6, 8, 10, 12}


def test_a_run_made_before_ids_were_kept_goes_on_under_its_folders_name(offline, tmp_path):
    with pytest.raises(Interrupted):
        train(tiny(wandb="project"), root=tmp_path, name="old", progress=SignalAt(6))
    record = tmp_path / "old" / "environment.json"
    environment = json.loads(record.read_text())
    del environment["wandb_id"]
    record.write_text(json.dumps(environment))
    run = resume(cs.Run(tmp_path / "old"))
    assert "old" in {run_id for run_id, _, _ in wandb_runs(run.path)}


def test_a_run_that_is_being_logged_elsewhere_in_the_process_is_left_alone(offline, tmp_path):
    import wandb

    with wandb.init(project="mine", dir=tmp_path / "mine", id="mine") as session:
        run = train(tiny(wandb="project"), root=tmp_path / "runs")
        session.log({"x": 1})
    assert [run_id for run_id, _, _ in wandb_runs(run.path)] == [run.environment["wandb_id"]]
    ((_, _, rows),) = wandb_runs(tmp_path / "mine")
    assert [{k: v for k, v in row.items() if k == "x" or "/" in k} for row in rows.values()] == [{"x": 1}]


@pytest.mark.parametrize(("option", "package"), [("tensorboard", "torch.utils.tensorboard"), ("wandb", "wandb")])
def test_a_missing_package_is_said_before_there_is_a_run(monkeypatch, tmp_path, option, package):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(UserError, match=f"train.{option} needs the package {option}: pip install {option}"):
        train(tiny(**{option: True if option == "tensorboard" else "project"}), root=tmp_path)
    assert list(tmp_path.iterdir()) == []
    assert trackers.check_trackers(tiny()) is None
