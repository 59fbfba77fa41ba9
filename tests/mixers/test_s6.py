"""S6 as a mixer of its own reads Δ, B and C from its input."""

import torch
from contract import (
    check_composed,
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
    assert [(f.name, f.core) for f in mixer.reading(x).factors] == [("ssm", True)]
    check_composed(mixer, x, x)


def test_state_size_and_decay():
    assert build(d_state=5).state_size == 16 * 5
    assert exempt_from_decay(build()) == {"ssm.A_log", "ssm.D", "ssm.dt_proj.bias"}
