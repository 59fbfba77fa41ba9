"""S4-Mamba keeps the Φ contract: Mamba's block with a Φ that no input changes."""

import pytest
import torch
import torch.nn.functional as F
from contract import (
    briefly_trained,
    check_composed,
    check_conv_hook,
    check_edit_in_place,
    check_edit_one_entry,
    check_factors,
    check_fused_path_builds_nothing,
    check_gradient_through_phi,
    check_lower_triangular,
    check_phi_identity,
    check_protocol,
    check_state_hook,
    exempt_from_decay,
    run,
    seen_at,
    shaken,
    stream,
)

from circuitscope.kernels.long_conv import long_conv_reference
from circuitscope.kernels.s4d import s4d_kernel_reference
from circuitscope.kernels.short_conv import short_conv_reference
from circuitscope.mixers.s4_mamba import S4Mamba, S4MambaConfig

VARIANTS = {"whole": {}, "no_conv": {"conv": False}, "no_gate": {"gate": False, "d_state": 4, "conv_width": 3}}


def build(variant: str = "whole", dtype: torch.dtype = torch.float32) -> S4Mamba:
    torch.manual_seed(0)
    return shaken(S4Mamba(S4MambaConfig(**VARIANTS[variant]), 16, "none").to(dtype))


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_variant_is_a_mixer_that_builds_phi_only_on_demand(variant):
    check_protocol(build(variant), stream(9, 16))
    check_fused_path_builds_nothing(build(variant), stream(9, 16))


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(("length", "batch"), [(1, 1), (1, 3), (2, 1), (2, 3), (17, 1), (17, 3)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_phi_times_v_is_the_fused_convolution(variant, length, batch, dtype):
    mixer, x = build(variant, dtype), stream(length, 16, batch, dtype)
    check_phi_identity(mixer, x)
    check_lower_triangular(mixer, x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_phi_times_v_is_the_fused_convolution_at_length_256(dtype):
    check_phi_identity(build(dtype=dtype), stream(256, 16, 1, dtype))


def test_the_contract_holds_on_trained_weights(monkeypatch):
    model, tokens = briefly_trained(monkeypatch, S4MambaConfig(), S4Mamba)
    for dtype in (torch.float32, torch.float64):
        mixer, x = model.to(dtype).layers[0].mixer, model.mixer_input(tokens, 0).detach()
        check_phi_identity(mixer, x)
        check_edit_one_entry(mixer, x)
        check_conv_hook(mixer, x)
        check_state_hook(mixer, x, reach=3)
        check_factors(mixer, x)


@pytest.mark.parametrize("length", [1, 2, 17])
def test_one_entry_of_phi_moves_one_row_of_one_sequence(length):
    check_edit_one_entry(build(), stream(length, 16, 3))
    check_edit_in_place(build(), stream(length, 16, 3), ("hook_phi", "hook_phi_conv", "hook_state"))


@pytest.mark.parametrize("variant", VARIANTS)
def test_gradients_flow_through_phi(variant):
    check_gradient_through_phi(build(variant, torch.float64), stream(9, 16, 2, torch.float64))


@pytest.mark.parametrize("variant", ["whole", "no_gate"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_matrix_of_the_conv_can_be_edited(variant, dtype):
    check_conv_hook(build(variant, dtype), stream(17, 16, 3, dtype))


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_state_written_at_t_speaks_for_the_past(variant, dtype):
    config = S4MambaConfig(**VARIANTS[variant])
    check_state_hook(build(variant, dtype), stream(17, 16, 3, dtype), config.conv_width - 1 if config.conv else 0)


def test_the_block_written_out():
    """W_o(S4D(SiLU(conv(u))) ⊙ SiLU(gate)) from references alone."""
    mixer, x = build(dtype=torch.float64), stream(6, 16, 2, torch.float64)
    u, gate = mixer.in_proj(x).chunk(2, -1)
    v = F.silu(short_conv_reference(u, mixer.conv.weight[:, 0], mixer.conv.bias))
    z = long_conv_reference(v, s4d_kernel_reference(mixer.ssm.params, 6), mixer.ssm.D)
    out, seen = run(mixer, x)
    torch.testing.assert_close(seen["v"][..., 0], v, rtol=0, atol=1e-13)
    torch.testing.assert_close(seen["z"][..., 0], z, rtol=0, atol=1e-13)
    torch.testing.assert_close(out, (z * F.silu(gate)) @ mixer.out.weight.T, rtol=0, atol=1e-13)


def test_states_are_those_of_the_complex_recurrence():
    mixer, x = build(dtype=torch.float64), stream(4, 16, 2, torch.float64)
    v, ssm = seen_at(mixer, x, "hook_v")[..., 0], mixer.ssm
    A = torch.complex(-ssm.log_A_real.exp(), ssm.A_imag)
    dtA = ssm.log_dt.exp()[:, None] * A
    h = torch.zeros(2, 32, 8, dtype=torch.complex128)
    for t, states in enumerate(seen_at(mixer, x, "hook_state").unbind(1)):
        h = dtA.exp() * h + (dtA.exp() - 1) / A * v[:, t, :, None]
        torch.testing.assert_close(states, h.detach(), rtol=0, atol=1e-13)


@pytest.mark.parametrize("variant", VARIANTS)
def test_factors_compose_to_the_whole_block(variant):
    mixer, x = build(variant, torch.float64), stream(11, 16, 2, torch.float64)
    check_factors(mixer, x)
    if mixer.config.conv:
        with torch.no_grad():
            mixer.conv.bias.zero_()
    u = mixer.in_proj(x).chunk(2, -1)[0] if mixer.config.gate else mixer.in_proj(x)
    check_composed(mixer, x, u)


def test_factors_are_mambas():
    assert build().factor_names == ("gate", "ssm", "silu", "conv")


def test_state_size_and_decay():
    assert build().state_size == 32 * 16 + 32 * 3
    assert exempt_from_decay(build()) == {"conv.bias", "ssm.log_A_real", "ssm.A_imag", "ssm.log_dt", "ssm.D"}
