"""Memory: a check that something fits, and a setting that keeps freed blocks for reuse."""

import ctypes
import re
import sys

import psutil
import torch

from circuitscope.errors import UserError

_OUT_OF_MEMORY = ("not enough memory", "can't allocate memory", "out of memory", "Cannot allocate memory")
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3


def check_fits(
    size: int,
    device: torch.device,
    what: str,
    instead: str = 'use fewer sequences, circuitscope.phi(..., reduce="mean_abs"), or circuitscope.phi_chunks',
) -> None:
    """Refuses what needs more memory than is free, and says what to call instead."""
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else psutil.virtual_memory().available
    if size > 0.9 * free:
        raise UserError(f"{what} would take {size / 1e9:.1f} GB and {free / 1e9:.1f} GB are free; {instead}")


def ran_out(error: BaseException) -> bool:
    """Whether an error says that there was not enough memory: Python's, numpy's, or torch's on a CPU or a GPU."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _OUT_OF_MEMORY)


def on_gpu(error: BaseException) -> bool:
    """Whether it was the memory of a GPU that ran out."""
    return isinstance(error, torch.OutOfMemoryError) or str(error).startswith(("CUDA out of", "MPS backend out of"))


def out_of_memory_in_words(error: BaseException) -> str:
    """How much was asked for when memory ran out, where the error says so: `23.8 GiB were asked for at once`."""
    said = str(error)
    if found := re.search(r"allocate:? (?:memory: you tried to allocate )?(\d+) bytes", said):
        return f"{int(found[1]) / 2**30:,.1f} GiB were asked for at once"
    if found := re.search(r"allocate ([\d.]+ ?[KMGTP]iB)", said):
        return f"{found[1]} were asked for at once"
    return "no more can be had"


def keep_freed_memory() -> None:
    """Lets glibc keep freed blocks of up to 32 MB for the next step instead of returning them to the system.

    Otherwise the system maps every large temporary again in each step, with page faults; at the default size
    that takes a third of the step. On systems without glibc this does nothing.
    """
    if sys.platform != "linux":
        return
    try:
        mallopt = ctypes.CDLL("libc.so.6").mallopt
    except (OSError, AttributeError):
        return
    mallopt(_M_MMAP_THRESHOLD, 1 << 25)
    mallopt(_M_TRIM_THRESHOLD, 1 << 29)
    mallopt(_M_TOP_PAD, 1 << 26)
