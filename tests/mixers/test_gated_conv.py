"""The gated short conv: Φ is its conv, the gate multiplies after."""

import contract
import pytest
import torch
import torch.nn.functional as F

import circuitscope as cs
from circuitscope.mixers.gated_conv import GatedConv, GatedConvConfig

D_MODEL = 16


def mixer(dtype=torch.float32, **options) -> GatedConv:
    torch.manual_seed(0)
    return contract.shaken(GatedConv(GatedConvConfig(**options), D_MODEL, "none")).to(dtype)


@pytest.mark.parametrize("width", [1, 3, 20])
def test_the_factors_compose(width):
    built, x = mixer(torch.float64, conv_width=width), contract.stream(9, D_MODEL, 3, torch.float64)
    contract.check_phi_identity(built, x)
    contract.check_composed(built, x, contract.seen_at(built, x, "hook_v")[..., 0])


def test_the_output_is_the_projected_gate_times_conv_of_the_values():
    built, x = mixer(torch.float64), contract.stream(17, D_MODEL, dtype=torch.float64)
    gate, v = built.in_proj(x).chunk(2, -1)
    convolved = F.conv1d(F.pad(v.mT, (2, 0)), built.conv.weight, groups=D_MODEL).mT
    contract.assert_close(built(x), built.out(gate * convolved))
    assert torch.equal(contract.seen_at(built, x, "hook_gate"), gate)


def test_the_composed_matrix_is_all_the_mixing_there_is():
    built, x = mixer(torch.float64), contract.stream(17, D_MODEL, dtype=torch.float64)
    composed = contract.whole(built.reading(x).product("composed"), len(x))
    v = built.in_proj(x).chunk(2, -1)[1]
    contract.assert_close(built.out(torch.einsum("bcij,bjc->bic", composed, v)), built(x))


def test_a_closed_gate_leaves_only_the_bias_of_the_output():
    built, x = mixer(), contract.stream(9, D_MODEL)
    out, _ = contract.run(built, x, hook_gate=torch.zeros_like)
    assert torch.equal(out, built.out.bias.expand_as(out))


def test_phi_depends_on_the_distance_alone_and_reaches_back_the_width():
    phi = contract.seen_at(mixer(), contract.stream(9, D_MODEL), "hook_phi")
    assert (phi.tril(-3) == 0).all()
    for lag in range(3):
        band = phi.diagonal(-lag, -2, -1)
        assert (band == band[:1, :, :1]).all()


def test_state_size_is_the_positions_the_conv_still_needs():
    assert mixer().state_size == D_MODEL * 2
    assert mixer(conv_width=4).state_size == D_MODEL * 3
    assert mixer().mixing_flops(8) == mixer().mixing_flops(64) == D_MODEL * (2 * 3 + 1)


def test_in_a_model_its_phi_is_on_demand_and_alternates_with_based():
    model = cs.HookedLM(
        cs.models.ModelConfig(mixers=("gated_conv", "based"), d_model=D_MODEL, vocab_size=9, max_length=9)
    )
    tokens = torch.randint(9, (2, 9), generator=torch.Generator().manual_seed(0))
    _, cache = model.run_with_cache(tokens)
    assert "blocks.0.mixer.hook_phi" not in cache
    assert "blocks.1.mixer.hook_phi" in cache
    _, cache = model.run_with_cache(tokens, names_filter=["blocks.0.mixer.hook_phi", "blocks.0.mixer.hook_gate"])
    phi, gate = cache["blocks.0.mixer.hook_phi"], cache["blocks.0.mixer.hook_gate"]
    torch.testing.assert_close(cs.phi(model, tokens, 0), phi)
    torch.testing.assert_close(cs.phi(model, tokens, 0, factors="composed"), gate.mT[..., None] * phi)
