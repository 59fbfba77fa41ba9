"""Mamba with and without its conv and gate: its factors, its start; its states are those of the recurrence."""

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

from circuitscope.analysis.reading.mixing_matrix import phi
from circuitscope.mixers.mamba import Mamba, MambaConfig
from circuitscope.models.config import ModelConfig
from circuitscope.models.hooked_lm import HookedLM

VARIANTS = {
    "whole": {},
    "no_conv": {"conv": False},
    "no_gate": {"gate": False},
    "bare": {"conv": False, "activation": False, "gate": False},
    "odd_sizes": {"d_state": 5, "conv_width": 3, "expand": 3, "dt_rank": 2},
}


def build(variant: str = "whole", d_model: int = 16, dtype: torch.dtype = torch.float32) -> Mamba:
    torch.manual_seed(0)
    return shaken(Mamba(MambaConfig(**VARIANTS[variant]), d_model, "none").to(dtype))


def test_states_are_those_of_the_recurrence_and_an_edit_decays_as_it_says():
    mixer, x = build(dtype=torch.float64), stream(5, 16, 2, torch.float64)
    dt, B, C = (seen_at(mixer, x, f"hook_{n}") for n in ("dt", "B", "C"))
    v, A = seen_at(mixer, x, "hook_v")[..., 0], mixer.ssm.A.detach()
    states = seen_at(mixer, x, "hook_state")
    assert states.shape == (2, 5, 32, 16)
    h = torch.zeros(2, 32, 16, dtype=torch.float64)
    for t in range(5):
        h = torch.exp(dt[:, t, :, None] * A) * h + (dt[:, t] * v[:, t])[..., None] * B[:, t, None]
        torch.testing.assert_close(states[:, t], h, rtol=0, atol=1e-14)

    change = torch.randn(2, 32, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))

    def edit(value):
        value = value.clone()
        value[:, 2] += change
        return value

    moved = run(mixer, x, hook_state=edit)[1]["z"] - run(mixer, x, hook_state=lambda s: s)[1]["z"]
    assert (moved[:, :2] == 0).all()
    for t in range(2, 5):
        carried = torch.exp(dt[:, 3 : t + 1].sum(1)[..., None] * A) * change
        torch.testing.assert_close(moved[:, t, :, 0], (carried * C[:, t, None]).sum(-1), rtol=0, atol=1e-13)


@pytest.mark.parametrize("variant", VARIANTS)
def test_factors_compose_to_the_whole_block(variant):
    mixer, x = build(variant, dtype=torch.float64), stream(11, 16, 2, torch.float64)
    if mixer.config.conv:
        with torch.no_grad():
            mixer.conv.bias.zero_()
    u = mixer.in_proj(x).chunk(2, -1)[0] if mixer.config.gate else mixer.in_proj(x)
    check_composed(mixer, x, u)


def test_the_bias_of_the_conv_is_the_affine_term():
    """gate ⊙ z = composed · u + gate · Φ · σ(pre) · bias."""
    mixer, x = build(dtype=torch.float64), stream(11, 16, 2, torch.float64)
    u, gate = mixer.in_proj(x).chunk(2, -1)
    _, seen = run(mixer, x)
    ssm = seen_at(mixer, x, "hook_phi")
    gate_f, _, silu, conv = (f.build(slice(0, 32)) for f in mixer.reading(x).factors)
    composed = gate_f[..., None] * ssm @ (silu[..., None] * conv)
    affine = gate_f * (ssm @ (silu * mixer.conv.bias[:, None])[..., None])[..., 0]
    got = torch.einsum("bcij,bjc->bic", composed, u) + affine.mT
    torch.testing.assert_close(got, F.silu(gate) * seen["z"][..., 0], rtol=0, atol=1e-12)


def test_factors_and_hooks_are_those_that_exist():
    names = {variant: [f.name for f in build(variant).reading(stream(3, 16)).factors] for variant in VARIANTS}
    assert names["whole"] == ["gate", "ssm", "silu", "conv"]
    assert names["no_conv"] == ["gate", "ssm", "silu"]
    assert names["bare"] == ["ssm"]
    assert not hasattr(build("no_conv"), "hook_phi_conv")
    assert not hasattr(build("no_gate"), "hook_gate")


def test_state_size_counts_scan_and_conv():
    assert build("whole").state_size == 32 * 16 + 32 * 3
    assert build("no_conv").state_size == 32 * 16
    assert build("odd_sizes").state_size == 48 * 5 + 48 * 2


def test_weight_decay_spares_A_D_and_vectors():
    assert exempt_from_decay(build()) == {"conv.bias", "ssm.A_log", "ssm.D", "ssm.dt_proj.bias"}


@pytest.mark.parametrize("init", ["native", "gpt2"])
def test_any_init_leaves_step_sizes_between_a_thousandth_and_a_tenth(init):
    shape = {"mixers": ["mamba"], "n_layers": 1, "d_model": 32, "vocab_size": 9, "init": init}
    mixer = HookedLM(ModelConfig.model_validate(shape)).layers[0].mixer
    dt = F.softplus(mixer.ssm.dt_proj.bias)
    assert dt.min() >= 0.99e-3
    assert dt.max() <= 1.01e-1
    assert mixer.ssm.dt_proj.weight.abs().max() <= 2**-0.5
    assert torch.equal(mixer.ssm.A_log.exp().round(), torch.arange(1.0, 17).repeat(64, 1))


def test_an_edit_of_phi_reaches_later_layers_at_its_row_and_after():
    shape = {"mixers": ["mamba"], "n_layers": 2, "d_model": 16, "vocab_size": 9}
    model = HookedLM(ModelConfig.model_validate(shape)).eval()
    tokens = torch.randint(9, (2, 12), generator=torch.Generator().manual_seed(0))

    def edit(value, hook, by):
        value[1, 3, 5, 2] += by
        return value

    before, after = (
        model.run_with_hooks(tokens, fwd_hooks=[("blocks.0.mixer.hook_phi", lambda v, hook, by=by: edit(v, hook, by))])
        for by in (0.0, 50.0)
    )
    assert torch.equal(after[0], before[0])
    assert torch.equal(after[1, :5], before[1, :5])
    assert (after[1, 5:] != before[1, 5:]).any(-1).all()


def test_the_function_phi_is_the_hook_and_large_hooks_are_cached_only_by_name():
    shape = {"mixers": ["mamba"], "n_layers": 1, "d_model": 16, "vocab_size": 9}
    model = HookedLM(ModelConfig.model_validate(shape)).eval()
    tokens = torch.randint(9, (2, 12), generator=torch.Generator().manual_seed(0))
    name = "blocks.0.mixer.hook_phi"
    _, cache = model.run_with_cache(tokens, names_filter=name)
    torch.testing.assert_close(phi(model, tokens, layer=0), cache[name])
    assert phi(model, tokens, layer=0, factors="composed", reduce="mean_abs").shape == (2, 12, 12)
    _, everything = model.run_with_cache(tokens)
    assert not {name, "blocks.0.mixer.hook_phi_conv", "blocks.0.mixer.hook_state"} & set(everything)
