"""RWKV-4's time mixing: its shift, its state, its initialization."""

import math

import contract
import pytest
import torch

import circuitscope as cs
from circuitscope.errors import UserError
from circuitscope.mixers.rwkv import RWKV, RWKVConfig

D_MODEL = 16


def build(dtype=torch.float32, d_model=D_MODEL):
    torch.manual_seed(0)
    return contract.shaken(RWKV(RWKVConfig(), d_model, "none").to(dtype))


def test_the_shift_before_the_values_is_a_factor_on_the_channels_of_x():
    mixer, x = build(), contract.stream(13, D_MODEL)
    shift = contract.built(mixer, x)["shift"]
    shifted = torch.einsum("bcij,bjc->bic", shift.expand(2, -1, -1, -1), x)
    contract.assert_close(shifted, contract.run(mixer, x)[1]["conv"])


def test_a_state_is_numerator_and_denominator_at_their_scale():
    """Σ_j≤t e^{k_j − (t−j) w} v_j and the same without v, in float64."""
    mixer, x = build(torch.float64), contract.stream(7, D_MODEL, dtype=torch.float64)
    k, v = contract.seen_at(mixer, x, "hook_k")[..., 0], contract.seen_at(mixer, x, "hook_v")[..., 0]
    num, den, scale = contract.seen_at(mixer, x, "hook_state").unbind(-1)
    w = mixer.time_decay.exp().detach()
    for t in range(7):
        weights = torch.exp(k[:, : t + 1] - torch.arange(t, -1, -1)[:, None] * w)
        contract.assert_close(den[:, t] * scale[:, t].exp(), weights.sum(1))
        contract.assert_close(num[:, t] * scale[:, t].exp(), (weights * v[:, : t + 1]).sum(1))


def test_an_erased_state_starts_anew():
    """Zeros written at t: what follows is what the tokens from t on would give, but for the shift's one look back."""
    mixer, x = build(), contract.stream(12, D_MODEL)
    with torch.no_grad():
        mixer.time_mix_k.fill_(1)
        mixer.time_mix_v.fill_(1)
        mixer.time_mix_r.fill_(1)
        out, _ = contract.run(mixer, x, hook_state=lambda s: torch.cat([s[:, :4], 0 * s[:, 4:5], s[:, 5:]], 1))
        contract.assert_close(out[:, 5:], mixer(x[:, 5:]))


def test_the_transition_is_how_numerator_and_denominator_fall():
    """One more in the numerator at 2 moves z_i by σ(r_i) e^{max_2 − (i−3)w} / den_i; den_i is e^{u + k_i} / w_ii."""
    mixer, x = build(torch.float64), contract.stream(9, D_MODEL, dtype=torch.float64)
    with torch.no_grad():
        parts, k = contract.built(mixer, x), contract.seen_at(mixer, x, "hook_k")[..., 0].mT
        denominator = (mixer.time_first[:, None] + k).exp() / parts["wkv"].diagonal(0, -2, -1)
        before, after = (
            contract.run(mixer, x, hook_state=lambda s, by=by: torch.cat([s[:, :2], s[:, 2:3] + by, s[:, 3:]], 1))[1][
                "z"
            ]
            for by in (torch.zeros(3), torch.tensor([1.0, 0, 0]))
        )
        left = (after - before)[..., 0].mT / parts["receptance"] * denominator
        scale = contract.seen_at(mixer, x, "hook_state")[:, 2, :, 2].exp()
        transition = mixer.reading(x).transition
        kept = (transition.rate[None] * transition.time[:, 3:].cumsum(1).mT).exp() / transition.rate.exp()
        assert (left[..., :3] == 0).all()
        contract.assert_close(left[..., 3:], scale[..., None] * kept)


def test_the_factors_are_receptance_and_weights_that_sum_to_one():
    mixer, x = build(torch.float64), contract.stream(11, D_MODEL, dtype=torch.float64)
    weights = contract.built(mixer, x)["wkv"]
    contract.assert_close(weights.sum(-1), torch.ones(2, D_MODEL, 11, dtype=torch.float64))


def test_a_composed_matrix_is_refused_in_a_sentence():
    model, tokens = contract.briefly_trained(RWKVConfig(), steps=1)
    with pytest.raises(UserError, match="only per pair of channels"):
        cs.phi(model, tokens, 0, factors="composed")
    assert cs.phi(model, tokens, 0, factors="shift").shape == (3, D_MODEL, 32, 32)
    x = model.layers[0].mixer_input(model.stream_before(tokens, 0))
    hooked = contract.seen_at(model.layers[0].mixer, x, "hook_phi")
    contract.assert_close(cs.phi(model, tokens, 0), hooked)


def test_state_size_by_hand():
    """Numerator, denominator and their scale for each channel, and the last input for the shift."""
    assert RWKV(RWKVConfig(), 24, "none").state_size == 3 * 24 + 24


def test_initialization_by_depth():
    mixer, d = RWKV(RWKVConfig(), 7, "none"), 7
    h = torch.arange(d)
    for layer, n_layers in [(0, 1), (0, 3), (1, 3), (2, 3)]:
        mixer.set_depth(layer, n_layers)
        rho = layer / (n_layers - 1) if n_layers > 1 else 0
        torch.testing.assert_close(mixer.time_decay.data, -5 + 8 * (h / 6) ** (0.7 + 1.3 * rho))
        torch.testing.assert_close(mixer.time_mix_k.data, (h / 7) ** (1 - layer / n_layers))
        torch.testing.assert_close(mixer.time_mix_v.data, (h / 7) ** (1 - layer / n_layers) + 0.3 * rho)
        torch.testing.assert_close(mixer.time_mix_r.data, (h / 7) ** (0.5 * (1 - layer / n_layers)))
        zigzag = torch.tensor([0, 0.5, -0.5, 0, 0.5, -0.5, 0])
        torch.testing.assert_close(mixer.time_first.data, math.log(0.3) + zigzag)
    assert all(p.no_weight_decay for name, p in mixer.named_parameters() if name.startswith("time"))


def test_one_channel_is_enough():
    mixer = RWKV(RWKVConfig(), 1, "none")
    assert mixer(torch.ones(1, 3, 1)).isfinite().all()
