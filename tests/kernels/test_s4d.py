"""S4D: kernel against recurrence, states, edits of states, H3's shift-SSM."""

import pytest
import torch

from circuitscope.kernels.long_conv import long_conv
from circuitscope.kernels.s4d import (
    S4DParams,
    s4d_kernel,
    s4d_kernel_reference,
    s4d_lin,
    s4d_with_state_edit,
    shift_ssm,
)

BOTH = pytest.mark.parametrize("discretization", ["zoh", "bilinear"])


def params(channels, states, discretization="zoh", dtype=torch.float64, dt=(1e-3, 1e-1)):
    torch.manual_seed(0)
    log_A_real, A_imag = s4d_lin(channels, states)
    log_dt = torch.empty(channels, dtype=torch.float64).uniform_(*torch.tensor(dt).log().tolist())
    C = torch.randn(channels, states, 2)
    tensors = (a.to(dtype).requires_grad_() for a in (log_A_real, A_imag, C, log_dt))
    return S4DParams(*tensors, discretization)


def close(ours, theirs, tolerance):
    assert ours.shape == theirs.shape
    assert (ours - theirs).abs().max() <= tolerance * theirs.abs().max()


def test_s4d_lin_is_minus_a_half_plus_i_pi_n():
    log_A_real, A_imag = s4d_lin(2, 3)
    assert torch.allclose(-log_A_real.exp(), torch.full((2, 3), -0.5))
    assert torch.allclose(A_imag, torch.pi * torch.tensor([0.0, 1.0, 2.0]).repeat(2, 1))


@BOTH
@pytest.mark.parametrize("length", [1, 2, 37, 256])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
def test_the_kernel_is_the_impulse_response_of_the_recurrence(discretization, length, dtype, tolerance):
    p = params(3, 5, discretization, dtype)
    exact = S4DParams(*(a.detach().double() for a in p[:4]), discretization)
    close(s4d_kernel(p, length), s4d_kernel_reference(exact, length), tolerance)


def test_the_zoh_kernel_is_the_published_formula():
    p = params(3, 5)
    A, dt = torch.complex(-p.log_A_real.exp(), p.A_imag), p.log_dt.exp()[:, None]
    C = torch.view_as_complex(p.C)
    lags = torch.arange(50)
    expected = 2 * ((C * (torch.exp(dt * A) - 1) / A)[..., None] * torch.exp((dt * A)[..., None] * lags)).sum(1).real
    close(s4d_kernel(p, 50), expected, 1e-12)


@BOTH
@pytest.mark.parametrize("dt", [(1e-9, 1e-8), (4.0, 4.0 + 1e-6), (1e3, 1e4)])
def test_extreme_steps_stay_finite_and_right(discretization, dt):
    """At Δ = 4 and A = −½ the bilinear Ā is 0, which has no logarithm."""
    p = params(3, 4, discretization, dt=dt)
    kernel = s4d_kernel(p, 300)
    close(kernel, s4d_kernel_reference(p, 300), 1e-10)
    assert all(g.isfinite().all() for g in torch.autograd.grad(kernel.sum(), p[:4]))


def test_a_near_zero_gives_b_bar_equal_to_dt():
    p = S4DParams(torch.full((1, 1), -60.0), torch.zeros(1, 1), torch.tensor([[[0.5, 0.0]]]), torch.tensor([-2.0]))
    assert torch.allclose(s4d_kernel(p, 5), torch.full((1, 5), 0.1353352832))


def test_long_kernels_keep_their_digits_in_float32():
    p = params(4, 32, dtype=torch.float32)
    close(s4d_kernel(p, 2048), s4d_kernel(S4DParams(*(a.double() for a in p[:4])), 2048), 1e-6)


@BOTH
def test_gradients_in_float64(discretization):
    p = params(2, 3, discretization)
    assert torch.autograd.gradcheck(lambda *a: s4d_kernel(S4DParams(*a, discretization), 7), p[:4])


@BOTH
@pytest.mark.parametrize("length", [1, 2, 33])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-5)])
def test_the_states_that_an_edit_is_shown_read_out_to_the_convolution(discretization, length, dtype, tolerance):
    p = params(3, 4, discretization, dtype)
    u = torch.randn(2, length, 3, dtype=dtype)
    shown = []
    y = s4d_with_state_edit(u, p, None, lambda states: shown.append(states) or states)
    assert shown[0].shape == (2, length, 3, 4)
    assert shown[0].is_complex()
    close(2 * (shown[0] * torch.view_as_complex(p.C)).sum(-1).real, y, tolerance)
    close(y, long_conv(u, s4d_kernel(p, length)), tolerance)


def test_an_identity_edit_changes_nothing():
    p, D, u = params(3, 4), torch.randn(3, dtype=torch.float64), torch.randn(2, 9, 3, dtype=torch.float64)
    edited = s4d_with_state_edit(u, p, D, lambda states: states)
    close(edited, long_conv(u, s4d_kernel(p, 9), D), 1e-10)


def test_erasing_the_state_at_t_is_starting_anew_after_t():
    p, D, u = params(3, 4), torch.randn(3, dtype=torch.float64), torch.randn(2, 9, 3, dtype=torch.float64)

    def erase(states):
        states = states.clone()
        states[:, 4] = 0
        return states

    y = s4d_with_state_edit(u, p, D, erase)
    kernel = s4d_kernel(p, 9)
    close(y[:, :4], long_conv(u, kernel, D)[:, :4], 1e-10)
    close(y[:, 4], u[:, 4] * D, 1e-10)
    close(y[:, 5:], long_conv(u[:, 5:], kernel, D), 1e-10)


def test_an_edit_may_write_in_place():
    p, u = params(3, 4), torch.randn(2, 9, 3, dtype=torch.float64)

    def erase(states):
        states[:, 4] = 0
        return states

    def edited(edit):
        return s4d_with_state_edit(u, p, None, edit)

    assert edited(erase).equal(edited(lambda states: erase(states.clone())))
    assert not edited(erase).equal(edited(lambda states: states))


def test_autocast_does_not_round_the_kernel():
    p = params(3, 4, dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        kernel = s4d_kernel(p, 30)
    assert kernel.equal(s4d_kernel(p, 30))


def test_gradients_flow_through_an_edit():
    p, u = params(2, 3), torch.randn(1, 5, 2, dtype=torch.float64, requires_grad=True)
    gain = torch.tensor(0.7, dtype=torch.float64, requires_grad=True)

    def run(u, gain, *tensors):
        def edit(states):
            return torch.cat([states[:, :2], states[:, 2:3] * gain, states[:, 3:]], 1)

        return s4d_with_state_edit(u, S4DParams(*tensors), None, edit)

    assert torch.autograd.gradcheck(run, (u, gain, *p[:4]))


@pytest.mark.parametrize("length", [1, 3, 20])
def test_shift_ssm_is_a_filter_over_the_last_n_inputs(length):
    torch.manual_seed(0)
    u, c, D = torch.randn(2, length, 3), torch.randn(3, 5), torch.randn(3)
    expected = D * u
    for t in range(length):
        for s in range(min(5, t + 1)):
            expected[:, t] += c[:, s] * u[:, t - s]
    close(shift_ssm(u, c, D), expected, 1e-6)


def test_an_unknown_discretization_is_named():
    with pytest.raises(ValueError, match="not one of: zoh, bilinear"):
        s4d_kernel(params(1, 1, "euler"), 3)
