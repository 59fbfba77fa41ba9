"""Positional encodings: their defining properties, and transformers as the oracle."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from circuitscope.kernels.attention import causal_scores
from circuitscope.mixers.positions import alibi, rotate, sinusoidal


def constant_over_positions(length: int, n_heads: int = 2, d_head: int = 8, seed: int = 0) -> torch.Tensor:
    vector = torch.randn(1, 1, n_heads, d_head, generator=torch.Generator().manual_seed(seed))
    return vector.expand(1, length, n_heads, d_head)


def test_rope_scores_of_equal_tokens_depend_on_the_distance_alone():
    q, k = (rotate(constant_over_positions(40, seed=s)) for s in (0, 1))
    scores = causal_scores(q, k)[0]
    for distance in (0, 1, 5, 20):
        along = scores.diagonal(-distance, dim1=1, dim2=2)
        torch.testing.assert_close(along, along[:, :1].expand_as(along), rtol=1e-4, atol=1e-4)
    assert (scores.diagonal(-1, dim1=1, dim2=2)[:, 0] - scores.diagonal(-5, dim1=1, dim2=2)[:, 0]).abs().min() > 1e-2


@given(shift=st.integers(1, 30), seed=st.integers(0, 99))
def test_shifting_a_sequence_leaves_the_rope_pattern_unchanged(shift, seed):
    g = torch.Generator().manual_seed(seed)
    q, k = (torch.randn(1, 9, 2, 8, generator=g) for _ in range(2))
    pad = torch.zeros(1, shift, 2, 8)
    here = causal_scores(rotate(q), rotate(k))
    moved = causal_scores(rotate(torch.cat([pad, q], 1)), rotate(torch.cat([pad, k], 1)))[..., shift:, shift:]
    torch.testing.assert_close(moved.softmax(-1), here.softmax(-1), rtol=1e-4, atol=1e-5)


def test_rope_turns_without_stretching_and_leaves_the_first_position_alone():
    x = torch.randn(2, 12, 3, 10, generator=torch.Generator().manual_seed(0))
    turned = rotate(x)
    torch.testing.assert_close(turned.norm(dim=-1), x.norm(dim=-1))
    assert torch.equal(turned[:, 0], x[:, 0])
    assert (turned[:, 1:] != x[:, 1:]).any()


def test_rope_is_that_of_llama():
    llama = pytest.importorskip("transformers.models.llama.modeling_llama")
    from transformers import LlamaConfig

    config = LlamaConfig(hidden_size=24, num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=64)
    x = torch.randn(2, 20, 2, 12, generator=torch.Generator().manual_seed(0))
    cos, sin = llama.LlamaRotaryEmbedding(config)(x, torch.arange(20)[None])
    theirs, _ = llama.apply_rotary_pos_emb(x.transpose(1, 2), x.transpose(1, 2), cos, sin)
    torch.testing.assert_close(rotate(x), theirs.transpose(1, 2), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("n_heads", [1, 2, 4, 8])
def test_alibi_slopes_fall_geometrically_to_2_to_the_minus_8(n_heads):
    bias = alibi(n_heads, 6, torch.device("cpu"))
    slopes = -bias[:, 1, 0]
    assert slopes[-1] == 2.0**-8
    torch.testing.assert_close(slopes[1:] / slopes[:-1], torch.full((n_heads - 1,), 2.0 ** (-8 / n_heads)))
    for dest in range(6):
        for src in range(dest + 1):
            torch.testing.assert_close(bias[:, dest, src], -slopes * (dest - src))


@pytest.mark.parametrize("n_heads", [1, 2, 4, 8])
def test_alibi_gives_the_pattern_of_bloom(n_heads):
    bloom = pytest.importorskip("transformers.models.bloom.modeling_bloom")
    theirs = bloom.build_alibi_tensor(torch.ones(1, 10, dtype=torch.long), n_heads, torch.float32)
    g = torch.Generator().manual_seed(0)
    q, k = (torch.randn(1, 10, n_heads, 4, generator=g) for _ in range(2))
    ours = causal_scores(q, k, alibi(n_heads, 10, q.device)).softmax(-1)
    expected = causal_scores(q, k, theirs.reshape(n_heads, 1, 10).expand(n_heads, 10, 10)).softmax(-1)
    torch.testing.assert_close(ours, expected)


@pytest.mark.parametrize("d_model", [1, 2, 7, 64])
def test_sinusoids_are_those_of_the_formula(d_model):
    table = sinusoidal(50, d_model)
    for t in (0, 1, 13, 49):
        for i in range(d_model):
            angle = t / 10000 ** ((i - i % 2) / d_model)
            assert table[t, i].item() == pytest.approx(math.cos(angle) if i % 2 else math.sin(angle), abs=1e-5)
