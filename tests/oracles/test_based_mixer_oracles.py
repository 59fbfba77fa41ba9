"""flash-linear-attention's naive Based as the reference for the Based mixer, projections and heads included.

fla adds 1e-6 to a row's sum, so the mixer is built with that eps.
"""

import warnings

import pytest
import torch

from circuitscope.mixers.based import Based, BasedConfig

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # "Triton is not supported": its naive functions need none
    naive = pytest.importorskip("fla.ops.based.naive")

D_MODEL = 24


def fla_output(mixer: Based, x: torch.Tensor, form, **options) -> torch.Tensor:
    """The mixer's weights, cut into q, k and v and laid out as [batch, head, pos, d], through fla's function."""
    heads, d = mixer.n_heads, mixer.config.feature_dim
    w_q, w_k, w_v = mixer.qkv.weight.split([heads * d, heads * d, heads * mixer.d_head])
    q, k, v = (torch.einsum("bpm,hdm->bhpd", x, w.unflatten(0, (heads, -1))) for w in (w_q, w_k, w_v))
    z = form(q, k, v, **options)
    return z.transpose(1, 2).flatten(2) @ mixer.out.weight.T


def build(n_heads: int, feature_dim: int, dtype: torch.dtype) -> Based:
    torch.manual_seed(0)
    return Based(BasedConfig(n_heads=n_heads, feature_dim=feature_dim, eps=1e-6), D_MODEL, "none").to(dtype)


@pytest.mark.parametrize(("n_heads", "feature_dim"), [(1, 16), (2, 8), (3, 5)])
@pytest.mark.parametrize(("batch", "length"), [(1, 1), (3, 2), (2, 33), (1, 256)])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-10)])
def test_same_output_as_fla_parallel(n_heads, feature_dim, batch, length, dtype, tolerance):
    """Within 1e-5 of the largest entry in float32, 1e-10 in float64."""
    mixer, x = build(n_heads, feature_dim, dtype), torch.randn(batch, length, D_MODEL, dtype=dtype)
    theirs = fla_output(mixer, x, naive.naive_parallel_based)
    assert (mixer(x) - theirs).abs().max() <= tolerance * theirs.abs().max()


def test_same_output_as_fla_in_chunks():
    """The recurrent form; float64, within 1e-10 of the largest entry."""
    mixer, x = build(2, 8, torch.float64), torch.randn(2, 64, D_MODEL, dtype=torch.float64)
    theirs = fla_output(mixer, x, naive.naive_chunk_based, chunk_size=16)
    assert (mixer(x) - theirs).abs().max() <= 1e-10 * theirs.abs().max()


def test_same_gradients_as_fla():
    """Of the weights and of the input; float64, within 1e-9 of the largest entry."""
    mixer = build(2, 8, torch.float64)
    x = torch.randn(2, 33, D_MODEL, dtype=torch.float64, requires_grad=True)
    towards = torch.randn(2, 33, D_MODEL, dtype=torch.float64)
    leaves = [mixer.qkv.weight, mixer.out.weight, x]
    ours = torch.autograd.grad((mixer(x) * towards).sum(), leaves)
    theirs = torch.autograd.grad((fla_output(mixer, x, naive.naive_parallel_based) * towards).sum(), leaves)
    for got, want in zip(ours, theirs, strict=True):
        assert (got - want).abs().max() <= 1e-9 * want.abs().max()
