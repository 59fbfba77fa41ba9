"""S4 has a Φ that no input changes; its kernel and its output are the published ones."""

import math

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
from torch import nn

from circuitscope import mixers
from circuitscope.errors import UserError
from circuitscope.mixers.s4 import S4, S4D, S4Config
from circuitscope.models.config import ModelConfig
from circuitscope.models.hooked_lm import HookedLM


def build(dtype: torch.dtype = torch.float32, **options: int) -> S4:
    torch.manual_seed(0)
    return shaken(S4(S4Config(**options), 16, "none").to(dtype))


def test_the_kernel_is_s4d_lins_as_published():
    """K_l = 2 Re Σ C (e^{ΔA} − 1)/A e^{lΔA} with A_n = −½ + iπn, written out, and D on the diagonal."""
    torch.manual_seed(1)
    ssm = S4D(3, 8).double()
    A = torch.complex(torch.full((4,), -0.5, dtype=torch.float64), math.pi * torch.arange(4, dtype=torch.float64))
    dtA = ssm.log_dt.exp()[:, None] * A
    C = torch.view_as_complex(ssm.C) * (dtA.exp() - 1) / A
    K = 2 * (C[:, None] * torch.exp(torch.arange(6)[:, None] * dtA[:, None])).sum(-1).real
    phi = ssm.scan(6).phi(slice(0, 3))
    assert phi.shape == (1, 3, 6, 6)
    for i in range(6):
        for j in range(i + 1):
            want = K[:, i - j] + (ssm.D if i == j else 0)
            torch.testing.assert_close(phi[0, :, i, j], want, rtol=1e-6, atol=1e-7)  # log ½ is stored in float32


def test_phi_is_the_same_for_every_input_and_kept_once():
    mixer = build()
    first, second = (seen_at(mixer, stream(7, 16, seed=seed), "hook_phi") for seed in (0, 1))
    assert torch.equal(first, second)
    assert torch.equal(first[0], first[1])
    assert mixer.reading(stream(7, 16)).factors[0].build(slice(0, 16)).shape[0] == 1


def test_out_is_gelu_then_a_gated_linear_unit():
    """As a 1×1 conv to twice the width whose halves are `out` and `out_gate`."""
    mixer, x = build(torch.float64), stream(6, 16, 2, torch.float64)
    conv = nn.Conv1d(16, 32, 1).double()
    with torch.no_grad():
        conv.weight.copy_(torch.cat([mixer.out.weight, mixer.out_gate.weight])[..., None])
        conv.bias.copy_(torch.cat([mixer.out.bias, mixer.out_gate.bias]))
    out, seen = run(mixer, x)
    want = F.glu(conv(F.gelu(seen["z"][..., 0]).mT), dim=1).mT
    torch.testing.assert_close(out, want, rtol=0, atol=1e-13)


def test_shrinking_out_shrinks_the_branch():
    mixer, x = build(torch.float64), stream(6, 16, 2, torch.float64)
    with torch.no_grad():
        mixer.out.bias.zero_()
        before = mixer(x)
        mixer.out.weight.mul_(0.25)
        torch.testing.assert_close(mixer(x), 0.25 * before, rtol=0, atol=1e-14)


def test_states_are_those_of_the_complex_recurrence_and_an_edit_decays_as_it_says():
    mixer, x = build(torch.float64, d_state=6), stream(5, 16, 2, torch.float64)
    ssm = mixer.ssm
    A = torch.complex(-ssm.log_A_real.exp(), ssm.A_imag)
    dtA = ssm.log_dt.exp()[:, None] * A
    states = seen_at(mixer, x, "hook_state")
    assert states.shape == (2, 5, 16, 3)
    assert states.is_complex()
    h = torch.zeros_like(states[:, 0])
    for t in range(5):
        h = dtA.exp() * h + (dtA.exp() - 1) / A * x[:, t, :, None]
        torch.testing.assert_close(states[:, t], h.detach(), rtol=0, atol=1e-13)

    def edit(value):
        value = value.clone()
        value[:, 1, 4] += 1j
        return value

    moved = (run(mixer, x, hook_state=edit)[1]["z"] - run(mixer, x, hook_state=lambda s: s)[1]["z"])[..., 0]
    assert (moved[:, 0] == 0).all()
    assert (moved[:, :, [c for c in range(16) if c != 4]] == 0).all()
    for t in range(1, 5):
        want = 2 * (torch.view_as_complex(ssm.C)[4] * (dtA[4] * (t - 1)).exp() * 1j).sum().real
        torch.testing.assert_close(moved[:, t, 4], want.expand(2), rtol=0, atol=1e-13)


def test_the_convolution_is_the_only_factor():
    mixer, x = build(torch.float64), stream(11, 16, 2, torch.float64)
    assert [(f.name, f.core) for f in mixer.reading(x).factors] == [("ssm", True)]
    check_composed(mixer, x, x)


def test_state_size_counts_two_floats_a_complex_state():
    mixer = build(d_state=6)
    states = seen_at(mixer, stream(3, 16, 1), "hook_state")[0, 0]
    assert mixer.state_size == torch.view_as_real(states).numel() == 16 * 6


def test_weight_decay_spares_the_dynamics():
    spared = {"ssm.log_A_real", "ssm.A_imag", "ssm.log_dt", "ssm.D", "out.bias", "out_gate.bias"}
    assert exempt_from_decay(build()) == spared


@pytest.mark.parametrize("init", ["native", "gpt2"])
def test_any_init_leaves_step_sizes_between_a_thousandth_and_a_tenth(init):
    shape = {"mixers": ["s4"], "n_layers": 1, "d_model": 32, "vocab_size": 9, "init": init}
    ssm = HookedLM(ModelConfig.model_validate(shape)).layers[0].mixer.ssm
    assert ssm.log_dt.exp().min() >= 0.99e-3
    assert ssm.log_dt.exp().max() <= 1.01e-1
    assert 0.8 < torch.view_as_complex(ssm.C).abs().pow(2).mean() < 1.2


def test_an_odd_number_of_states_is_refused():
    with pytest.raises(UserError, match=r"d_state.*multiple of 2, got 3"):
        mixers.mixer_config({"name": "s4", "d_state": 3})
