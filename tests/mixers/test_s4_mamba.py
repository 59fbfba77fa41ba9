"""S4-Mamba is Mamba's block with a Φ that no input changes."""

import pytest
import torch
import torch.nn.functional as F
from contract import (
    check_composed,
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
    if mixer.config.conv:
        with torch.no_grad():
            mixer.conv.bias.zero_()
    u = mixer.in_proj(x).chunk(2, -1)[0] if mixer.config.gate else mixer.in_proj(x)
    check_composed(mixer, x, u)


def test_factors_are_mambas():
    assert [f.name for f in build().reading(stream(3, 16)).factors] == ["gate", "ssm", "silu", "conv"]


def test_state_size_and_decay():
    assert build().state_size == 32 * 16 + 32 * 3
    assert exempt_from_decay(build()) == {"conv.bias", "ssm.log_A_real", "ssm.A_imag", "ssm.log_dt", "ssm.D"}
