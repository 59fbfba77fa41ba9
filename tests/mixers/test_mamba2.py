"""Mamba2 has one Φ a head; its norm comes after the gate, its states are those of the recurrence."""

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
from circuitscope.errors import UserError
from circuitscope.mixers.mamba2 import Mamba2, Mamba2Config
from circuitscope.models.config import ModelConfig
from circuitscope.models.hooked_lm import HookedLM

VARIANTS = {
    "one_head": {"headdim": 32, "d_state": 16},
    "heads": {"headdim": 8, "d_state": 12},
    "groups": {"headdim": 4, "n_groups": 2, "d_state": 5, "conv_width": 3},
    "channels": {"headdim": 1, "d_state": 3},
}


def build(variant: str = "heads", dtype: torch.dtype = torch.float32) -> Mamba2:
    torch.manual_seed(0)
    return shaken(Mamba2(Mamba2Config(**VARIANTS[variant]), 16, "none").to(dtype))


def test_the_conv_of_B_and_C_stays_out_of_the_matrix():
    mixer, x = build(), stream(7, 16)
    assert seen_at(mixer, x, "hook_phi_conv").shape[1] == 32
    for hook in ("hook_B", "hook_C"):
        seen: list[torch.Tensor] = []
        run(mixer, x, **{hook: lambda value, seen=seen: seen.append(value), "hook_phi_conv": torch.zeros_like})
        assert torch.equal(seen[0], seen_at(mixer, x, hook))


@pytest.mark.parametrize("variant", ["heads", "groups"])
def test_states_are_those_of_the_recurrence_and_an_edit_decays_as_it_says(variant):
    mixer, x = build(variant, torch.float64), stream(5, 16, 2, torch.float64)
    v, dt, B, C = (seen_at(mixer, x, f"hook_{n}") for n in ("v", "dt", "B", "C"))
    states, A = seen_at(mixer, x, "hook_state"), mixer.A.detach()
    heads, width, size = mixer.n_heads, mixer.d_head, mixer.config.d_state
    assert B.shape == (2, 5, mixer.config.n_groups, size)
    assert states.shape == (2, 5, heads, size, width)
    B, C = (part.repeat_interleave(heads // mixer.config.n_groups, 2) for part in (B, C))
    S = torch.zeros(2, heads, size, width, dtype=torch.float64)
    for t in range(5):
        write = torch.einsum("bh,bhn,bhp->bhnp", dt[:, t], B[:, t], v[:, t])
        S = torch.exp(dt[:, t] * A)[..., None, None] * S + write
        torch.testing.assert_close(states[:, t], S, rtol=0, atol=1e-13)

    change = torch.randn(S.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))

    def edit(value):
        value = value.clone()
        value[:, 2] += change
        return value

    moved = run(mixer, x, hook_state=edit)[1]["z"] - run(mixer, x, hook_state=lambda s: s)[1]["z"]
    assert (moved[:, :2] == 0).all()
    for t in range(2, 5):
        carried = torch.exp(dt[:, 3 : t + 1].sum(1) * A)[..., None, None] * change
        torch.testing.assert_close(moved[:, t], torch.einsum("bhn,bhnp->bhp", C[:, t], carried), rtol=0, atol=1e-12)


@pytest.mark.parametrize("variant", VARIANTS)
def test_factors_compose_to_what_enters_the_norm(variant):
    mixer, x = build(variant, torch.float64), stream(11, 16, 2, torch.float64)
    with torch.no_grad():
        mixer.conv.bias.zero_()
    gate, read, _ = mixer.in_proj(x).split(mixer.sizes, -1)
    u = read.split(mixer.convolved, -1)[0]
    check_composed(mixer, x, u)
    out, seen = run(mixer, x)
    gated = seen["z"].flatten(2) * F.silu(gate)
    normed = gated / (gated.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * mixer.norm.weight
    torch.testing.assert_close(out, normed @ mixer.out.weight.T, rtol=0, atol=1e-12)


def test_composed_has_a_channel_axis_and_phi_a_head_axis():
    config = Mamba2Config(**VARIANTS["heads"])
    shape = {"mixers": [config], "n_layers": 1, "d_model": 16, "vocab_size": 9}
    model = HookedLM(ModelConfig.model_validate(shape)).eval()
    tokens = torch.randint(9, (2, 12), generator=torch.Generator().manual_seed(0))
    assert phi(model, tokens, layer=0).shape == (2, 4, 12, 12)
    assert phi(model, tokens, layer=0, factors="composed").shape == (2, 32, 12, 12)
    _, cache = model.run_with_cache(tokens)  # one matrix a head is small: cached unasked, as attention's
    torch.testing.assert_close(cache["blocks.0.mixer.hook_phi"], phi(model, tokens, layer=0))
    assert not {"blocks.0.mixer.hook_phi_conv", "blocks.0.mixer.hook_state"} & set(cache)


def test_state_size_counts_every_convolved_channel():
    assert build("heads").state_size == 4 * 8 * 12 + 3 * (32 + 2 * 12)
    assert build("groups").state_size == 8 * 4 * 5 + 2 * (32 + 2 * 2 * 5)


def test_weight_decay_spares_A_D_and_vectors():
    assert exempt_from_decay(build()) == {"A_log", "D", "dt_bias", "conv.bias", "norm.weight"}
    assert all(p.no_weight_decay for p in (build().A_log, build().D, build().dt_bias))


def test_initial_decays_and_step_sizes():
    mixer = Mamba2(Mamba2Config(headdim=1), 128, "none")
    assert 1 <= -mixer.A.max() < 2
    assert 15 < -mixer.A.min() <= 16.001
    dt = F.softplus(mixer.dt_bias)
    assert dt.min() >= 0.99e-3
    assert dt.max() <= 1.01e-1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, r"headdim must divide expand · d_model = 32, got 64; nearest: 32"),
        ({"headdim": 12}, r"headdim must divide expand · d_model = 32, got 12; nearest: (8|16)"),
        ({"headdim": 8, "n_groups": 3}, r"n_groups must divide the number of heads, 4, got 3; nearest: (2|4)"),
    ],
)
def test_sizes_that_do_not_divide_are_refused_with_the_nearest_that_does(options, message):
    with pytest.raises(UserError, match=message):
        Mamba2(Mamba2Config(**options), 16, "none")
