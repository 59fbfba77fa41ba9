"""Transition products against the recurrences themselves, started from every position with an identity state."""

import math

import pytest
import torch

import circuitscope as cs
from circuitscope.analysis.decay.transition import (
    delta_products,
    gated_norm,
    gated_rms,
    no_transition,
    spaced,
    transition_product,
)
from circuitscope.errors import UserError
from circuitscope.kernels.s4d import S4DParams, s4d_with_state_edit
from circuitscope.kernels.wkv import wkv_with_state_edit
from circuitscope.mixers.reading import GatedTransition

pytestmark = pytest.mark.slow

LENGTH, BATCH = 10, 3
TOKENS = torch.randint(0, 20, (BATCH, LENGTH), generator=torch.Generator().manual_seed(0))
WHOLE = {"sequences": BATCH, "starts": LENGTH}


def build(name: str, **options) -> cs.HookedLM:
    """A 2-layer model in float64 with noise on every parameter."""
    model = cs.model(name, **{"d_model": 8, "n_layers": 2, "vocab_size": 20, "max_length": LENGTH} | options)
    noise = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.3 * torch.randn(p.shape, generator=noise))
    return model.double()


def seen(model: cs.HookedLM, *names: str) -> list[torch.Tensor]:
    """What hooks of the mixer in layer 1 carry."""
    full = [f"blocks.1.mixer.{name}" for name in names]
    _, cache = model.run_with_cache(TOKENS, names_filter=full)
    return [cache[name] for name in full]


def by_lag(norm_of_product) -> torch.Tensor:
    """Mean over start positions of norm_of_product(j)[lag], a function of the start: [batch, head, lag]."""
    found = [norm_of_product(j) for j in range(LENGTH)]
    return torch.stack([torch.stack([found[j][lag] for j in range(LENGTH - lag)]).mean(0) for lag in range(LENGTH)], -1)


def check(transition, norm: torch.Tensor, rms: torch.Tensor) -> None:
    """norm and rms are [batch, head, lag] over all lags."""
    for found, expected in ((transition.norm, norm), (transition.rms, rms)):
        expected = expected[..., found.lags]
        torch.testing.assert_close(found.value, expected.mean(0), rtol=1e-6, atol=1e-12)
        torch.testing.assert_close(found.layer, expected.mean((0, 1)), rtol=1e-6, atol=1e-12)
        torch.testing.assert_close(found.stderr, expected.std(0) / BATCH**0.5, rtol=1e-4, atol=1e-8)
        torch.testing.assert_close(found.layer_stderr, expected.mean(1).std(0) / BATCH**0.5, rtol=1e-4, atol=1e-8)
        assert found.n == BATCH


def diagonal(states_from) -> tuple[torch.Tensor, torch.Tensor]:
    """Norms by lag where states_from(j) gives the states [batch, head, state] after j that start as ones."""
    return (
        by_lag(lambda j: [s.abs().amax(-1) for s in states_from(j)]),
        by_lag(lambda j: [s.abs().square().mean(-1).sqrt() for s in states_from(j)]),
    )


@pytest.mark.parametrize("name", ["mamba", "s6"])
def test_mamba_by_its_recurrence(name):
    model = build(name)
    ssm = model.layers[1].mixer.ssm
    with torch.no_grad():
        (dt,) = seen(model, "hook_dt")
        ones = torch.ones(BATCH, *ssm.A.shape, dtype=torch.float64)

        def states_from(j):
            states = [ones]
            for dt_t in dt[:, j + 1 :].unbind(1):
                states.append((dt_t[..., None] * ssm.A).exp() * states[-1])
            return states

        expected = diagonal(states_from)
    check(transition_product(model, TOKENS, 1, **WHOLE), *expected)


def test_mamba2_by_its_recurrence():
    model = build("mamba2", headdim=4, d_state=3)
    mixer = model.layers[1].mixer
    with torch.no_grad():
        (dt,) = seen(model, "hook_dt")
        ones = torch.ones(BATCH, mixer.n_heads, 3, dtype=torch.float64)

        def states_from(j):
            states = [ones]
            for dt_t in dt[:, j + 1 :].unbind(1):
                states.append((dt_t * mixer.A).exp()[..., None] * states[-1])
            return states

        expected = diagonal(states_from)
    check(transition_product(model, TOKENS, 1, **WHOLE), *expected)


@pytest.mark.parametrize("name", ["s4", "s4_mamba", "h3"])
def test_s4d_by_its_impulse_response(name):
    model = build(name, d_state=6)
    mixer = model.layers[1].mixer
    ssm = mixer if name == "h3" else mixer.ssm
    params = S4DParams(ssm.log_A_real, ssm.A_imag, ssm.C, ssm.log_dt, "bilinear" if name == "h3" else "zoh")
    impulse = torch.zeros(1, LENGTH, len(ssm.D), dtype=torch.float64)
    impulse[:, 0] = 1
    with torch.no_grad():
        shown = []
        s4d_with_state_edit(impulse, params, None, lambda h: shown.append(h[0]) or h)
        states = shown[0]
        kept = (states / states[0]).abs()  # [lag, channel, state]
    norm = kept.amax(-1).T.expand(BATCH, -1, -1)
    rms = kept.square().mean(-1).sqrt().T.expand(BATCH, -1, -1)
    check(transition_product(model, TOKENS, 1, **WHOLE), norm, rms)


def test_rwkv_by_its_recurrence():
    model = build("rwkv")
    mixer = model.layers[1].mixer
    w = mixer.time_decay.detach().exp()
    k = torch.full((1, LENGTH, len(w)), -1e4, dtype=torch.float64)  # nothing is written after the first position
    k[:, 0] = 0
    shown = []
    wkv_with_state_edit(w, torch.zeros_like(w), k, torch.ones_like(k), lambda states: shown.append(states) or states)
    _, den, maximum = shown[0].unbind(-1)
    norm = (den.log() + maximum).exp()[0].T.expand(BATCH, -1, -1)
    found = transition_product(model, TOKENS, 1)
    check(found, norm, norm)
    torch.testing.assert_close(found.time_constant, 1 / w, rtol=1e-10, atol=0)


@pytest.mark.parametrize("name", ["deltanet", "gated_deltanet"])
@pytest.mark.parametrize("options", [{"n_heads": 2}, {"d_key": 3, "d_value": 4}, {"allow_neg_eigval": True}])
def test_delta_rules_by_their_recurrence(name, options):
    model = build(name, **options)
    mixer = model.layers[1].mixer
    with torch.no_grad():
        names = ["hook_k", "hook_beta", "hook_decay"][: 3 if name == "gated_deltanet" else 2]
        k, beta, *g = seen(model, *names)
        size = k.shape[-1]
        identity = torch.eye(size, dtype=torch.float64).expand(BATCH, mixer.n_heads, size, size)

        def products_from(j):
            products = [identity]
            for t in range(j + 1, k.shape[1]):
                A = identity - beta[:, t, :, None, None] * k[:, t, :, :, None] * k[:, t, :, None, :]
                products.append((g[0][:, t, :, None, None].exp() * A if g else A) @ products[-1])
            return products

        norm = by_lag(lambda j: [torch.linalg.matrix_norm(P, 2) for P in products_from(j)])
        rms = by_lag(lambda j: [torch.linalg.matrix_norm(P) / size**0.5 for P in products_from(j)])
    found = transition_product(model, TOKENS, 1, **WHOLE)
    assert found.norm.lags == list(range(LENGTH))
    check(found, norm, rms)
    if g:
        torch.testing.assert_close(found.time_constant, -1 / g[0].mean((0, 1)), rtol=1e-10, atol=0)
    else:
        assert found.time_constant is None


def test_a_delta_rule_without_gate_keeps_some_direction_whole_below_d_key():
    model = build("deltanet", d_key=8, n_heads=1)
    norm = transition_product(model, TOKENS, 0, **WHOLE).norm
    assert torch.equal(norm.value[0, :8], torch.ones(8, dtype=torch.float64))
    assert (norm.value[0, 8:] < 1 - 1e-6).all()


def test_orthonormal_keys_written_fully_erase_one_direction_each():
    size = 4
    k = torch.eye(size).repeat(3, 1)[None, :, None]  # e_0 … e_3 three times over
    norm, rms = delta_products(k, torch.ones(1, 12, 1), None, torch.arange(12))
    left = torch.tensor([max(0, size - lag) for lag in range(12)], dtype=torch.float64)
    torch.testing.assert_close(rms.value[0], (left / size).sqrt(), rtol=0, atol=1e-7)
    torch.testing.assert_close(norm.value[0], (left > 0).double()[norm.lags], rtol=0, atol=1e-12)


def test_one_key_written_again_and_again_with_beta_two_turns_and_never_shrinks():
    k = torch.zeros(1, 9, 1, 2)
    k[..., 0] = 1
    norm, rms = delta_products(k, torch.full((1, 9, 1), 2.0), None, torch.arange(9))
    for found in (norm, rms):
        torch.testing.assert_close(found.value, torch.ones(1, 9, dtype=torch.float64), rtol=0, atol=1e-12)


def test_steps_that_stretch_are_seen():
    k = torch.zeros(1, 5, 1, 8)
    k[..., 0] = 1
    norm, _ = delta_products(k, torch.full((1, 5, 1), 3.0), None, torch.arange(5))
    torch.testing.assert_close(norm.value[0], 2.0 ** torch.arange(5).double(), rtol=1e-12, atol=0)


def test_far_lags_of_a_delta_rule_are_a_grid_that_ends_at_the_last():
    k = torch.nn.functional.normalize(torch.randn(1, 100, 1, 4, generator=torch.Generator().manual_seed(5)), dim=-1)
    norm, rms = delta_products(k, torch.full((1, 100, 1), 0.5), None, spaced(100, 4))
    assert norm.lags[:4] == [0, 1, 2, 3]
    assert norm.lags[-1] == 99
    assert len(norm.lags) <= 4 + 16
    assert rms.lags == list(range(100))
    assert (norm.value <= 1 + 1e-12).all()


def test_mamba_forgets_everything_when_its_steps_are_large():
    model = build("mamba")
    kept = []
    for bias in (-5.0, 0.0, 5.0, 50.0):
        with torch.no_grad():
            model.layers[0].mixer.ssm.dt_proj.bias.fill_(bias)
        found = transition_product(model, TOKENS, 0)
        kept.append(found.norm.layer[1].item())
        assert (found.rms.value <= found.norm.value + 1e-12).all()
    assert kept == sorted(kept, reverse=True)
    assert kept[0] > 0.9
    assert kept[-1] < 1e-10


def test_long_lags_do_not_underflow_as_float32_would():
    gate = GatedTransition(torch.ones(1, 64, 1), torch.tensor([[-5.0, -7.0]]))
    slowest = math.exp(-5.0 * 63)
    for found, expected in ((gated_norm(gate, 2), slowest), (gated_rms(gate, 2, spaced(64, 8)), slowest / 2**0.5)):
        assert found.value[0, 63].item() == pytest.approx(expected, rel=1e-5)
        assert found.stderr[0, 63] == 0


def test_slices_of_heads_change_nothing(monkeypatch):
    gate = GatedTransition(torch.rand(2, 6, 7, generator=torch.Generator().manual_seed(6)), -torch.rand(7, 3))
    whole = gated_norm(gate, 2)
    monkeypatch.setattr("circuitscope.analysis.decay.transition._CHUNK_BYTES", 1)
    for a, b in zip(gated_norm(gate, 2)[1:5], whole[1:5], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-15)


def test_one_sequence_has_no_standard_error_and_one_position_no_lags():
    model = build("mamba")
    assert transition_product(model, TOKENS[:1], 0).norm.stderr.isnan().all()
    for name in ("mamba", "deltanet", "rwkv"):
        assert transition_product(build(name), TOKENS[:, :1], 0).norm.lags == [0]


def test_start_positions_are_evenly_spaced_from_the_first():
    assert spaced(64, 8).tolist() == list(range(0, 64, 8))
    assert spaced(5, 8).tolist() == [0, 1, 2, 3, 4]
    assert len(spaced(65, 8)) <= 8


@pytest.mark.parametrize("name", ["attention", "based", "hyena", "lstm"])
def test_mixers_without_a_transition_say_why(name):
    model = build(name, n_layers=1)
    assert no_transition(model, 0, TOKENS)
    with pytest.raises(UserError, match="has no transition product"):
        transition_product(model, TOKENS, 0)


def test_layers_count_from_either_end_and_no_further():
    model = build("mamba")
    last = transition_product(model, TOKENS, 1).norm.value
    assert torch.equal(transition_product(model, TOKENS, -1).norm.value, last)
    with pytest.raises(UserError, match="layer must be from 0 to 1, got 2"):
        transition_product(model, TOKENS, 2)
