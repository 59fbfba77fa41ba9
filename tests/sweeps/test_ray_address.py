"""Where there is no Ray to run on, one line says so, within seconds."""

import socket
import sys
from pathlib import Path

import pytest
from test_local_sweep import Quiet, write_grid

from circuitscope.errors import UserError
from circuitscope.sweeps import ray as ours
from circuitscope.sweeps.executor import Job
from circuitscope.sweeps.ray import RayExecutor
from circuitscope.sweeps.sweep import Sweep


@pytest.fixture
def listening():
    """A port of this machine at which somebody listens who never says a word."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


@pytest.mark.parametrize("scheme", ["", "ray://"])
def test_an_address_that_is_dead_or_no_ray_is_refused_within_seconds(scheme, listening, tmp_path, monkeypatch):
    monkeypatch.setattr(ours, "_ANSWERS", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as server:
        dead = server.getsockname()[1]
    for port in (dead, listening):
        with pytest.raises(UserError, match=f"no Ray answers at {scheme}127.0.0.1:{port}"):
            list(_alone(tmp_path, f"{scheme}127.0.0.1:{port}"))


@pytest.mark.parametrize("address", ["nonsense", "ray://", "host:port", "127.0.0.1:99999"])
def test_what_is_no_address_is_refused(address, tmp_path):
    with pytest.raises(UserError, match="expected auto, HOST:PORT or ray://HOST:PORT"):
        list(_alone(tmp_path, address))


def test_without_ray_one_line_says_how_to_install_it(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(UserError, match=r"pip install 'circuitscope\[ray\]'"):
        list(_alone(tmp_path, None))


def _alone(folder: Path, address: str | None):
    """A job through a Ray, in a process that is not connected to one."""
    return RayExecutor(address)([Job("a", "", {}, str(folder))], Quiet())


@pytest.mark.slow
def test_without_an_address_a_ray_is_started_here_says_nothing_and_is_gone_at_the_end(tmp_path, capfd):
    import ray

    found = Sweep.open(write_grid(tmp_path / "one", axes={"train.seed": [0]}), tmp_path / "runs")
    (row,) = found.go(RayExecutor(workers=1), Quiet())
    assert row["state"] == "finished"
    assert not ray.is_initialized()
    assert capfd.readouterr() == ("", "")
