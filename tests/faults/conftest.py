"""What the fault tests compare with, and disks they may fill and lock."""

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from kills import SIZES, Saved, flags, rows, saved, start


class Unbroken:
    """A run that nothing happened to."""

    def __init__(self, path: Path):
        self.saved: Saved = saved(path)
        self.rows = rows(path)


@pytest.fixture(scope="session")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> Unbroken:
    root = tmp_path_factory.mktemp("unbroken")
    process = start("train", *flags(**SIZES, keep_resume=100), "--runs", root, "--name", "run", logs=root / "logs")
    assert process.wait() == 0, process.err
    return Unbroken(root / "run")


def _mount(*arguments: object) -> None:
    done = subprocess.run(["mount", *map(str, arguments)], capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(done.stderr.strip())


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[Callable[..., None]]:
    """Mounts as the command `mount` does; undone after the test. Skips where that is not permitted."""
    targets = []

    def do(*arguments: object) -> None:
        _mount(*arguments)
        if "remount" not in str(arguments):
            targets.append(arguments[-1])

    probe = tmp_path / "probe"
    probe.mkdir()
    try:
        do("-t", "tmpfs", "-o", "size=64k", "tmpfs", probe)
    except OSError as error:
        pytest.skip(f"NOT TESTED: real full and read-only disks need the right to mount ({error})")
    yield do
    for target in reversed(targets):
        subprocess.run(["umount", "--lazy", str(target)], check=True)


@pytest.fixture
def disk(tmp_path: Path, mount: Callable[..., None]) -> Path:
    """A disk of one megabyte."""
    path = tmp_path / "disk"
    path.mkdir()
    mount("-t", "tmpfs", "-o", "size=1m", "tmpfs", path)
    return path
