"""Based's Taylor attention: blocks, recurrent form and Φ say the same."""

import pytest
import torch

from circuitscope.kernels.linear_attention import (
    BLOCK,
    based_attention,
    based_phi,
    based_reference,
    based_steps,
    taylor_features,
)

SHAPES = [(1, 1, 1, 4, 3), (2, 2, 3, 8, 5), (2, 37, 2, 5, 7), (1, 256, 1, 16, 4), (1, BLOCK + 1, 2, 3, 3)]
WINDOWS = pytest.mark.parametrize("window", [None, 1, 7, 64, 1000])


def tensors(batch, length, heads, d, d_v, dtype=torch.float32, scale=1.0):
    torch.manual_seed(0)
    q, k, v = (torch.randn(batch, length, heads, size) for size in (d, d, d_v))
    return [a.to(dtype).requires_grad_() for a in (scale * q, scale * k, v)]


def close(ours, theirs, tolerance):
    assert ours.shape == theirs.shape
    assert (ours - theirs).abs().max() <= tolerance * theirs.abs().max().clamp(min=1e-3)


def phi_times_v(q, k, v, window=None):
    return torch.einsum("bhij,bjhe->bihe", based_phi(q, k, window=window), v)


def test_features_make_the_taylor_polynomial():
    q, k = torch.randn(9, 6, dtype=torch.float64), torch.randn(9, 6, dtype=torch.float64)
    s = q @ k.T / 6**0.5
    assert taylor_features(q).shape == (9, 1 + 6 + 36)
    close(taylor_features(q) @ taylor_features(k).T, 1 + s + s**2 / 2, 1e-12)


@pytest.mark.parametrize("shape", SHAPES)
def test_blocks_against_the_recurrent_form_in_float64(shape):
    inputs = tensors(*shape)
    exact = [a.detach().double().requires_grad_() for a in inputs]
    y, expected = based_attention(*inputs), based_reference(*exact)
    close(y, expected, 1e-5)
    grad = torch.randn_like(y)
    theirs = torch.autograd.grad(expected, exact, grad.double())
    for a, b in zip(torch.autograd.grad(y, inputs, grad), theirs, strict=True):
        close(a, b, 1e-5)


@WINDOWS
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-10)])
def test_phi_times_v_is_the_output(shape, window, dtype, tolerance):
    q, k, v = tensors(*shape, dtype)
    phi = based_phi(q, k, window=window)
    assert phi.equal(phi.tril())
    close(phi.sum(-1), torch.ones_like(phi.sum(-1)), tolerance)
    if window is not None:
        assert phi.equal(phi.triu(1 - window))
    close(phi_times_v(q, k, v, window), based_attention(q, k, v, window=window), tolerance)


@WINDOWS
def test_windowed_gradients_are_those_of_phi(window):
    inputs = tensors(2, 2 * BLOCK + 3, 2, 4, 3, torch.float64)
    grad = torch.randn(2, 2 * BLOCK + 3, 2, 3, dtype=torch.float64)
    ours = torch.autograd.grad(based_attention(*inputs, window=window), inputs, grad)
    theirs = torch.autograd.grad(phi_times_v(*inputs, window), inputs, grad)
    for a, b in zip(ours, theirs, strict=True):
        close(a, b, 1e-10)


@pytest.mark.parametrize("length", [1, 2, 5])
def test_gradients_in_float64(length):
    assert torch.autograd.gradcheck(based_attention, tensors(2, length, 2, 3, 2, torch.float64))


@pytest.mark.parametrize("scale", [0.0, 1e-10, 1e4])
def test_extremes_are_finite_and_right(scale):
    q, k, v = tensors(2, 30, 2, 4, 3, scale=scale)
    exact = [a.double() for a in (q, k, v)]
    y = based_attention(q, k, v)
    close(y, phi_times_v(*exact), 1e-5)
    assert all(g.isfinite().all() for g in torch.autograd.grad(y.sum(), (q, k, v)))


def test_steps_from_the_sums_of_the_past_go_on_across_blocks():
    q, k, v = (a.detach() for a in tensors(2, 3 * BLOCK, 2, 5, 7, torch.float64))
    sums, counts, y = v.new_zeros(2, 2, 31, 7), v.new_zeros(2, 2, 31), []
    for part in (slice(0, 1), slice(1, 2 * BLOCK), slice(2 * BLOCK, 3 * BLOCK)):
        of_part, sums, counts = based_steps(q[:, part], k[:, part], v[:, part], sums, counts)
        y.append(of_part)
    close(torch.cat(y, 1), based_reference(q, k, v), 1e-10)


def test_weights_never_fall_below_a_half():
    """s = −1 everywhere is the smallest weight there is: rows are then plain averages."""
    q, k = torch.ones(1, 5, 1, 1), -torch.ones(1, 5, 1, 1)
    expected = torch.ones(5, 5).tril() / torch.arange(1, 6)[:, None]
    close(based_phi(q, k)[0, 0], expected, 1e-6)


def test_non_contiguous_inputs():
    q, k, v = (a.detach() for a in tensors(3, 9, 2, 4, 4))
    q, k, v = (a.transpose(0, 1)[..., ::2] for a in (q, k, v))
    close(based_attention(q, k, v), phi_times_v(q.double(), k.double(), v.double()), 1e-5)


def test_no_whole_matrix_is_kept_for_backward():
    q, k, v = tensors(1, 512, 1, 4, 4)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x.numel()) or x, lambda x: x):
        based_attention(q, k, v)
    assert max(kept) <= 512 * 4


def test_a_window_below_one_is_refused():
    with pytest.raises(ValueError, match="at least 1"):
        based_attention(*tensors(1, 2, 1, 2, 2), window=0)
