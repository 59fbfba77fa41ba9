"""Shared by all tests: one thread, hypothesis examples that are the same on every machine, no GPU tests without one."""

import pytest
import torch
from hypothesis import HealthCheck, settings

torch.set_num_threads(1)
settings.register_profile(
    "circuitscope",
    deadline=None,  # the machine may be busy
    derandomize=True,
    max_examples=50,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("circuitscope")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests marked gpu run where there is a CUDA device and say so where there is none."""
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device, and this machine has none"))
