"""The selective scan against mamba-ssm's Python reference (the contract of the GPU adaptor) and mambapy."""

import sys
import types
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from circuitscope.kernels import backends
from circuitscope.kernels import selective_scan as module
from circuitscope.kernels.selective_scan import selective_scan

SHAPES = [(2, 32, 16, 4), (1, 1, 1, 1), (3, 37, 17, 5), (2, 64, 24, 16)]


def gradients(function, shape, dtype):
    """Output of the function on Mamba-like inputs of this shape, and all gradients of a random weighting."""
    batch, length, channels, states = shape
    draw = torch.Generator().manual_seed(1)

    def normal(*size):
        return torch.randn(*size, generator=draw)

    args = [
        normal(batch, length, channels),
        F.softplus(normal(batch, length, channels) - 2),
        -torch.arange(1, states + 1) * torch.exp(0.1 * normal(channels, states)),
        normal(batch, length, states),
        normal(batch, length, states),
        normal(channels),
    ]
    weight = normal(batch, length, channels).to(dtype)
    args = [a.to(dtype).requires_grad_() for a in args]
    y = function(*args)
    return y.detach(), torch.autograd.grad((y * weight).sum(), args, materialize_grads=True)


def assert_same(got, expected, tolerance):
    names = ("y", "x", "dt", "A", "B", "C", "D")
    for name, a, b in zip(names, (got[0], *got[1]), (expected[0], *expected[1]), strict=True):
        assert a.shape == b.shape, name
        assert (a - b).abs().max() <= tolerance * b.abs().max(), name


@pytest.fixture
def selective_scan_ref(monkeypatch):
    """mamba-ssm's reference; its module imports compiled extensions by name, so empty ones stand in."""
    for name in ("selective_scan_cuda", "causal_conv1d_cuda"):
        if name not in sys.modules:
            monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    interface = pytest.importorskip("mamba_ssm.ops.selective_scan_interface", exc_type=ImportError)
    monkeypatch.setattr(backends, "_import", lambda path: (interface.selective_scan_ref, ""))
    return interface.selective_scan_ref


@pytest.mark.parametrize("shape", SHAPES)
def test_kernel_agrees_with_mamba_ssm_reference(selective_scan_ref, shape):
    """Both in float32: 5e-6 of the largest value."""

    def theirs(x, dt, A, B, C, D):
        return selective_scan_ref(x.mT, dt.mT, A, B.mT, C.mT, D).mT

    assert_same(
        gradients(selective_scan, shape, torch.float32), gradients(theirs, shape, torch.float32), tolerance=5e-6
    )


@pytest.mark.parametrize("shape", SHAPES)
def test_adaptor_speaks_mamba_ssm_layout(selective_scan_ref, shape, monkeypatch):
    """selective_scan sent down the GPU path, with mamba-ssm's reference in place of its CUDA kernel."""
    calls = []
    adaptor = module._scan_by_mamba_ssm
    monkeypatch.setattr(module, "_scan_by_mamba_ssm", lambda *args: calls.append(1) or adaptor(*args))
    ours = gradients(selective_scan, shape, torch.float32)
    monkeypatch.setattr(module, "MAMBA_SSM", replace(backends.MAMBA_SSM, device="cpu"))
    monkeypatch.setattr(module, "NUMBA", replace(backends.NUMBA, device="none"))
    assert_same(gradients(selective_scan, shape, torch.float32), ours, tolerance=5e-6)
    assert calls == [1]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_adaptor_keeps_half_precision_and_float32_parameters(selective_scan_ref, dtype):
    x, dt, B, C = (torch.rand(2, 9, n, dtype=dtype) for n in (6, 6, 3, 3))
    A, D = -torch.rand(6, 3), torch.rand(6)
    y = module._scan_by_mamba_ssm(x, dt.float(), A, B, C, D)
    assert y.dtype == dtype
    exact = module.selective_scan_reference(*(a.double() for a in (x, dt, A, B, C, D)))
    assert (y - exact).abs().max() < 0.02 * exact.abs().max()


@pytest.mark.parametrize("shape", SHAPES)
def test_kernel_agrees_with_mambapy_parallel_scan(shape):
    """Both in float32: 1e-5 of the largest value (their scan multiplies decays in a tree)."""
    pscan = pytest.importorskip("mambapy.pscan").pscan

    def theirs(x, dt, A, B, C, D):
        decay = torch.exp(dt[..., None] * A)
        h = pscan(decay, (dt * x)[..., None] * B[:, :, None, :])
        return (h @ C[..., None]).squeeze(3) + D * x

    assert_same(
        gradients(selective_scan, shape, torch.float32), gradients(theirs, shape, torch.float32), tolerance=1e-5
    )
