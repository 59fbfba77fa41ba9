"""How long threads of OpenMP spin at a barrier: bounded by the package, unless somebody else has chosen."""

import os
import subprocess
import sys

import pytest

import circuitscope

_CHOICES = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")


@pytest.fixture
def before_torch(monkeypatch):
    """A process in which nothing is set and torch is not loaded."""
    for name in _CHOICES:
        monkeypatch.setenv(name, "")  # so that it is put back at the end
        monkeypatch.delenv(name)
    monkeypatch.delitem(sys.modules, "torch")
    return monkeypatch


def test_the_spin_is_bounded_before_torch_is_loaded(before_torch):
    circuitscope._bound_the_spin()
    assert 0 < int(os.environ["GOMP_SPINCOUNT"]) < 300_000


@pytest.mark.parametrize("name", _CHOICES)
def test_what_the_user_has_set_stays(before_torch, name):
    before_torch.setenv(name, "PASSIVE")
    circuitscope._bound_the_spin()
    assert [os.environ.get(choice) for choice in _CHOICES].count(None) == 1
    assert os.environ[name] == "PASSIVE"


def test_nothing_is_set_once_torch_is_loaded(before_torch):
    before_torch.setitem(sys.modules, "torch", object())
    circuitscope._bound_the_spin()
    assert not {*_CHOICES} & os.environ.keys()


def test_openmp_reads_the_setting():
    env = {name: value for name, value in os.environ.items() if name not in _CHOICES}
    done = subprocess.run(
        [sys.executable, "-c", "import circuitscope.kernels.forks"],
        env={**env, "OMP_DISPLAY_ENV": "VERBOSE"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert f"GOMP_SPINCOUNT = '{circuitscope._SPIN_COUNT}'" in done.stderr
