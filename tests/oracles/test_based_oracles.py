"""flash-linear-attention's naive Based as the reference for based_attention.

fla lays tensors out as [batch, head, pos, d], adds 1e-6 to a row's sum where ours takes an eps, and its function
scales by d^−½ by default.
"""

import warnings

import pytest
import torch

from circuitscope.kernels.linear_attention import based_attention, based_phi, taylor_features

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # "Triton is not supported": its naive functions need none
    naive = pytest.importorskip("fla.ops.based.naive")

SHAPES = [(1, 1, 1, 4, 4), (2, 33, 3, 8, 16), (1, 128, 2, 16, 8)]


def tensors(batch, length, heads, d, d_v):
    torch.manual_seed(0)
    shapes = [(batch, length, heads, size) for size in (d, d, d_v)]
    return [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]


def heads_first(*tensors):
    return [a.transpose(1, 2) for a in tensors]


@pytest.mark.parametrize("shape", SHAPES)
def test_same_output_and_gradients_as_fla_parallel(shape):
    """Both in float64: 1e-10 of the largest entry; ours in float32: 1e-5."""
    inputs = tensors(*shape)
    theirs = naive.naive_parallel_based(*heads_first(*inputs)).transpose(1, 2)
    y = based_attention(*inputs, eps=1e-6)
    assert (y - theirs).abs().max() <= 1e-10 * theirs.abs().max()
    in_float32 = based_attention(*[a.float() for a in inputs], eps=1e-6)
    assert (in_float32 - theirs).abs().max() <= 1e-5 * theirs.abs().max()
    by_phi = torch.einsum("bhij,bjhe->bihe", based_phi(*inputs[:2], eps=1e-6), inputs[2])
    assert (by_phi - theirs).abs().max() <= 1e-10 * theirs.abs().max()
    grad = torch.randn_like(y)
    for a, b in zip(torch.autograd.grad(y, inputs, grad), torch.autograd.grad(theirs, inputs, grad), strict=True):
        assert (a - b).abs().max() <= 1e-10 * b.abs().max().clamp(min=1e-3)


def test_same_output_as_fla_in_chunks():
    inputs = tensors(2, 64, 2, 8, 4)
    theirs = naive.naive_chunk_based(*heads_first(*inputs), chunk_size=16).transpose(1, 2)
    assert (based_attention(*inputs, eps=1e-6) - theirs).abs().max() <= 1e-10 * theirs.abs().max()


def test_same_feature_map_as_fla_up_to_order():
    """Inner products within 1e-12: the features themselves may be laid out otherwise."""
    feature_map = pytest.importorskip("fla.modules.feature_map")
    q, k = torch.randn(7, 6, dtype=torch.float64), torch.randn(7, 6, dtype=torch.float64)
    theirs = feature_map.TaylorFeatureMap(head_dim=6)
    expected = theirs(q) @ theirs(k).T
    assert (taylor_features(q) @ taylor_features(k).T - expected).abs().max() <= 1e-12 * expected.abs().max()
