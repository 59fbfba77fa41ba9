"""Attention with a short conv before the projections of Q, K, V: what it moves."""

import contract
import pytest
import torch
import torch.nn.functional as F

import circuitscope as cs
from circuitscope.mixers.attention import Attention, AttentionConfig
from circuitscope.mixers.positions import rotate

SUBSETS = ["q", "k", "v", "qk", "qv", "kv", "qkv"]
D_MODEL = 16


def mixer(conv_on: str = "", dtype=torch.float32, positions: str = "none", by: float = 0.2, **options) -> Attention:
    torch.manual_seed(0)
    built = Attention(AttentionConfig(n_heads=2, conv_on=conv_on, **options), D_MODEL, positions)
    return contract.shaken(built, by).to(dtype)


def hooks_of(built: Attention, x: torch.Tensor) -> dict[str, torch.Tensor]:
    return {name: contract.seen_at(built, x, f"hook_{name}") for name in "qkv"}


def set_to_shift(conv: torch.nn.Conv1d) -> None:
    with torch.no_grad():
        conv.weight.zero_()
        conv.weight[:, 0, -2] = 1
        conv.bias.zero_()


@pytest.mark.parametrize("conv_on", SUBSETS)
@pytest.mark.parametrize("activation", [False, True])
def test_every_subset_keeps_the_contract(conv_on, activation):
    built, x = mixer(conv_on, torch.float64, conv_activation=activation), contract.stream(9, D_MODEL, 3, torch.float64)
    contract.check_protocol(built, x)
    contract.check_phi_identity(built, x)
    contract.check_factors(built, x)
    contract.check_factors_as_hooked(built, x)
    contract.check_edit_one_entry(built, x)
    assert built.state_size is None


def test_the_bias_of_the_conv_on_k_moves_nothing_as_softmax_does_not_see_it():
    built, x = mixer("k", torch.float64), contract.stream(9, D_MODEL, 3, torch.float64)
    before = built(x)
    with torch.no_grad():
        built.conv_k.bias += 1
    contract.assert_close(built(x), before)


def test_the_gradient_reaches_the_values_conv_through_its_matrix():
    built, x = mixer("v", torch.float64), contract.stream(9, D_MODEL, 2, torch.float64)
    fused, through = (
        torch.autograd.grad(contract.run(built, x, **edits)[0].pow(2).sum(), built.conv_v.weight)[0]
        for edits in ({}, {"hook_phi_conv": contract.identity})
    )
    assert fused.abs().max() > 0
    contract.assert_close(through, fused)


# -- no conv: nothing changed -------------------------------------------------------------------------


@pytest.mark.parametrize("positions", ["none", "rope", "alibi"])
def test_without_a_conv_it_is_plain_attention_bit_for_bit(positions):
    built, x = mixer(positions=positions), contract.stream(17, D_MODEL)
    q, k, v = built.qkv(x).unflatten(-1, (3, 2, D_MODEL // 2)).unbind(2)
    if positions == "rope":
        q, k = rotate(q), rotate(k)
    mask = None
    if positions == "alibi":
        mask = built._bias(x).masked_fill(torch.ones(17, 17, dtype=torch.bool).triu(1), float("-inf"))[None]
    q, k, v = (u.transpose(1, 2) for u in (q, k, v))
    z = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
    assert torch.equal(built(x), built.out(z.transpose(1, 2).flatten(2)))


def test_without_a_conv_the_parameters_are_those_of_plain_attention():
    names = {"qkv.weight", "qkv.bias", "out.weight", "out.bias"}
    assert set(mixer().state_dict()) == names
    assert set(mixer("qk").state_dict()) == names | {f"conv_{n}.{p}" for n in "qk" for p in ("weight", "bias")}
    torch.manual_seed(0)
    plain = Attention(AttentionConfig(), D_MODEL, "none")
    torch.manual_seed(0)
    convolved = Attention(AttentionConfig(conv_on="qkv"), D_MODEL, "none")
    for name, weight in plain.state_dict().items():
        assert torch.equal(weight, convolved.state_dict()[name])


@pytest.mark.parametrize("conv_on", SUBSETS)
def test_a_conv_that_passes_the_current_token_on_is_plain_attention(conv_on):
    built, x = mixer(conv_on, torch.float64), contract.stream(17, D_MODEL, dtype=torch.float64)
    with torch.no_grad():
        for name in conv_on:
            conv = getattr(built, f"conv_{name}")
            conv.weight.zero_()
            conv.weight[:, 0, -1] = 1
            conv.bias.zero_()
    plain = mixer("", torch.float64)
    plain.load_state_dict({k: v for k, v in built.state_dict().items() if "conv" not in k})
    contract.assert_close(built(x), plain(x))


# -- which of Q, K, V a conv moves --------------------------------------------------------------------


@pytest.mark.parametrize("conv_on", SUBSETS)
@pytest.mark.parametrize("bias", [True, False])
def test_a_conv_changes_those_it_is_on_and_no_others(conv_on, bias):
    built, x = mixer(conv_on, torch.float64, qkv_bias=bias), contract.stream(17, D_MODEL, dtype=torch.float64)
    plain = mixer("", torch.float64, qkv_bias=bias)
    plain.load_state_dict({k: v for k, v in built.state_dict().items() if "conv" not in k})
    before, after = hooks_of(plain, x), hooks_of(built, x)
    for name in "qkv":
        moved = float((after[name] - before[name]).abs().max())
        assert (moved > 0.01) if name in conv_on else (moved < 1e-14), name


@pytest.mark.parametrize("conv_on", SUBSETS)
def test_a_conv_that_shifts_by_one_gives_the_projection_of_the_token_before(conv_on):
    built, x = mixer(conv_on, torch.float64), contract.stream(17, D_MODEL, dtype=torch.float64)
    for name in conv_on:
        set_to_shift(getattr(built, f"conv_{name}"))
    plain = mixer("", torch.float64)
    plain.load_state_dict({k: v for k, v in built.state_dict().items() if "conv" not in k})
    here, shifted = hooks_of(plain, x), hooks_of(built, x)
    for name in conv_on:
        contract.assert_close(shifted[name][:, 1:], here[name][:, :-1], 1e-14)


def test_each_conv_has_its_own_hook_and_weights():
    built, x = mixer("qkv", torch.float64, conv_activation=True), contract.stream(9, D_MODEL, dtype=torch.float64)
    for name, hook in zip("qkv", ("hook_conv_q", "hook_conv_k", "hook_conv"), strict=True):
        conv = getattr(built, f"conv_{name}")
        want = F.conv1d(F.pad(x.mT, (3, 0)), conv.weight, conv.bias, groups=D_MODEL).mT
        contract.assert_close(contract.seen_at(built, x, hook), want)
        weight = built.qkv.weight.chunk(3)["qkv".index(name)]
        bias = built.qkv.bias.chunk(3)["qkv".index(name)]
        got = contract.seen_at(built, x, f"hook_{name}").flatten(2)
        contract.assert_close(got, F.linear(F.silu(want), weight, bias))


def test_hooks_of_absent_convs_are_absent():
    assert not hasattr(mixer("qk"), "hook_conv")
    assert not hasattr(mixer("qk"), "hook_phi_conv")
    assert not hasattr(mixer("v"), "hook_conv_k")
    for convs, hooks in {"qk": ["hook_phi_conv_q", "hook_phi_conv_k"], "v": ["hook_phi_conv"], "": []}.items():
        assert [n for n, point in contract.hook_points(mixer(convs)).items() if point.on_demand] == hooks


def test_an_edit_at_the_conv_of_the_keys_reaches_the_keys():
    built, x = mixer("k", torch.float64), contract.stream(9, D_MODEL, dtype=torch.float64)
    out, _ = contract.run(built, x, hook_conv_k=lambda u: 0 * u)
    expected, _ = contract.run(built, x, hook_k=lambda k: built.qkv.bias.chunk(3)[1].view(1, 1, 2, -1).expand_as(k))
    contract.assert_close(out, expected)


# -- the whole model ----------------------------------------------------------------------------------


def model(**options) -> tuple[cs.HookedLM, torch.Tensor]:
    built = cs.model("attention", d_model=D_MODEL, vocab_size=9, max_length=9, n_layers=1, **options)
    return built, torch.randint(9, (2, 9), generator=torch.Generator().manual_seed(0))


def test_a_composed_matrix_is_refused_where_the_values_are_convolved_and_given_where_not():
    built, tokens = model(conv_on="qkv")
    with pytest.raises(cs.UserError, match="only per pair of channels"):
        cs.phi(built, tokens, 0, factors="composed")
    assert cs.phi(built, tokens, 0).shape == (2, 1, 9, 9)
    conv = cs.phi(built, tokens, 0, factors="conv")
    assert conv.shape == (2, D_MODEL, 9, 9)
    _, cache = built.run_with_cache(tokens, names_filter="blocks.0.mixer.hook_phi_conv")
    torch.testing.assert_close(conv, cache["blocks.0.mixer.hook_phi_conv"])
    built, tokens = model(conv_on="qk")
    torch.testing.assert_close(cs.phi(built, tokens, 0, factors="composed"), cs.phi(built, tokens, 0))


def test_the_large_matrix_of_the_conv_is_cached_only_when_named():
    built, tokens = model(conv_on="v")
    assert "blocks.0.mixer.hook_phi_conv" not in built.run_with_cache(tokens)[1]
    assert "blocks.0.mixer.hook_conv" in built.run_with_cache(tokens)[1]


def test_it_is_still_blind_to_order():
    assert model(conv_on="k")[0].config.positions == "learned"


@pytest.mark.parametrize("wrong", ["x", "kk", "kq", "QK", "none"])
def test_another_choice_of_convs_is_refused(wrong):
    with pytest.raises(cs.UserError, match="conv_on"):
        model(conv_on=wrong)


def test_flops_count_two_a_tap_and_channel():
    assert mixer("qkv").mixing_flops(8) - mixer().mixing_flops(8) == 3 * 2 * 4 * D_MODEL
    assert mixer("k", conv_width=3).mixing_flops(8) - mixer().mixing_flops(8) == 2 * 3 * D_MODEL
