"""Starting a Triton kernel: on the device of its tensors, with as many programs as it has items of work."""

from typing import Any, no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

_TILE = 128  # numbers that one program keeps of a state: four for each thread of a warp


def launch(kernel: Any, programs: int, *args: Any, **sizes: Any) -> None:
    """Runs `programs` programs of a kernel. `sizes` are its constants, known when it is compiled.

    One warp per program, because a program waits for its own positions and many programs hide that. One stage, so that
    the compiler never moves the load of a number in front of the store that writes it. Products and sums are fused, as
    said here and not left to Triton's default, which differs between its versions.
    """
    with torch.cuda.device_of(args[0]):
        kernel[(programs,)](*args, **sizes, num_warps=1, num_stages=1, enable_fp_fusion=True)


def power_of_two(count: int) -> int:
    """The smallest power of two that is at least `count`; Triton's blocks have such sizes."""
    return 1 << max(0, count - 1).bit_length()


def block_of(count: int, beside: int = 1) -> int:
    """How many of `count` items a program takes if each has `beside` numbers: a power of two."""
    return max(1, min(power_of_two(count), _TILE // power_of_two(beside)))


def blocks_of(count: int, block: int) -> int:
    """How many blocks cover `count` items."""
    return -(-count // block)


def plain(tensor: Tensor) -> Tensor:
    """The tensor as a kernel reads it: without a graph, with its numbers in order."""
    return tensor.detach().contiguous()


@triton.jit
@no_type_check
def wide(size):
    """A size in 64 bits. Triton hands it over in 32, in which the place of a number in a large array has no room."""
    return tl.cast(size, tl.int64)
