"""Numba kernels stay inside their arrays for sizes that are multiples of nothing.

Every array a kernel gets is moved into a buffer with guards on both sides. A write outside changes a guard; a read
outside brings in their NaN, and the answer is not the reference's any more.
"""

from types import ModuleType

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from circuitscope.kernels import long_conv, selective_scan, selective_scan_numba, selective_scan_phi_numba, wkv

GUARD = 61  # floats; odd, so that nothing is aligned by chance
MARK = 0x7FC0BEEF  # a NaN that no arithmetic gives
KERNELS = {
    selective_scan_numba: ("_scan_forward", "_scan_backward"),
    selective_scan_phi_numba: ("_phi_forward", "_phi_backward", "_phi_profile"),
    long_conv: ("_conv_forward", "_conv_backward"),
    wkv: ("_wkv_forward", "_wkv_backward"),
}


def guarded(module: ModuleType, name: str, calls: list[str]):
    launch = getattr(module, name)

    def run(*args):
        buffers, inner = {}, list(args)
        for i, array in enumerate(args):
            if isinstance(array, np.ndarray):
                assert array.dtype == np.float32
                buffers[i] = np.full(array.size + 2 * GUARD, MARK, np.uint32).view(np.float32)
                inner[i] = buffers[i][GUARD : GUARD + array.size].reshape(array.shape)
                inner[i][...] = array
        launch(*inner)
        calls.append(name)
        for i, buffer in buffers.items():
            bits = buffer.view(np.uint32)
            assert (bits[:GUARD] == MARK).all(), f"{name} wrote before argument {i}, {args[i].shape}"
            assert (bits[len(bits) - GUARD :] == MARK).all(), f"{name} wrote behind argument {i}, {args[i].shape}"
            args[i][...] = inner[i]

    return run


@pytest.fixture(scope="module", autouse=True)
def calls():
    """All kernels guarded; at the end every one of them must have run."""
    seen: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        for module, names in KERNELS.items():
            for name in names:
                patch.setattr(module, name, guarded(module, name, seen))
        yield seen
    assert set(seen) == {name for names in KERNELS.values() for name in names}


def compare(function, reference, args):
    """Value and all gradients: 1e-4 of the largest, and of 0.01 where sums cancel; a NaN is never near."""
    results = []
    for f, dtype in ((function, torch.float32), (reference, torch.float64)):
        leaves = [a.detach().to(dtype).requires_grad_() for a in args]
        out = f(*leaves)
        weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(dtype)
        results.append([out, *torch.autograd.grad((out * weight).sum(), leaves)])
    for got, want in zip(*results, strict=True):
        assert got.shape == want.shape
        assert (got - want).abs().max() <= 1e-4 * want.abs().max().clamp(min=1e-2)


sizes = {"batch": st.integers(1, 3), "length": st.integers(1, 70), "channels": st.integers(1, 70)}


def draw(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@given(**sizes, states=st.integers(1, 20))
def test_the_scan_and_its_phi(batch, length, channels, states):
    x, dt = draw(0, batch, length, channels), draw(1, batch, length, channels).exp() / 10
    A, D, initial = -draw(2, channels, states).exp(), draw(3, channels), draw(4, batch, channels, states)
    B, C = draw(5, batch, length, states), draw(6, batch, length, states)
    compare(selective_scan.selective_scan, selective_scan.selective_scan_reference, [x, dt, A, B, C, D, initial])
    few = [dt[..., :5], A[:5], B, C, D[:5]]
    compare(selective_scan.selective_scan_phi, selective_scan.selective_scan_phi_reference, few)
    phi = selective_scan.selective_scan_phi_reference(*few)
    lag = length // 2
    profile = selective_scan.selective_scan_phi_profile(*few)[..., lag]
    assert (profile - phi.diagonal(-lag, -2, -1).abs().mean(-1)).abs().max() <= 1e-5 * phi.abs().max()


@given(**sizes, lags=st.integers(1, 80))
def test_the_convolution_by_taps(batch, length, channels, lags):
    u, kernel, bias = draw(0, batch, length, channels), draw(1, channels, lags), draw(2, channels)
    compare(long_conv.direct_conv, lambda u, k, b: long_conv.long_conv_reference(u, k) + b, [u, kernel, bias])


@given(**sizes)
def test_wkv(batch, length, channels):
    k, v = draw(0, batch, length, channels), draw(1, batch, length, channels)
    compare(wkv.wkv, wkv.wkv_reference, [draw(2, channels).exp(), draw(3, channels), k, v])
