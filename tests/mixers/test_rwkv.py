"""The Φ contract of RWKV-4's time mixing, its shift, its state, its initialization."""

import math

import contract
import pytest
import torch

import circuitscope as cs
from circuitscope.errors import UserError
from circuitscope.kernels.wkv import wkv_states
from circuitscope.mixers.rwkv import RWKV, RWKVConfig

D_MODEL = 16


def build(dtype=torch.float32, d_model=D_MODEL):
    torch.manual_seed(0)
    return contract.shaken(RWKV(RWKVConfig(), d_model, "none").to(dtype))


@pytest.mark.parametrize("length", [1, 2, 17, 256])
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_phi_times_v_is_the_fused_output(length, batch, dtype):
    mixer, x = build(dtype), contract.stream(length, D_MODEL, batch, dtype)
    contract.check_protocol(mixer, x)
    contract.check_phi_identity(mixer, x)
    contract.check_lower_triangular(mixer, x)


def test_phi_times_v_is_the_fused_output_on_trained_weights(monkeypatch):
    model, tokens = contract.briefly_trained(monkeypatch, RWKVConfig(), RWKV)
    contract.check_phi_identity(model.layers[0].mixer, model.mixer_input(tokens, 0))


def test_an_edit_of_phi_moves_one_row():
    contract.check_edit_one_entry(build(), contract.stream(9, D_MODEL))


def test_gradients_flow_through_phi():
    contract.check_gradient_through_phi(build(torch.float64), contract.stream(7, D_MODEL, dtype=torch.float64))


def test_the_shift_before_the_values_can_be_edited():
    """Its matrix lives on the channels of x, and its product with x is what `hook_conv` carries."""
    mixer, x = build(), contract.stream(13, D_MODEL)
    out, before = contract.run(mixer, x, hook_phi_conv=contract.identity)
    fused_out, fused = contract.run(mixer, x)
    contract.assert_close(before["conv"], fused["conv"])
    contract.assert_close(out, fused_out)

    def edit(matrix):
        matrix = matrix.clone()
        matrix[1, 5, 6, 3] += 1
        return matrix

    after_out, after = contract.run(mixer, x, hook_phi_conv=edit)
    moved = after["conv"] != before["conv"]
    assert moved.nonzero().tolist() == [[1, 6, 5]]
    assert torch.equal(after_out[0], out[0])
    assert torch.equal(after_out[1, :6], out[1, :6])
    assert not torch.equal(after_out[1, 6], out[1, 6])
    shift = mixer.factors(x)[2].build(slice(0, D_MODEL))
    contract.assert_close(torch.einsum("bcij,bjc->bic", shift.expand(2, -1, -1, -1), x), fused["conv"])


@pytest.mark.parametrize("trained", [False, True])
def test_a_state_written_at_t_speaks_for_the_past(trained, monkeypatch):
    """The state of another sequence with the same future, brought to this one's scale e^m, makes the futures equal.

    States are pairs at the scale of their own position's running maximum, which an edit cannot change.
    """
    if trained:
        model, tokens = contract.briefly_trained(monkeypatch, RWKVConfig(), RWKV)
        mixer, x = model.layers[0].mixer, model.mixer_input(tokens, 0).detach()
    else:
        mixer, x = build(), contract.stream(16, D_MODEL)
    t = x.shape[1] // 2
    other = x.clone()
    other[:, :t] = contract.stream(t, D_MODEL, len(x), seed=99)  # the shift at t reads t − 1
    scales = []
    for sequence in (x, other):
        k, v, _ = (part.detach() for part in mixer._into(sequence))
        scales.append(wkv_states(mixer.time_decay.exp(), k, v).max[:, t])
    donor = contract.seen_at(mixer, other, "hook_state")[:, t] * (scales[1] - scales[0]).exp().float()[..., None]

    def write(states):
        states[:, t] = donor

    with torch.no_grad():
        kept_out, kept = contract.run(mixer, x, hook_state=contract.identity)
        contract.assert_close(kept_out, mixer(x))
        written_out, written = contract.run(mixer, x, hook_state=write)
        want_out, want = contract.run(mixer, other)
    assert torch.equal(written["z"][:, : t + 1], kept["z"][:, : t + 1])  # y_t reads the state before t
    assert torch.equal(written_out[:, : t + 1], kept_out[:, : t + 1])
    assert not torch.equal(written["z"][:, t + 1 :], kept["z"][:, t + 1 :])
    contract.assert_close(written["z"][:, t + 1 :], want["z"][:, t + 1 :])
    contract.assert_close(written_out[:, t + 1 :], want_out[:, t + 1 :])


def test_an_erased_state_starts_anew():
    """Zeros written at t: what follows is what the tokens from t on would give, but for the shift's one look back."""
    mixer, x = build(), contract.stream(12, D_MODEL)
    with torch.no_grad():
        mixer.time_mix_k.fill_(1)
        mixer.time_mix_v.fill_(1)
        mixer.time_mix_r.fill_(1)
        out, _ = contract.run(mixer, x, hook_state=lambda s: torch.cat([s[:, :4], 0 * s[:, 4:5], s[:, 5:]], 1))
        contract.assert_close(out[:, 5:], mixer(x[:, 5:]))


def test_hooks_may_write_in_place():
    contract.check_edit_in_place(build(), contract.stream(6, D_MODEL, batch=1), ("hook_phi", "hook_state"))


def test_the_factors_are_receptance_and_weights_that_sum_to_one():
    mixer, x = build(torch.float64), contract.stream(11, D_MODEL, dtype=torch.float64)
    contract.check_factors(mixer, x)
    weights = mixer.factors(x)[1].build(slice(0, D_MODEL))
    contract.assert_close(weights.sum(-1), torch.ones(2, D_MODEL, 11, dtype=torch.float64))


def test_a_composed_matrix_is_refused_in_a_sentence(monkeypatch):
    model, tokens = contract.briefly_trained(monkeypatch, RWKVConfig(), RWKV, steps=1)
    with pytest.raises(UserError, match="only per pair of channels"):
        cs.phi(model, tokens, 0, factors="composed")
    assert cs.phi(model, tokens, 0, factors="shift").shape == (3, D_MODEL, 32, 32)
    hooked = contract.seen_at(model.layers[0].mixer, model.mixer_input(tokens, 0), "hook_phi")
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
