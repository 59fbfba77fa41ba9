"""fused_attention against the plain softmax path, and the plain path against a loop."""

import math

import pytest
import torch

from circuitscope.kernels.attention import causal_scores, fused_attention
from circuitscope.mixers.positions import alibi


def heads(length: int, n_heads: int, dtype: torch.dtype):
    g = torch.Generator().manual_seed(length + 100 * n_heads)
    return [torch.randn(2, length, n_heads, 8, generator=g, dtype=dtype).requires_grad_() for _ in range(3)]


def plain(q, k, v, bias):
    return torch.einsum("bhij,bjhd->bihd", causal_scores(q, k, bias).softmax(-1), v)


@pytest.mark.parametrize("length", [1, 2, 7, 64])
@pytest.mark.parametrize("n_heads", [1, 3])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-10)])
def test_fused_attention_and_its_gradients_are_the_plain_ones(length, n_heads, biased, dtype, tolerance):
    q, k, v = heads(length, n_heads, dtype)
    bias = alibi(n_heads, length, q.device).to(dtype) if biased else None
    fused, reference = fused_attention(q, k, v, bias), plain(q, k, v, bias)
    assert fused.shape == q.shape
    assert (fused - reference).abs().max() <= tolerance * reference.abs().max()
    for mine, theirs in zip(
        torch.autograd.grad(fused.pow(2).sum(), (q, k, v)),
        torch.autograd.grad(reference.pow(2).sum(), (q, k, v)),
        strict=True,
    ):
        assert (mine - theirs).abs().max() <= 10 * tolerance * max(1.0, float(theirs.abs().max()))


def test_the_plain_path_is_the_textbook_loop():
    q, k, v = (t.detach() for t in heads(5, 2, torch.float64))
    out = plain(q, k, v, None)
    for i in range(5):
        for h in range(2):
            scores = torch.stack([q[0, i, h] @ k[0, j, h] / math.sqrt(8) for j in range(i + 1)])
            weights = scores.exp() / scores.exp().sum()
            expected = sum(w * v[0, j, h] for j, w in enumerate(weights))
            torch.testing.assert_close(out[0, i, h], expected)


def test_scores_of_the_future_are_minus_infinity_and_of_the_past_finite():
    q, k, _ = heads(6, 2, torch.float32)
    scores = causal_scores(q, k)
    future = torch.ones(6, 6, dtype=torch.bool).triu(1)
    assert (scores[..., future] == -math.inf).all()
    assert scores[..., ~future].isfinite().all()
