"""Where a run computes: the device, the precision, and the settings of both."""

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from circuitscope.config.train import TrainConfig
from circuitscope.devices import whole_float32
from circuitscope.memory import keep_freed_memory
from circuitscope.models.dtype import default_dtype
from circuitscope.training.matrix_unit import avoid_trap


def precision_on(device: torch.device, precision: str) -> str:
    """The number format of a run's products: what its config asks for, or bfloat16 on CUDA and float32 elsewhere."""
    return precision if precision != "auto" else "bfloat16" if device.type == "cuda" else "float32"


def autocast(device: torch.device, precision: str) -> torch.autocast:
    """Autocast to bfloat16: by default on CUDA, on other devices only if the config asks for it."""
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=precision_on(device, precision) == "bfloat16")


@contextmanager
def set_up(device: torch.device, config: TrainConfig) -> Iterator[None]:
    """Sets what a run needs: thread count, memory, deterministic kernels, float32 and gradients.

    On a GPU torch takes its deterministic kernels where it has them. With `deterministic` it takes no others: what has
    none raises an error, and kernels of other packages that add in no fixed order do not serve (kernels/backends.py).

    Afterwards threads, kernels, torch's default dtype and its mode of gradients are as they were.
    """
    threads, deterministic = torch.get_num_threads(), torch.get_deterministic_debug_mode()
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    if device.type == "cpu":
        keep_freed_memory()
        if precision_on(device, config.precision) == "bfloat16":
            avoid_trap()
    else:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.set_deterministic_debug_mode("error" if config.deterministic else "warn")
    try:
        with (
            warnings.catch_warnings(),
            whole_float32(),
            default_dtype(torch.float32),
            torch.inference_mode(False),
            torch.enable_grad(),
        ):
            warnings.filterwarnings("ignore", ".*does not have a deterministic implementation")
            yield
    finally:
        torch.set_num_threads(threads)
        torch.set_deterministic_debug_mode(deterministic)


@contextmanager
def seeded(device: torch.device, seed: int) -> Iterator[None]:
    """What torch draws on the device inside, such as dropout, follows from the seed; afterwards all is as before."""
    if device.type == "cuda":
        generator = torch.cuda.default_generators[torch.cuda.current_device() if device.index is None else device.index]
    else:
        generator = torch.mps._get_default_mps_generator() if device.type == "mps" else torch.default_generator
    before = generator.get_state()
    generator.manual_seed(seed)
    try:
        yield
    finally:
        generator.set_state(before)
