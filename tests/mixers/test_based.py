"""Based: its Φ, its state by hand and by the recurrence."""

import contract
import pytest
import torch

import circuitscope as cs
from circuitscope.kernels.linear_attention import based_reference, taylor_features
from circuitscope.mixers.based import Based, BasedConfig

D_MODEL = 16


def mixer(dtype=torch.float32, d_model: int = D_MODEL, **options) -> Based:
    torch.manual_seed(0)
    config = BasedConfig(**{"feature_dim": 4, "n_heads": 2} | options)
    return contract.shaken(Based(config, d_model, "none"), 0.3).to(dtype)


@pytest.mark.parametrize("options", [{"window": 1}, {"window": 64}, {"head_dim": 5}, {"n_heads": 1, "feature_dim": 8}])
def test_windows_and_sizes_keep_the_contract(options):
    built, x = mixer(torch.float64, **options), contract.stream(70, D_MODEL, 2, torch.float64)
    contract.check_protocol(built, x)
    contract.check_phi_identity(built, x)
    contract.check_factors(built, x)
    contract.check_edit_one_entry(built, x)
    contract.check_gradient_through_phi(built, x)


def test_all_factors_are_phi_alone():
    built, x = mixer(torch.float64, head_dim=1), contract.stream(9, D_MODEL, 3, torch.float64)
    contract.check_composed(built, x, contract.seen_at(built, x, "hook_v").flatten(2))


@pytest.mark.parametrize("length", [1, 2, 17])
def test_rows_sum_to_one_and_a_window_ends_them(length):
    x = contract.stream(length, D_MODEL, dtype=torch.float64)
    whole, windowed = (contract.seen_at(mixer(torch.float64, window=w), x, "hook_phi") for w in (None, 5))
    for phi in (whole, windowed):
        torch.testing.assert_close(phi.sum(-1), torch.ones_like(phi.sum(-1)))
    assert (windowed.tril(-5) == 0).all()
    assert (whole.tril() > 0).sum() == whole.shape[0] * whole.shape[1] * length * (length + 1) // 2


def test_queries_keys_and_values_have_their_shapes():
    built, x = mixer(), contract.stream(9, D_MODEL, 3)
    assert contract.seen_at(built, x, "hook_q").shape == (3, 9, 2, 4)
    assert contract.seen_at(built, x, "hook_k").shape == (3, 9, 2, 4)
    assert contract.seen_at(built, x, "hook_v").shape == (3, 9, 2, 8)
    assert contract.seen_at(mixer(head_dim=5), x, "hook_z").shape == (3, 9, 2, 5)


def test_the_output_is_that_of_the_recurrence():
    built, x = mixer(torch.float64), contract.stream(17, D_MODEL, dtype=torch.float64)
    q, k, v = (contract.seen_at(built, x, f"hook_{name}") for name in "qkv")
    contract.assert_close(contract.run(built, x)[1]["z"], based_reference(q, k, v))


def test_state_size_is_features_times_values_and_the_normalizer():
    assert mixer().state_size == 2 * (1 + 4 + 16) * (8 + 1)
    x = contract.stream(3, D_MODEL, batch=1)
    features, v = taylor_features(contract.seen_at(mixer(), x, "hook_k")), contract.seen_at(mixer(), x, "hook_v")
    assert mixer().state_size == features[0, 0].numel() * (v.shape[-1] + 1)
    assert Based(BasedConfig(), 64, "none").state_size == 273 * 65


def test_under_a_window_the_state_is_the_cache_of_the_positions_before():
    assert mixer(window=5).state_size == 2 * 4 * (4 + 8)
    assert mixer(window=1).state_size == 0


def test_flops_count_the_keys_that_rows_see():
    assert mixer().mixing_flops(7) == 2 * 2 * (4 + 8) * 28 // 7
    assert mixer(window=3).mixing_flops(7) == 2 * 2 * (4 + 8) * (1 + 2 + 3 + 3 + 3 + 3 + 3) // 7
    assert mixer(window=100).mixing_flops(7) == mixer().mixing_flops(7)


def test_parameters_are_four_maps_without_biases():
    assert {n: tuple(p.shape) for n, p in mixer().named_parameters()} == {
        "qkv.weight": (2 * (4 + 4 + 8), D_MODEL),
        "out.weight": (D_MODEL, 2 * 8),
    }


def test_in_a_model_it_gets_learned_positions_and_its_phi_is_what_the_package_calls_phi():
    model = cs.model("based", d_model=D_MODEL, n_heads=2, n_layers=1, vocab_size=9, max_length=9)
    assert model.config.positions == "learned"
    tokens = torch.randint(9, (2, 9), generator=torch.Generator().manual_seed(0))
    _, cache = model.run_with_cache(tokens)
    for factors in ("phi", "composed", "linear_attention"):
        torch.testing.assert_close(cs.phi(model, tokens, 0, factors=factors), cache["blocks.0.mixer.hook_phi"])


def test_sizes_that_do_not_fit_and_positions_it_cannot_take_are_refused():
    with pytest.raises(cs.UserError, match="n_heads must divide d_model = 16"):
        mixer(n_heads=3)
    assert mixer(n_heads=3, head_dim=4).out.in_features == 12
    with pytest.raises(cs.UserError, match="learned, sinusoidal or none, got rope"):
        Based(BasedConfig(), D_MODEL, "rope")
