"""DeltaNet and Gated DeltaNet: their definition, their state, and what the papers say of them."""

import contract
import pytest
import torch
from torch.nn import functional as F

from circuitscope.errors import UserError
from circuitscope.kernels.delta_rule import delta_rule_reference
from circuitscope.mixers.deltanet import DeltaNet, DeltaNetConfig, GatedDeltaNetConfig

CONFIGS = {
    "one head": DeltaNetConfig(),
    "two heads, β to 2": DeltaNetConfig(n_heads=2, allow_neg_eigval=True),
    "gated": GatedDeltaNetConfig(),
    "gated, three heads, d_key 5, d_value 7": GatedDeltaNetConfig(n_heads=3, d_key=5, d_value=7),
}
D_MODEL = 16


@pytest.fixture(params=CONFIGS.values(), ids=CONFIGS.keys())
def config(request):
    return request.param


def build(config, dtype=torch.float32):
    torch.manual_seed(0)
    return contract.shaken(DeltaNet(config, D_MODEL, "none").to(dtype))


@pytest.mark.parametrize("length", [64, 256])
def test_phi_times_v_is_the_fused_output_with_near_equal_keys_and_beta_two(length):
    """The case that ruins a float32 solve: every write flips what nearly the same key held."""
    mixer = build(DeltaNetConfig(allow_neg_eigval=True))
    x = contract.stream(1, D_MODEL) + 1e-3 * contract.stream(length, D_MODEL, seed=1)
    with torch.no_grad():
        both = [
            contract.run(mixer, x, hook_beta=lambda b: torch.full_like(b, 2), **phi)[1]["z"]
            for phi in ({}, {"hook_phi": contract.identity})
        ]
    contract.assert_close(both[1], both[0])


def test_states_map_keys_to_values(config):
    mixer = build(config)
    states = contract.seen_at(mixer, contract.stream(16, D_MODEL), "hook_state")
    assert states.shape == (2, 16, mixer.n_heads, mixer.d_key, mixer.d_head)


def test_the_factors_compose(config):
    mixer, x = build(config, torch.float64), contract.stream(11, D_MODEL, dtype=torch.float64)
    contract.check_composed(mixer, x, mixer.in_proj(x).split(mixer.sizes, dim=-1)[0].split(mixer.convolved, dim=-1)[2])


def test_the_mixer_is_its_definition(config):
    """Conv by torch's conv1d, the recurrence step by step, norm before gate; 1e-12 in float64."""
    mixer, x = build(config, torch.float64), contract.stream(12, D_MODEL, dtype=torch.float64)
    qkv, b, *rest = mixer.in_proj(x).split(mixer.sizes, dim=-1)
    qkv = qkv.mT
    width = config.conv_width
    qkv = F.silu(F.conv1d(F.pad(qkv, (width - 1, 0)), mixer.conv.weight, groups=qkv.shape[1]).mT)
    keys = mixer.n_heads * mixer.d_key
    q, k, v = qkv.split([keys, keys, mixer.n_heads * mixer.d_head], dim=-1)
    q, k, v = (part.unflatten(-1, (mixer.n_heads, -1)) for part in (q, k, v))
    q, k = (part / (part.square().sum(-1, keepdim=True) + 1e-6).sqrt() for part in (q, k))
    beta = b.sigmoid() * (2 if config.allow_neg_eigval else 1)
    g = -mixer.A_log.exp() * torch.log1p(torch.exp(rest[0] + mixer.dt_bias)) if config.gated else None
    z = delta_rule_reference(q, k, v, beta, g)
    z = z / (z.square().mean(-1, keepdim=True) + config.norm_eps).sqrt() * mixer.norm.weight
    if config.gated:
        z = z * F.silu(rest[1].unflatten(-1, (mixer.n_heads, -1)))
    contract.assert_close(mixer(x), mixer.out(z.flatten(2)), 1e-12)


def test_state_size_by_hand():
    plain = DeltaNet(DeltaNetConfig(n_heads=2), 32, "none")
    assert plain.state_size == 2 * 16 * 16 + 3 * (32 + 32 + 32)
    gated = DeltaNet(GatedDeltaNetConfig(n_heads=3, d_key=5, d_value=7, conv_width=2), 16, "none")
    assert gated.state_size == 3 * 5 * 7 + 1 * (15 + 15 + 21)


def test_a_repeated_key_is_overwritten():
    """With orthonormal keys and β = 1, Φ reads only the last write to a key: the delta rule's point."""
    mixer, x = build(DeltaNetConfig(d_key=4), torch.float64), contract.stream(6, D_MODEL, dtype=torch.float64)
    order = torch.tensor([0, 1, 0, 2, 1, 0])
    keys = torch.eye(4, dtype=torch.float64)[order].expand(2, 6, 4)[:, :, None]
    seen = []
    contract.run(
        mixer,
        x,
        hook_q=lambda q: keys,
        hook_k=lambda k: keys,
        hook_beta=torch.ones_like,
        hook_phi=lambda phi: seen.append(phi.detach()),
    )
    contract.assert_close(seen[0], 0.5 * torch.eye(6, dtype=torch.float64).expand(2, 1, 6, 6), 1e-12)


def test_the_decay_starts_as_published():
    """A in [0.01, 16], step sizes in [1e-3, 1e-1], and neither is weight-decayed."""
    torch.manual_seed(0)
    mixer = DeltaNet(GatedDeltaNetConfig(n_heads=64, d_key=2, d_value=2), 16, "none")
    A, dt = mixer.A_log.exp(), F.softplus(mixer.dt_bias)
    assert 0.01 <= A.min() < 2
    assert 14 < A.max() <= 16
    assert dt.min() * 1.0001 >= 1e-3
    assert dt.max() <= 0.1 * 1.0001
    assert mixer.A_log.no_weight_decay
    assert mixer.dt_bias.no_weight_decay


def test_a_floor_holds_the_decay_and_passes_gradients():
    """α' = f + (1 − f) α: above f even where the state would be forgotten at once, and 1 where nothing decays."""
    plain, floored = (build(GatedDeltaNetConfig(decay_floor=f), torch.float64) for f in (0.0, 0.9))
    x = 30 * contract.stream(9, D_MODEL, dtype=torch.float64)
    alpha, kept = (contract.seen_at(mixer, x, "hook_decay").exp() for mixer in (plain, floored))
    assert alpha.min() < 1e-3
    assert kept.min() >= 0.9
    contract.assert_close(kept, 0.9 + 0.1 * alpha, 1e-14)
    floored(x).sum().backward()
    assert floored.A_log.grad.abs().min() > 0


def test_a_floor_keeps_the_digits_of_a_decay_near_one():
    mixer = build(GatedDeltaNetConfig(decay_floor=0.5))
    with torch.no_grad():
        mixer.A_log.fill_(-20)
    g = contract.seen_at(mixer, contract.stream(9, D_MODEL), "hook_decay")
    assert g.max() < 0  # in float32, log(0.5 + 0.5 e^g) would be 0


@pytest.mark.parametrize(("options", "cap"), [({}, 1), ({"allow_neg_eigval": True}, 2), ({"beta_max": 0.25}, 0.25)])
def test_beta_stays_below_its_cap(options, cap):
    x = 100 * contract.stream(32, D_MODEL)
    for config in (DeltaNetConfig(**options), GatedDeltaNetConfig(**options)):
        beta = contract.seen_at(build(config), x, "hook_beta")
        assert 0.9 * cap < beta.max() <= cap
        assert 0 <= beta.min() < 0.1 * cap


def test_a_cap_above_one_must_allow_negative_eigenvalues():
    assert DeltaNetConfig(beta_max=1.5, allow_neg_eigval=True).cap == 1.5
    with pytest.raises(UserError, match=r"beta_max: 1.5 makes .* negative; expected at most 1, or allow_neg_eigval"):
        DeltaNetConfig(beta_max=1.5)


def test_heads_that_do_not_divide_the_model_are_refused():
    with pytest.raises(UserError, match="n_heads must divide d_model = 16, got 3"):
        DeltaNet(DeltaNetConfig(n_heads=3), 16, "none")
