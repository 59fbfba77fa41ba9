"""(h) Selective scan, forward and backward, against mambapy's parallel scan and mamba-ssm's reference loop."""

import math
import statistics
import sys
import types
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.rows import Row, Section, alternate, faster
from circuitscope.kernels.selective_scan import selective_scan
from circuitscope.memory import keep_freed_memory

_SHAPES = ((64, 64, 128, 16), (16, 256, 256, 16), (8, 512, 512, 16))
_QUICK = ((2, 16, 24, 4), (2, 33, 16, 4), (1, 64, 8, 4))
_NAME = "selective scan forward + backward"
_BOTH = (
    "output and gradients of x, Δ, A, B, C, D; sizes are (batch, length, channels, states); float32, one process with"
    " a run's malloc settings. First it was checked that outputs and gradients agree to 1e-4 of their largest entry"
)
_MAMBAPY = f"the other side is MambaBlock.selective_scan of mambapy, unchanged, with its pscan; {_BOTH}"
_LOOP = f"the other side is mamba-ssm's selective_scan_ref with autograd; {_BOTH}"

Scan = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


def measure(quick: bool) -> Section:
    keep_freed_memory()
    shapes = _QUICK if quick else _SHAPES
    rows, ratios = [], []
    for shape in shapes:
        ours, other = _times(shape, by_mambapy(), 1 if quick else 15)
        ratios.append(statistics.median(b / a for a, b in zip(ours, other, strict=True)))
        rows.append(faster(f"{_NAME} against mambapy, {shape}", ours, other, None, _MAMBAPY))
    mean = math.exp(statistics.mean(map(math.log, ratios)))
    name = f"{_NAME} against mambapy, geometric mean of the medians"
    rows.append(Row(name, "–", "–", f"{mean:.2f}x", "at least 15x", mean >= 15, _MAMBAPY))
    ours, loop = _times(shapes[0], _by_mamba_ssm(), 1 if quick else 9)
    rows.append(faster(f"{_NAME} against a loop, {shapes[0]}", ours, loop, 100, _LOOP))
    return Section(rows)


def _times(shape: tuple[int, ...], other: Scan, rounds: int) -> list[list[float]]:
    inputs, weight = _inputs(shape)

    def side(scan: Scan) -> Callable[[], tuple[Tensor, ...]]:
        def call() -> tuple[Tensor, ...]:
            y = scan(*inputs)
            return (y, *torch.autograd.grad(y, inputs, weight))

        return call

    sides = [side(selective_scan), side(other)]
    _check_same(*(call() for call in sides))
    return alternate(sides, rounds)


def _inputs(shape: tuple[int, ...]) -> tuple[list[Tensor], Tensor]:
    """x, Δ, A, B, C, D as in a Mamba block at its start, and the gradient of the output."""
    batch, length, channels, states = shape
    draw = torch.Generator().manual_seed(0)

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=draw)

    inputs = [
        normal(batch, length, channels),
        F.softplus(normal(batch, length, channels) - 2),
        -torch.arange(1.0, states + 1).repeat(channels, 1),
        normal(batch, length, states),
        normal(batch, length, states),
        normal(channels),
    ]
    return [tensor.requires_grad_() for tensor in inputs], normal(batch, length, channels)


def _check_same(ours: tuple[Tensor, ...], other: tuple[Tensor, ...]) -> None:
    for name, a, b in zip(("y", "x", "Δ", "A", "B", "C", "D"), ours, other, strict=True):
        error = ((a - b).abs().max() / b.abs().max()).item()
        if not error <= 1e-4:
            raise RuntimeError(f"the sides differ by {error:.1e} of the largest entry in y or its gradient: {name}")


def by_mambapy() -> Scan:
    """deltaA, BX, pscan, the read-out by C, and D: the method reads nothing from its object."""
    from mambapy.mamba import MambaBlock

    return lambda *inputs: MambaBlock.selective_scan(None, *inputs)


def _by_mamba_ssm() -> Scan:
    """Its module imports compiled extensions by name: empty modules stand in while it loads.

    After that it is forgotten with them: transformers, used by other benchmarks, would take it for a working one.
    """
    absent = [name for name in ("selective_scan_cuda", "causal_conv1d_cuda") if name not in sys.modules]
    sys.modules.update({name: types.ModuleType(name) for name in absent})
    try:
        from mamba_ssm.ops.selective_scan_interface import selective_scan_ref
    finally:
        for name in [name for name in sys.modules if name in absent or name.split(".")[0] == "mamba_ssm"]:
            del sys.modules[name]
    return lambda x, dt, A, B, C, D: selective_scan_ref(x.mT, dt.mT, A, B.mT, C.mT, D).mT
