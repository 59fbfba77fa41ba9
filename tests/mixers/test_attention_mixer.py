"""Attention on weights of any size: its pattern, edits of it, its weights by TransformerLens's names."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import circuitscope as cs
from circuitscope.mixers.attention import Attention, AttentionConfig

POSITIONS = ["none", "learned", "sinusoidal", "rope", "alibi"]


def mixer(n_heads: int = 2, positions: str = "none", d_model: int = 32, dtype=torch.float32, std: float = 0.3):
    """An attention mixer with weights large enough for patterns far from uniform."""
    built = Attention(AttentionConfig(n_heads=n_heads), d_model, positions).to(dtype)
    g = torch.Generator().manual_seed(n_heads)
    with torch.no_grad():
        for p in built.parameters():
            p.copy_(std * torch.randn(p.shape, generator=g))
    return built.eval()


def stream(length: int, d_model: int = 32, batch: int = 2, dtype=torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(batch, length, d_model, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def run(built: Attention, x: torch.Tensor, **edits):
    """Output and z, with functions applied at named hooks on the way."""
    seen = {}
    handles = [built.hook_z.register_forward_hook(lambda m, a, out: seen.update(z=out))]
    for name, edit in edits.items():
        handles.append(getattr(built, name).register_forward_hook(lambda m, a, out, edit=edit: edit(out)))
    try:
        out = built(x)
    finally:
        for handle in handles:
            handle.remove()
    return out, seen["z"]


def pattern(built: Attention, x: torch.Tensor) -> torch.Tensor:
    """Φ as the hook sees it."""
    seen = []
    run(built, x, hook_phi=seen.append)
    return seen[0]


def identity(value: torch.Tensor) -> torch.Tensor:
    return value


@given(
    length=st.integers(1, 40),
    n_heads=st.sampled_from([1, 2, 4]),
    positions=st.sampled_from(POSITIONS),
    std=st.sampled_from([0.02, 0.3, 1.0]),
    seed=st.integers(0, 1000),
)
def test_both_paths_agree_on_any_weights_and_phi_times_v_is_z(length, n_heads, positions, std, seed):
    built, x = mixer(n_heads, positions, std=std), stream(length, seed=seed)
    seen = {}
    fused_z = run(built, x)[1]
    z = run(built, x, hook_phi=lambda p: seen.update(phi=p), hook_v=lambda v: seen.update(v=v))[1]
    assert (z - fused_z).abs().max() <= 1e-5 * fused_z.abs().max()
    assert torch.equal(z, torch.einsum("bhij,bjhd->bihd", seen["phi"], seen["v"]))


@given(length=st.integers(1, 30), n_heads=st.sampled_from([1, 2, 4]), positions=st.sampled_from(POSITIONS))
def test_phi_is_lower_triangular_with_rows_that_sum_to_one(length, n_heads, positions):
    phi = pattern(mixer(n_heads, positions), stream(length))
    assert phi.shape == (2, n_heads, length, length)
    assert (phi.triu(1) == 0).all()
    assert (phi >= 0).all()
    torch.testing.assert_close(phi.sum(-1), torch.ones(2, n_heads, length))


@pytest.mark.parametrize("positions", POSITIONS)
def test_pattern_and_phi_are_the_softmax_of_the_scores_and_what_the_package_calls_phi(positions):
    model = cs.model(d_model=16, n_heads=2, positions=positions, vocab_size=9, max_length=9)
    tokens = torch.randint(9, (2, 9), generator=torch.Generator().manual_seed(0))
    _, cache = model.run_with_cache(tokens)
    assert torch.equal(cache["pattern", 1], cache["attn_scores", 1].softmax(-1))
    assert torch.equal(cache["blocks.1.mixer.hook_phi"], cache["pattern", 1])
    torch.testing.assert_close(cs.phi(model, tokens, layer=1), cache["pattern", 1])


@given(
    row=st.integers(0, 1), head=st.integers(0, 1), dest=st.integers(0, 11), src=st.integers(0, 11), by=st.floats(0.5, 2)
)
def test_editing_one_entry_of_phi_moves_one_row_of_z_by_the_value_at_its_source(row, head, dest, src, by):
    built, x = mixer(2, "rope"), stream(12)
    seen = {}

    def edit(phi):
        phi = phi.clone()
        phi[row, head, dest, src] += by
        return phi

    before_out, before = run(built, x, hook_phi=identity, hook_v=lambda v: seen.update(v=v))
    after_out, after = run(built, x, hook_phi=edit)
    touched = torch.zeros(before.shape[:3], dtype=torch.bool)
    touched[row, dest, head] = True
    assert torch.equal(after[~touched], before[~touched])
    torch.testing.assert_close((after - before)[row, dest, head], by * seen["v"][row, src, head], rtol=1e-3, atol=1e-4)
    others = torch.ones(before_out.shape[:2], dtype=torch.bool)
    others[row, dest] = False
    assert torch.equal(after_out[others], before_out[others])
    assert not torch.equal(after_out[row, dest], before_out[row, dest])


def test_edits_at_the_pattern_reach_phi_and_edits_at_the_scores_reach_both():
    built, x = mixer(1), stream(6)
    seen = {}
    run(built, x, hook_pattern=lambda p: 0.5 * p, hook_phi=lambda p: seen.update(phi=p))
    torch.testing.assert_close(seen["phi"].sum(-1), torch.full((2, 1, 6), 0.5))
    run(built, x, hook_attn_scores=torch.zeros_like, hook_phi=lambda p: seen.update(phi=p))
    torch.testing.assert_close(seen["phi"], torch.full((2, 1, 6, 6), 1 / 6))


def test_the_fused_path_never_builds_phi():
    built, x = mixer(), stream(6)
    fired = []
    names = ("hook_attn_scores", "hook_pattern", "hook_phi")
    originals = {n: getattr(built, n).forward for n in names}
    for n in names:
        getattr(built, n).forward = lambda v, n=n: (fired.append(n), originals[n](v))[1]
    built(x)
    assert fired == []
    run(built, x, hook_phi=identity)
    assert fired == list(names)


@pytest.mark.parametrize("n_heads", [1, 2, 4])
def test_weight_views_by_transformer_lens_names_rebuild_the_projections(n_heads):
    built, x = mixer(n_heads), stream(7)
    seen = {}
    out, z = run(built, x, **{f"hook_{n}": (lambda v, n=n: seen.update({n: v})) for n in "qkv"})
    for name, weight, bias in zip("qkv", (built.W_Q, built.W_K, built.W_V), built.qkv.bias.chunk(3), strict=True):
        expected = torch.einsum("bpm,hmd->bphd", x, weight) + bias.reshape(n_heads, -1)
        torch.testing.assert_close(seen[name], expected, rtol=1e-4, atol=1e-4)
    rebuilt = torch.einsum("bphd,hdm->bpm", z, built.W_O) + built.out.bias
    torch.testing.assert_close(out, rebuilt, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("d_model", "n_heads", "nearest"), [(64, 3, "2"), (64, 100, "64"), (30, 4, "3")])
def test_heads_that_do_not_divide_the_width_are_refused_with_the_nearest_that_does(d_model, n_heads, nearest):
    with pytest.raises(cs.UserError, match=rf"{d_model}.*got {n_heads}; nearest: {nearest}"):
        cs.model(d_model=d_model, n_heads=n_heads, vocab_size=8)


def test_rope_refuses_an_odd_head_size():
    with pytest.raises(cs.UserError, match=r"even head size.*5"):
        cs.model(d_model=10, n_heads=2, positions="rope", vocab_size=8)


def test_qkv_bias_can_be_left_out():
    assert Attention(AttentionConfig(qkv_bias=False), 8, "none").qkv.bias is None
    assert cs.model(d_model=8, qkv_bias=False, vocab_size=8).blocks[1].mixer.qkv.bias is None
