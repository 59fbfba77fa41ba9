"""Shared by all tests: one thread, the same hypothesis examples everywhere, no GPU tests without one, trained runs."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # for the processes that tests start
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")  # some virtual machines announce AMX and trap on it

import jaxtyping
import pytest
import torch
import typer.core
from hypothesis import HealthCheck, settings

torch.set_num_threads(1)
typer.core.TyperGroup.context_class = typer.Context  # Typer demands this annotation and passes Click's context
settings.register_profile(
    "circuitscope",
    deadline=None,  # the machine may be busy
    derandomize=True,
    max_examples=50,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("circuitscope")


TRAINED = ("default_run", "mamba_run", "one_layer_run")  # the fixtures below, which take a minute or more


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist reads the groups
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests marked gpu run where there is a CUDA device and say so where there is none; workers share out the tests."""
    for item in items:
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device, and this machine has none"))
    if hasattr(config, "workerinput"):
        for item in items:
            item.add_marker(pytest.mark.xdist_group(_group(item)))
        items.sort(key=lambda item: (_trained(item) == "", item.get_closest_marker("slow") is None))


def _group(item: pytest.Item) -> str:
    """The tests that one worker runs, one after the other, so that no fixture is made twice.

    They are those that read the same trained run, otherwise those of a file. The tests of faults stay together too:
    they watch processes at work and must not disturb each other.
    """
    file = item.nodeid.partition("::")[0]
    return _trained(item) or ("faults" if file.startswith("tests/faults") else file)


def _trained(item: pytest.Item) -> str:
    """The trained run that a test reads, or ""."""
    return next((name for name in TRAINED if name in getattr(item, "fixturenames", ())), "")


@pytest.fixture
def without_type_checks(monkeypatch):
    """Annotations are not enforced, as in a user's own Python: for tests that pass other types than annotated."""
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)


# Runs that several tests read, trained once. Nobody changes their checkpoints; analyses may be added.


@pytest.fixture(scope="session")
def default_run(tmp_path_factory):
    """What `circuitscope train` makes: two layers of attention on MQAR (64, 4)."""
    import circuitscope as cs

    return cs.train(threads=1, root=tmp_path_factory.mktemp("runs"), name="default")


@pytest.fixture(scope="session")
def one_layer_run(tmp_path_factory):
    """One layer of attention on the same task, to the end of its drop."""
    import circuitscope as cs

    return cs.train(
        model="attention",
        n_layers=1,
        steps=600,
        lr=2e-3,
        weight_decay=0.1,
        eval_every=25,
        save_every=50,
        threads=1,
        root=tmp_path_factory.mktemp("runs"),
        name="one_layer",
    )


@pytest.fixture(scope="session")
def mamba_run(tmp_path_factory):
    """One layer of Mamba on MQAR (16, 4), vocabulary 2,048, never the same example twice."""
    import circuitscope as cs

    return cs.train(
        model="mamba",
        recipe="plain",
        n_layers=1,
        length=16,
        vocab_size=2048,
        examples=None,
        steps=2200,
        warmup=0.07,
        lr=5e-3,
        weight_decay=0.1,
        early_stop=0.92,
        threads=1,
        root=tmp_path_factory.mktemp("runs"),
        name="mamba",
    )
