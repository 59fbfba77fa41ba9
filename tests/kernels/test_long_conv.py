"""The convolution by taps and by FFT against its Toeplitz matrix."""

from inspect import unwrap

import pytest
import torch

from circuitscope.kernels.long_conv import DIRECT_TAPS, direct_conv, fft_conv, long_conv, long_conv_reference, toeplitz

SHAPES = [(1, 1, 1), (2, 2, 3), (3, 37, 13), (1, 256, 5), (2, 100, 7)]


def tensors(batch, length, channels, lags=None, dtype=torch.float32):
    torch.manual_seed(0)
    u, kernel, skip = torch.randn(batch, length, channels), torch.randn(channels, lags or length), torch.randn(channels)
    return [a.to(dtype).requires_grad_() for a in (u, kernel, skip)]


def close(ours, theirs, tolerance):
    assert ours.shape == theirs.shape
    assert (ours - theirs).abs().max() <= tolerance * theirs.abs().max()


@pytest.mark.parametrize("shape", [*SHAPES, (2, 37, 3, 5), (2, 37, 3, 90)])
def test_output_and_gradients_against_the_matrix_in_float64(shape):
    inputs = tensors(*shape)
    y, expected = long_conv(*inputs), long_conv_reference(*[a.double() for a in inputs])
    close(y, expected, 1e-5)
    grad = torch.randn_like(y)
    theirs = torch.autograd.grad(expected, inputs, grad.double())
    for a, b in zip(torch.autograd.grad(y, inputs, grad), theirs, strict=True):
        close(a, b, 1e-5)


@pytest.mark.parametrize("conv", [direct_conv, fft_conv])
@pytest.mark.parametrize("shape", [*SHAPES, (2, 37, 3, 5), (1, 5, 9, 3), (2, DIRECT_TAPS + 5, 3)])
def test_both_fast_paths_serve_every_length(conv, shape):
    u, kernel, _ = tensors(*shape)
    y, expected = conv(u, kernel), long_conv_reference(u.double(), kernel.double())
    close(y, expected, 1e-5)
    grad = torch.randn_like(y)
    theirs = torch.autograd.grad(expected, (u, kernel), grad.double())
    for a, b in zip(torch.autograd.grad(y, (u, kernel), grad), theirs, strict=True):
        close(a, b, 1e-5)


@pytest.mark.parametrize("shape", [(1, 1, 2), (2, 7, 3), (2, 6, 2, 3), (2, 3, 2, 6)])
def test_gradients_in_float64(shape):
    assert torch.autograd.gradcheck(long_conv, tensors(*shape, dtype=torch.float64))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-10)])
def test_phi_times_u_is_the_convolution(shape, dtype, tolerance):
    u, kernel, skip = tensors(*shape, dtype=dtype)
    phi = toeplitz(kernel, shape[1], skip)
    assert phi.equal(phi.tril())
    close(torch.einsum("cij,bjc->bic", phi, u), long_conv(u, kernel, skip), tolerance)


def test_toeplitz_entries_are_the_kernel_at_the_lag():
    phi = toeplitz(torch.tensor([[1.0, 2.0, 3.0]]), 4, torch.tensor([10.0]))
    assert phi[0].tolist() == [[11, 0, 0, 0], [2, 11, 0, 0], [3, 2, 11, 0], [0, 3, 2, 11]]


def test_nothing_wraps_around_to_earlier_positions():
    u = torch.zeros(1, 64, 1, dtype=torch.float64)
    u[:, 50:] = 1e6
    y = long_conv(u, torch.ones(1, 64, dtype=torch.float64))
    assert y[:, :50].abs().max() < 1e-6


def test_non_contiguous_inputs():
    u, kernel = torch.randn(5, 11, 2).transpose(0, 2), torch.randn(11, 5).T
    close(long_conv(u, kernel), long_conv_reference(u.double(), kernel.double()), 1e-5)


@pytest.mark.parametrize("lags", [37, DIRECT_TAPS + 5])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_computed_in_float32_by_either_path(dtype, lags):
    u, kernel, skip = (a.detach().to(dtype) for a in tensors(2, lags, 3))
    for given in ((u, kernel, skip), (u, kernel.float(), skip.float())):
        y = long_conv(*given)
        assert y.dtype == dtype
        assert y.equal(long_conv(*(a.float() for a in given)).to(dtype))


def test_wrong_shapes_and_types_are_refused_before_any_memory_is_read():
    u, kernel, bias = (a.detach() for a in tensors(2, 5, 3))
    # Without the wrapper of the shape checker, which tests can turn on and which would speak first.
    unchecked = unwrap(direct_conv)
    for wrong in (kernel[:2], kernel.T, kernel[0]):
        with pytest.raises(ValueError, match=r"kernel is \[channel, lag\]"):
            unchecked(u, wrong)
    with pytest.raises(ValueError, match=r"bias is \[2\], expected \[3\]"):
        unchecked(u, kernel, bias[:2])
    with pytest.raises(ValueError, match=r"kernel is torch\.float64 on cpu, expected float32"):
        unchecked(u, kernel.double())


@pytest.mark.parametrize("shape", [(0, 4, 3), (2, 0, 3, 2), (2, 4, 0)])
def test_empty_axes_give_empty_outputs(shape):
    u, kernel, skip = tensors(*shape)
    y = long_conv(u, kernel, skip)
    assert y.shape == u.shape
    assert [g.shape for g in torch.autograd.grad(y.sum(), (u, kernel, skip))] == [u.shape, kernel.shape, skip.shape]


def test_without_gradients_it_is_the_same():
    inputs = tensors(2, 9, 3)
    y = long_conv(*inputs)
    with torch.no_grad():
        assert long_conv(*inputs).equal(y)
    plain = long_conv(*(a.detach() for a in inputs))
    assert plain.equal(y)
    assert not plain.requires_grad
