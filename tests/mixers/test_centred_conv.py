"""Attention with centred convs, which read later positions: what it computes."""

import contract
import pytest
import torch
from torch import nn

import circuitscope as cs
from circuitscope.config import RunConfig
from circuitscope.kernels.short_conv import short_conv, short_conv_phi
from circuitscope.mixers.attention import Attention, AttentionConfig

D_MODEL, LENGTH = 16, 12


def mixer(conv_on: str = "v", **options) -> Attention:
    torch.manual_seed(0)
    config = AttentionConfig(n_heads=2, conv_on=conv_on, conv_mode="centred", **options)
    return contract.shaken(Attention(config, D_MODEL, "rope"), 0.3).double()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("width", [1, 2, 3, 4, 5, 20])
def test_the_conv_is_torchs_with_padding_same_and_its_matrix_gives_it(width, dtype):
    conv = nn.Conv1d(D_MODEL, D_MODEL, width, groups=D_MODEL, padding="same").to(dtype)
    x = contract.stream(LENGTH, D_MODEL, dtype=dtype)
    ours = short_conv(x, conv.weight[:, 0], conv.bias, ahead=width // 2)
    contract.assert_close(ours, conv(x.mT).mT, 1e-5)
    matrix = short_conv_phi(conv.weight[:, 0], LENGTH, ahead=width // 2)
    contract.assert_close(torch.einsum("cij,bjc->bic", matrix, x) + conv.bias, ours)


@pytest.mark.parametrize("conv_on", ["q", "k", "v", "qkv"])
@pytest.mark.parametrize("width", [3, 4])
def test_a_position_reads_half_the_width_ahead_and_no_further(conv_on, width):
    built, x = mixer(conv_on, conv_width=width), contract.stream(LENGTH, D_MODEL, dtype=torch.float64)
    at, ahead = 5, width // 2
    assert built.config.sees_ahead == ahead
    (gradient,) = torch.autograd.grad(built(x.requires_grad_())[:, at].square().sum(), x)
    reached = gradient.abs().amax(dim=(0, 2)) > 0
    assert reached[: at + ahead + 1].all()
    assert not reached[at + ahead + 1 :].any()


def test_the_pattern_stays_causal_and_the_conv_of_the_values_is_not():
    built, x = mixer("qkv"), contract.stream(LENGTH, D_MODEL, dtype=torch.float64)
    causal = {name: product.causal for name, product in built.reading(x).products().items()}
    assert causal == {"pattern": True, "conv": False, "conv_q": False, "conv_k": False, "matched": False}
    ahead = contract.seen_at(built, x, "hook_phi_conv").triu(1)
    assert (ahead.diagonal(1, -2, -1) != 0).all()
    assert (ahead.triu(3) == 0).all()


def test_a_centred_start_has_the_weights_of_a_causal_one():
    causal, centred = (
        cs.model("attention_conv_v", d_model=8, vocab_size=9, max_length=8, conv_mode=mode)
        for mode in ("causal", "centred")
    )
    assert all(torch.equal(a, b) for a, b in zip(causal.parameters(), centred.parameters(), strict=True))


def test_a_causal_conv_keeps_the_digest_of_its_run():
    plain, causal, centred = (
        RunConfig.build("attention_conv_v", **options)
        for options in ({}, {"conv_mode": "causal"}, {"conv_mode": "centred"})
    )
    assert plain.digest == causal.digest != centred.digest


def test_generation_and_next_tokens_are_refused_in_one_sentence():
    config = RunConfig.build("attention_conv_k", conv_mode="centred", n_layers=2).model
    assert config.sees_ahead == 4  # two positions in each of two layers
    with pytest.raises(cs.UserError) as refused:
        config.check_causal("generation")
    assert str(refused.value) == (
        "generation needs a causal model, and layer 0 (attention, centred conv) reads 2 positions ahead; expected"
        " conv_mode: causal"
    )
    with pytest.raises(cs.UserError, match=r"^induction, whose labels are the next tokens, needs a causal model"):
        RunConfig.build("attention_conv_k", "induction", conv_mode="centred")
    RunConfig.build("attention_conv_k", "induction")
    RunConfig.build("attention").model.check_causal("generation")


def test_a_mode_without_a_conv_is_refused():
    with pytest.raises(cs.UserError, match=r"^mixer.conv_mode: centred needs a conv, and conv_on is empty"):
        RunConfig.build("attention", conv_mode="centred")
