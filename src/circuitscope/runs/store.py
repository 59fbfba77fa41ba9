"""Tensor files that are whole or not there: safetensors with a digest over every byte.

The digest stands in the header's metadata as 64 hex digits and covers the file with those digits
replaced by zeros, so a flipped bit anywhere, header included, is found on load. The files stay
ordinary safetensors files.
"""

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

import torch
from safetensors import SafetensorError
from safetensors.torch import load as parse_safetensors
from safetensors.torch import save as to_safetensors

from circuitscope.runs.damage import DamagedFile, check_regular

_BLANK = "0" * 64
_UNREADABLE = (ValueError, KeyError, TypeError, AttributeError, RecursionError)  # what a wrong header leads to


def write_tensors(path: Path, tensors: dict[str, torch.Tensor], metadata: dict[str, str]) -> None:
    """Writes a file of tensors; at any instant `path` is absent or whole."""
    data = _in_order(to_safetensors(tensors, metadata={**metadata, "digest": _BLANK}))
    start = data.index(_digest_field(_BLANK)) + len(b'"digest":"')
    data[start : start + 64] = hashlib.sha256(data).hexdigest().encode()
    write_whole(path, lambda file: file.write(data))


def read_tensors(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Checks the digest of a file, and returns its tensors and metadata."""
    check_regular(path)
    return parse_tensors(path.read_bytes(), path)


def parse_tensors(content: bytes, path: Path) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Checks the digest of a file's content, and returns its tensors and metadata; errors name the path."""
    data = bytearray(content)
    try:
        metadata = _metadata(data)
        digest = metadata.pop("digest")
        field = _digest_field(digest)
        start = data.index(field) + len(b'"digest":"')
    except _UNREADABLE:
        raise DamagedFile(f"{path} is damaged: its header cannot be read") from None
    data[start : start + 64] = _BLANK.encode()
    if hashlib.sha256(data).hexdigest() != digest:
        raise DamagedFile(f"{path} is damaged: its contents do not match its digest")
    try:
        return parse_safetensors(bytes(data)), metadata
    except (SafetensorError, RuntimeError, *_UNREADABLE) as error:
        raise DamagedFile(f"{path} is damaged: its header is wrong: {' '.join(str(error).split())}") from None


def metadata_of(path: Path) -> dict[str, str]:
    """The metadata in a file's header, with its digest; the tensors are neither read nor checked."""
    check_regular(path)
    with open(path, "rb") as file:
        start = file.read(8)
        size = min(int.from_bytes(start, "little"), os.fstat(file.fileno()).st_size)
        data = bytearray(start + file.read(size))
    try:
        metadata = _metadata(data)
        _digest_field(metadata["digest"])
        return metadata
    except _UNREADABLE:
        raise DamagedFile(f"{path} is damaged: its header cannot be read") from None


def write_whole(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """Writes a file atomically: a temporary name in the same folder, fsync, rename, fsync of the folder."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    _sync_folder(path.parent)


def write_text(path: Path, text: str) -> None:
    """Writes a small text file atomically."""
    write_whole(path, lambda file: file.write(text.encode()))


def overwrite_text(path: Path, text: str) -> None:
    """Overwrites a small file in place, which works even on a full disk: the file already has its block."""
    with open(path, "r+b") as file:
        file.write(text.encode())
        file.truncate()


def remove_leftovers(folder: Path) -> None:
    """Deletes temporary files that a killed process left behind. Call with the run's lock held."""
    for leftover in folder.glob(".*.tmp"):
        leftover.unlink(missing_ok=True)


def _in_order(data: bytes) -> bytearray:
    """The same file with its metadata sorted: safetensors writes them in random order."""
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return bytearray(len(text).to_bytes(8, "little") + text + data[8 + size :])


def _metadata(data: bytearray) -> dict[str, str]:
    size = int.from_bytes(data[:8], "little")
    if len(data) < 8 or size > len(data) - 8:
        raise ValueError("truncated")
    header = json.loads(data[8 : 8 + size])
    return dict(header["__metadata__"])


def _digest_field(digest: str) -> bytes:
    if len(digest) != 64:
        raise ValueError("digest")
    return b'"digest":"' + digest.encode() + b'"'


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
