"""The flash-attn seam, with a stand-in that keeps the documented contract of flash_attn_func.

The package itself builds only with CUDA, so its kernel runs in the test marked gpu alone.
"""

import inspect
from dataclasses import replace

import pytest
import torch

from circuitscope.kernels import attention, backends


def stand_in(q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, deterministic=False):
    """flash_attn_func on [batch, pos, head, d_head]: softmax(QKᵀ · scale) V, scale 1/√d by default."""
    assert q.shape == k.shape == v.shape
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    scores = torch.einsum("bihd,bjhd->bhij", q, k) * scale
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), float("-inf"))
    return torch.einsum("bhij,bjhd->bihd", scores.softmax(-1), v)


@pytest.fixture
def heads():
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(2, 13, 3, 8, generator=generator, dtype=torch.float64, requires_grad=True) for _ in range(3)]


def test_the_adaptor_calls_flash_attn_with_its_own_layout_and_gets_the_same_answer(monkeypatch, heads):
    plain = attention.fused_attention(*heads)
    gradients = torch.autograd.grad(plain.square().sum(), heads)
    calls = []
    here = replace(backends.FLASH_ATTN, device="cpu", dtypes=(torch.float64,), limits=lambda device, **sizes: "")
    monkeypatch.setattr(attention, "FLASH_ATTN", here)
    monkeypatch.setattr(backends, "_import", lambda path: (lambda *a, **k: calls.append(1) or stand_in(*a, **k), ""))
    flash = attention.fused_attention(*heads)
    assert calls == [1]
    torch.testing.assert_close(flash, plain, rtol=0, atol=1e-12)
    torch.testing.assert_close(torch.autograd.grad(flash.square().sum(), heads), gradients, rtol=0, atol=1e-11)


@pytest.mark.gpu
def test_flash_attn_on_a_gpu_agrees_with_torch(heads):
    flash_attn = pytest.importorskip("flash_attn")
    assert "causal" in inspect.signature(flash_attn.flash_attn_func).parameters
    half = [h.detach().to("cuda", torch.bfloat16) for h in heads]
    plain = attention.fused_attention(*[h.detach().float() for h in heads])
    torch.testing.assert_close(attention.fused_attention(*half).float().cpu(), plain, rtol=0.02, atol=0.02)
