"""S6 as a mixer of its own keeps the Φ contract; it reads Δ, B and C from its input."""

import pytest
import torch
from contract import (
    briefly_trained,
    check_composed,
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

from circuitscope.kernels.selective_scan import selective_scan_reference
from circuitscope.mixers.s6 import S6, S6Config


def build(dtype: torch.dtype = torch.float32, **options: int) -> S6:
    torch.manual_seed(0)
    return shaken(S6(S6Config(**options), 16, "none").to(dtype))


def test_s6_is_a_mixer_that_builds_phi_only_on_demand():
    check_protocol(build(), stream(9, 16))
    check_fused_path_builds_nothing(build(), stream(9, 16))


@pytest.mark.parametrize("options", [{}, {"d_state": 3, "dt_rank": 5}])
@pytest.mark.parametrize(("length", "batch"), [(1, 1), (1, 3), (2, 1), (2, 3), (17, 1), (17, 3), (64, 3)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_phi_times_v_is_the_fused_scan(options, length, batch, dtype):
    mixer, x = build(dtype, **options), stream(length, 16, batch, dtype)
    check_phi_identity(mixer, x)
    check_lower_triangular(mixer, x)
    check_state_hook(mixer, x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_phi_times_v_is_the_fused_scan_at_length_256(dtype):
    check_phi_identity(build(dtype), stream(256, 16, 1, dtype))


def test_the_contract_holds_on_trained_weights(monkeypatch):
    model, tokens = briefly_trained(monkeypatch, S6Config(), S6)
    for dtype in (torch.float32, torch.float64):
        mixer, x = model.to(dtype).layers[0].mixer, model.mixer_input(tokens, 0).detach()
        check_phi_identity(mixer, x)
        check_edit_one_entry(mixer, x)
        check_state_hook(mixer, x)
        check_factors(mixer, x)


@pytest.mark.parametrize("length", [1, 2, 17])
def test_one_entry_of_phi_moves_one_row(length):
    check_edit_one_entry(build(), stream(length, 16, 3))
    check_edit_in_place(build(), stream(length, 16, 3), ("hook_phi", "hook_state"))


def test_gradients_flow_through_phi():
    check_gradient_through_phi(build(torch.float64), stream(9, 16, 2, torch.float64))


def test_values_are_the_input_and_the_scan_is_the_published_recurrence():
    mixer, x = build(torch.float64), stream(6, 16, 2, torch.float64)
    dt, B, C = (seen_at(mixer, x, f"hook_{n}") for n in ("dt", "B", "C"))
    out, seen = run(mixer, x)
    assert torch.equal(seen["v"][..., 0], x)
    z = selective_scan_reference(x, dt, mixer.ssm.A, B, C, mixer.ssm.D)
    torch.testing.assert_close(seen["z"][..., 0], z, rtol=0, atol=1e-14)
    torch.testing.assert_close(out, z @ mixer.out.weight.T, rtol=0, atol=1e-13)


def test_states_are_those_of_the_recurrence():
    mixer, x = build(torch.float64), stream(4, 16, 2, torch.float64)
    dt, B = seen_at(mixer, x, "hook_dt"), seen_at(mixer, x, "hook_B")
    h = torch.zeros(2, 16, 16, dtype=torch.float64)
    for t, states in enumerate(seen_at(mixer, x, "hook_state").unbind(1)):
        h = torch.exp(dt[:, t, :, None] * mixer.ssm.A) * h + (dt[:, t] * x[:, t])[..., None] * B[:, t, None]
        torch.testing.assert_close(states, h.detach(), rtol=0, atol=1e-14)


def test_the_scan_is_the_only_factor():
    mixer, x = build(torch.float64), stream(11, 16, 2, torch.float64)
    assert mixer.factor_names == mixer.core == ("ssm",)
    check_factors(mixer, x)
    check_composed(mixer, x, x)


def test_state_size_and_decay():
    assert build(d_state=5).state_size == 16 * 5
    assert exempt_from_decay(build()) == {"ssm.A_log", "ssm.D", "ssm.dt_proj.bias"}
