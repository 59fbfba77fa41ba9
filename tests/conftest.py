"""Shared by all tests: one thread, and hypothesis examples that are the same on every machine."""

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
