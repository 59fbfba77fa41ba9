"""Profiles over lags of hand-made matrices, and the numbers read from them."""

import pytest
import torch

from circuitscope.analysis.decay.lag_profile import (
    FIT_HOLDS,
    fit_decay,
    half_mass,
    jackknife_stderr,
    mean_distance,
    off_diagonal_ratio,
    profile,
    profile_by_sequence,
)
from circuitscope.errors import UserError


def toeplitz(by_lag: torch.Tensor) -> torch.Tensor:
    """[1, 1, dest, src] with by_lag[i − j] at and below the diagonal."""
    lag = torch.arange(len(by_lag))[:, None] - torch.arange(len(by_lag))
    return torch.where(lag >= 0, by_lag[lag.clamp(min=0)], 0.0)[None, None]


def lags(length: int) -> torch.Tensor:
    return torch.arange(length, dtype=torch.float64)


def test_profile_is_the_mean_of_each_diagonal_over_positions_and_sequences():
    matrix = torch.randn(3, 2, 7, 7, generator=torch.Generator().manual_seed(0), dtype=torch.float64).tril()
    expected = torch.zeros(2, 7, dtype=torch.float64)
    for head in range(2):
        for lag in range(7):
            entries = [matrix[b, head, i, i - lag].abs() for b in range(3) for i in range(lag, 7)]
            expected[head, lag] = sum(entries) / len(entries)
    torch.testing.assert_close(profile(matrix), expected, rtol=1e-12, atol=0)


def test_a_shared_matrix_gives_every_sequence_the_same_profile():
    one = torch.rand(1, 3, 5, 5).tril()
    torch.testing.assert_close(
        profile_by_sequence(one.expand(4, -1, -1, -1)), profile_by_sequence(one.repeat(4, 1, 1, 1)), rtol=0, atol=0
    )


@pytest.mark.parametrize("signs", [1.0, -1.0])
@pytest.mark.parametrize("kappa", [0.0123, 0.4, 2.0])
def test_the_rate_of_an_exponential_is_recovered_whatever_the_sign(kappa, signs):
    by_lag = 3 * torch.exp(-kappa * lags(32)) * signs ** torch.arange(32)
    fit = fit_decay(profile(toeplitz(by_lag)))
    assert fit.kappa.item() == pytest.approx(kappa, abs=1e-6)
    assert fit.kappa_r2.item() == pytest.approx(1, abs=1e-9)
    assert fit.power_r2 < fit.kappa_r2


def test_the_exponent_of_a_power_law_is_recovered_and_fits_better_than_an_exponential():
    fit = fit_decay(profile(toeplitz((lags(64) + (lags(64) == 0)) ** -1.5)))
    assert fit.power.item() == pytest.approx(1.5, abs=1e-6)
    assert fit.power_r2.item() == pytest.approx(1, abs=1e-9)
    assert fit.kappa_r2 < 0.9


def test_the_fit_does_not_see_the_diagonal():
    by_lag = torch.exp(-0.3 * lags(16))
    fits = [fit_decay(torch.cat([torch.tensor([d], dtype=torch.float64), by_lag[1:]])) for d in (0.0, 1.0, 1e6)]
    assert fits[0] == fits[1] == fits[2]


def test_a_mean_over_channels_has_a_rate_that_shrinks_with_length_and_single_channels_do_not():
    rates = torch.tensor([0.01, 0.1, 1.0], dtype=torch.float64)

    def channels(length: int) -> torch.Tensor:
        return torch.exp(-rates[:, None] * lags(length))

    of_mean = [fit_decay(channels(length).mean(0)).kappa.item() for length in (16, 64, 256)]
    assert of_mean[0] > 1.5 * of_mean[1] > 1.5 * 1.5 * of_mean[2]
    for length in (16, 64, 256):
        torch.testing.assert_close(fit_decay(channels(length)).kappa, rates, rtol=1e-9, atol=0)


def test_the_fit_is_a_least_squares_line_with_one_slope_and_a_level_for_even_and_for_odd_lags():
    by_lag = torch.rand(20, generator=torch.Generator().manual_seed(1), dtype=torch.float64) + 0.1
    y, x = by_lag[1:].log(), lags(20)[1:]
    even = (x % 2 == 0).double()
    solution = torch.linalg.lstsq(A := torch.stack([even, 1 - even, x], 1), y[:, None]).solution[:, 0]
    levels = torch.linalg.lstsq(A[:, :2], y[:, None]).solution[:, 0]
    r2 = 1 - (y - A @ solution).square().sum() / (y - A[:, :2] @ levels).square().sum()
    fit = fit_decay(by_lag)
    assert fit.kappa.item() == pytest.approx(-solution[2].item(), rel=1e-9)
    assert fit.kappa_r2.item() == pytest.approx(r2.item(), rel=1e-9)


@pytest.mark.parametrize("jump", [1.0, 100.0])
def test_keys_and_values_in_turn_do_not_hide_the_rate(jump):
    by_lag = torch.exp(-0.2 * lags(32)) * torch.where(lags(32) % 2 == 0, jump, 1.0)
    fit = fit_decay(by_lag)
    assert fit.kappa.item() == pytest.approx(0.2, abs=1e-9)
    assert fit.kappa_r2.item() == pytest.approx(1, abs=1e-9)


def test_a_jump_between_even_and_odd_lags_alone_is_no_decay():
    noise = torch.rand(32, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    fit = fit_decay(torch.where(lags(32) % 2 == 0, 100.0, 1.0) * torch.exp(0.3 * noise))
    assert fit.kappa.abs() < 0.02
    assert fit.kappa_r2 < FIT_HOLDS


def test_lags_with_nothing_stay_out_of_the_fit():
    by_lag = torch.exp(-0.5 * lags(20))
    by_lag[[4, 9, 15]] = 0
    by_lag[11] = torch.inf
    assert fit_decay(by_lag).kappa.item() == pytest.approx(0.5, abs=1e-9)


@pytest.mark.parametrize(("taps", "fits"), [(4, False), (5, True)])
def test_a_short_conv_is_fitted_only_where_four_lags_are_left(taps, fits):
    by_lag = torch.where(lags(16) < taps, torch.exp(-0.7 * lags(16)), 0.0)
    found = torch.stack(fit_decay(by_lag))
    assert bool(found.isfinite().all()) == fits
    assert bool(found.isnan().all()) != fits


def test_float32_underflow_does_not_bend_the_rate():
    by_lag = torch.exp(-lags(200)).float()
    assert (by_lag == 0).any()
    assert ((by_lag > 0) & (by_lag < torch.finfo(torch.float32).tiny)).any()
    assert fit_decay(by_lag).kappa.item() == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize("level", [1.0, 1 / 3, 1e-30])
def test_a_constant_profile_has_rate_zero_and_no_r2(level):
    fit = fit_decay(torch.full((12,), level, dtype=torch.float64))
    assert fit.kappa.item() == pytest.approx(0, abs=1e-12)
    assert fit.kappa_r2.isnan()
    assert fit.power_r2.isnan()


@pytest.mark.parametrize(
    ("by_lag", "expected"),
    [
        ([1.0, 0, 0, 0], 0),
        ([1.0, 1, 1, 1], 1),
        ([1.0, 1], 0),
        ([0.0, 0, 0, 2], 3),
        ([4.0, 1, 2, 3], 1),
        ([3.0, 1, 2, 3], 2),
    ],
)
def test_half_mass_is_the_first_lag_that_reaches_half(by_lag, expected):
    assert half_mass(torch.tensor(by_lag)).item() == expected


def test_the_identity_has_nothing_off_its_diagonal():
    of_identity = profile(torch.eye(9).expand(2, 3, 9, 9))
    for number in (off_diagonal_ratio, mean_distance, half_mass):
        assert torch.equal(number(of_identity), torch.zeros(3, dtype=torch.float64))


def test_a_full_triangle_by_hand():
    length = 11
    flat = profile(torch.ones(1, 1, length, length).tril())
    assert off_diagonal_ratio(flat).item() == pytest.approx((length - 1) / (length + 1), rel=1e-12)
    assert mean_distance(flat).item() == pytest.approx((length - 1) / 2, rel=1e-12)


def test_off_diagonal_ratio_is_a_ratio_of_masses_of_the_matrix():
    matrix = torch.randn(1, 1, 8, 8, generator=torch.Generator().manual_seed(2), dtype=torch.float64).tril()
    expected = matrix.tril(-1).abs().sum() / matrix.abs().sum()
    assert off_diagonal_ratio(profile(matrix)).item() == pytest.approx(expected.item(), rel=1e-12)


def test_a_matrix_of_zeros_has_no_distances():
    zeros = profile(torch.zeros(2, 1, 5, 5))
    for number in (half_mass, mean_distance, off_diagonal_ratio):
        assert number(zeros).isnan().all()


@pytest.mark.parametrize("length", [1, 2])
def test_too_short_for_a_fit_but_not_for_the_rest(length):
    flat = profile(torch.ones(2, 1, length, length).tril())
    assert torch.stack(fit_decay(flat)).isnan().all()
    assert half_mass(flat).item() == 0
    assert mean_distance(flat).item() == pytest.approx((length - 1) / 2)
    assert off_diagonal_ratio(flat).item() == pytest.approx((length - 1) / (length + 1))


def test_a_bare_attention_tensor_will_do():
    scores = torch.randn(4, 2, 10, 10, generator=torch.Generator().manual_seed(3))
    pattern = scores.masked_fill(torch.ones(10, 10).triu(1).bool(), -torch.inf).softmax(-1)
    found = profile(pattern)
    assert found.shape == (2, 10)
    assert torch.stack(fit_decay(found)).isfinite().all()


@pytest.mark.usefixtures("without_type_checks")
@pytest.mark.parametrize("shape", [(4, 4), (2, 4, 4), (1, 1, 4, 5), (0, 1, 4, 4)])
def test_what_is_no_mixing_matrix_is_refused(shape):
    with pytest.raises(UserError, match=r"\[batch, head, dest, src\]"):
        profile(torch.zeros(shape))


def test_a_matrix_that_sees_the_future_is_refused():
    with pytest.raises(UserError, match="causal"):
        profile(torch.ones(1, 1, 3, 3))


def test_the_jackknife_of_a_mean_is_the_standard_error():
    x = torch.randn(12, 3, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    left_out = (x.sum(0) - x) / 11
    torch.testing.assert_close(jackknife_stderr(left_out), x.std(0) / 12**0.5, rtol=1e-10, atol=0)
    assert jackknife_stderr(x[:1]).isnan().all()
