"""Tensor files are whole or not there, and any change to one is found."""

import hashlib
import os
import random
import re
from pathlib import Path

import pytest
import safetensors.torch
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import circuitscope
from circuitscope.runs import store
from circuitscope.runs.checkpoints import Checkpoints
from circuitscope.runs.damage import DamagedFile
from circuitscope.runs.store import (
    metadata_of,
    parse_tensors,
    read_tensors,
    remove_leftovers,
    write_tensors,
    write_text,
)
from tiny_run import same_bits, tiny

DTYPES = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
    torch.complex64,
)


def write_tiny(path: Path) -> bytes:
    write_tensors(path, {"w": torch.tensor([1.5, -0.0])}, {"step": "7"})
    return path.read_bytes()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 3, 5)], ids=str)
def test_tensors_of_every_kind_come_back_bit_by_bit(tmp_path, dtype, shape):
    width = torch.empty((), dtype=dtype).element_size()
    count = torch.Size(shape).numel()
    raw = torch.randint(0, 2 if dtype == torch.bool else 256, (count * width,), dtype=torch.uint8)
    tensor = raw.view(dtype).reshape(shape)
    write_tensors(tmp_path / "f", {"t": tensor}, {"step": "1", "note": 'ü "quoted"'})
    tensors, metadata = read_tensors(tmp_path / "f")
    assert tensors["t"].dtype == dtype
    assert tensors["t"].shape == shape
    assert torch.equal(tensors["t"].reshape(-1).view(torch.uint8), raw)
    assert metadata == {"step": "1", "note": 'ü "quoted"'}


@settings(max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    tensors=st.dictionaries(st.text(min_size=1), st.lists(st.floats(width=32), max_size=4), max_size=4),
    metadata=st.dictionaries(st.text().filter(lambda k: k != "digest"), st.text(), max_size=3),
)
def test_names_and_metadata_may_be_any_text(tmp_path, tensors, metadata):
    tensors = {n: torch.tensor(v, dtype=torch.float32) for n, v in tensors.items() if n != "__metadata__"}
    write_tensors(tmp_path / "f", tensors, metadata)
    back, described = read_tensors(tmp_path / "f")
    assert same_bits(back, tensors)
    assert described == metadata


def test_equal_contents_make_equal_files(tmp_path):
    """So that two runs can be compared with sha256sum; safetensors alone orders metadata at random."""
    for name in "abcdefgh":
        write_tensors(
            tmp_path / name, {"b": torch.ones(2), "a": torch.zeros(3)}, {"step": "3", "format": "x", "note": ""}
        )
    assert len({path.read_bytes() for path in tmp_path.iterdir()}) == 1


def test_files_are_ordinary_safetensors_files(tmp_path):
    tensors = {"a": torch.randn(3, 4), "b": torch.arange(5)}
    write_tensors(tmp_path / "f.safetensors", tensors, {"step": "3"})
    assert same_bits(safetensors.torch.load_file(tmp_path / "f.safetensors"), tensors)
    with safetensors.safe_open(tmp_path / "f.safetensors", "pt") as file:
        assert file.metadata()["step"] == "3"


@pytest.mark.usefixtures("without_type_checks")
def test_every_byte_changed_to_any_other_is_found(tmp_path):
    """So every flipped bit is, in header, digest and data alike."""
    data = write_tiny(tmp_path / "f")
    parse_tensors(data, tmp_path / "f")
    for place, value in ((p, v) for p in range(len(data)) for v in range(256) if v != data[p]):
        try:
            parse_tensors(data[:place] + bytes([value]) + data[place + 1 :], tmp_path / "f")
        except DamagedFile:
            continue
        pytest.fail(f"byte {place} changed from {data[place]} to {value} went unseen")


def test_every_truncation_is_found(tmp_path):
    path = tmp_path / "f"
    data = write_tiny(path)
    for length in range(len(data)):
        path.write_bytes(data[:length])
        with pytest.raises(DamagedFile):
            read_tensors(path)


@pytest.mark.parametrize("tail", [b"\0", b" ", b"}", b"x" * 4096], ids=repr)
def test_appended_bytes_are_found(tmp_path, tail):
    path = tmp_path / "f"
    path.write_bytes(write_tiny(path) + tail)
    with pytest.raises(DamagedFile):
        read_tensors(path)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\0" * 8,
        b"\0" * 4096,
        b"\xff" * 100,
        b"PK\x03\x04 a zip",
        b"\x02\0\0\0\0\0\0\0[]",
        b"\x04\0\0\0\0\0\0\0null",
        b"\x14\0\0\0\0\0\0\0" + b'{"__metadata__":null}'[:20],
        b'\x12\0\0\0\0\0\0\0{"__metadata__":1}',
        b'\x21\0\0\0\0\0\0\0{"__metadata__":{"digest":123456}}'[:41],
        b"\xa0\x86\x01\0\0\0\0\0" + b"[" * 100_000,
    ],
    ids=lambda d: repr(d[:24]),
)
def test_what_is_no_checkpoint_is_called_damaged(tmp_path, data):
    (tmp_path / "f").write_bytes(data)
    with pytest.raises(DamagedFile):
        read_tensors(tmp_path / "f")


def test_a_file_of_another_program_is_called_damaged(tmp_path):
    safetensors.torch.save_file({"a": torch.ones(2)}, tmp_path / "f", metadata={"step": "1"})
    with pytest.raises(DamagedFile):
        read_tensors(tmp_path / "f")


def test_a_file_under_another_steps_name_is_called_damaged(tmp_path):
    (tmp_path / "checkpoints").mkdir()
    write_tensors(tmp_path / "checkpoints/step-00000008.safetensors", {"w": torch.ones(1)}, {"step": "7"})
    with pytest.raises(DamagedFile, match="holds step 7"):
        Checkpoints(tmp_path, lambda: "0123456789ab").load(8)


@pytest.fixture(scope="module")
def real_files(tmp_path_factory):
    from circuitscope.training.trainer import train

    run = train(tiny(steps=4), root=tmp_path_factory.mktemp("runs"))
    return [run.path / "checkpoints/step-00000004.safetensors", run.path / "resume/step-00000004.safetensors"]


@pytest.mark.usefixtures("without_type_checks")
def test_flips_and_truncations_of_a_real_runs_files_are_found(real_files):
    draw = random.Random(0)
    for file in real_files:
        data = file.read_bytes()
        parse_tensors(data, file)
        for place in draw.sample(range(len(data)), 500):
            flipped = data[:place] + bytes([data[place] ^ 1 << draw.randrange(8)]) + data[place + 1 :]
            for damaged in (flipped, data[:place]):
                with pytest.raises(DamagedFile):
                    parse_tensors(damaged, file)


def test_a_flipped_dtype_is_found_where_safetensors_alone_loads_garbage(tmp_path):
    path = tmp_path / "f"
    write_tensors(path, {"w": torch.ones(2)}, {})
    path.write_bytes(path.read_bytes().replace(b'"F32"', b'"I32"'))
    assert safetensors.torch.load_file(path)["w"].dtype == torch.int32
    with pytest.raises(DamagedFile):
        read_tensors(path)


@pytest.mark.parametrize("call", ["fsync", "replace"])
@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()], ids=repr)
def test_a_write_that_breaks_off_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch, call, error):
    path = tmp_path / "f"
    before = write_tiny(path)

    def fail(*_):
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(store.os, call, fail)
        with pytest.raises(type(error)):
            write_tensors(path, {"w": torch.zeros(9)}, {"step": "8"})
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["f"]


def test_contents_are_synced_before_the_rename_and_the_folder_after(tmp_path, monkeypatch):
    calls = []
    fsync, replace = os.fsync, os.replace

    def note_fsync(descriptor):
        target = os.readlink(f"/proc/self/fd/{descriptor}")
        calls.append(("fsync", "folder" if os.path.isdir(target) else "file"))
        fsync(descriptor)

    def note_replace(source, target):
        calls.append(("replace", Path(target).name))
        replace(source, target)

    monkeypatch.setattr(store.os, "fsync", note_fsync)
    monkeypatch.setattr(store.os, "replace", note_replace)
    write_text(tmp_path / "f", "text")
    assert calls == [("fsync", "file"), ("replace", "f"), ("fsync", "folder")]


def test_leftovers_of_a_killed_process_go_and_checkpoints_stay(tmp_path):
    write_tiny(tmp_path / "step-00000001.safetensors")
    (tmp_path / ".step-00000002.safetensors.4711.tmp").write_bytes(b"half")
    remove_leftovers(tmp_path)
    assert os.listdir(tmp_path) == ["step-00000001.safetensors"]


def test_the_digest_is_a_sha256_of_the_whole_file_with_its_own_place_blank(tmp_path):
    data = write_tiny(tmp_path / "f")
    digest = re.search(rb'"digest":"([0-9a-f]{64})"', data)[1]
    assert hashlib.sha256(data.replace(digest, b"0" * 64)).hexdigest().encode() == digest


def test_nothing_in_the_package_loads_pickles_or_runs_text_as_code():
    files = list(Path(circuitscope.__file__).parent.rglob("*.py"))
    runs_code = re.compile(
        r"pickle|\bdill\b|joblib|shelve|marshal|torch\.load\b|\bnp\.load\b|numpy\.load\b|yaml\.(unsafe_)?load\b"
        r"|(?<![.\w])(eval|exec)\("
    )
    assert len(files) > 20
    assert [f"{f}: {m[0]}" for f in files for m in runs_code.finditer(f.read_text())] == []


def test_the_digest_is_read_from_the_header_alone(tmp_path):
    path = tmp_path / "a.safetensors"
    write_tensors(path, {"w": torch.zeros(3)}, {"step": "1"})
    first = metadata_of(path)["digest"]
    write_tensors(path, {"w": torch.ones(3)}, {"step": "1"})
    assert len(first) == 64
    assert metadata_of(path)["digest"] != first
    path.write_bytes(path.read_bytes()[:-4])  # a torn tensor is for `read_tensors` to find
    assert metadata_of(path)["digest"] != first
    for content in (b"", b"torn", b"\xff" * 64, (2).to_bytes(8, "little") + b"{}"):
        path.write_bytes(content)
        with pytest.raises(DamagedFile, match="its header cannot be read"):
            metadata_of(path)["digest"]
