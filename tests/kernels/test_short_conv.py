"""The short causal convolution, the token shift and their matrices."""

import pytest
import torch

from circuitscope.kernels.short_conv import (
    short_conv,
    short_conv_phi,
    short_conv_reference,
    token_shift,
    token_shift_phi,
)

SHAPES = [(1, 1, 1, 4), (2, 2, 3, 4), (3, 37, 13, 3), (1, 256, 5, 4), (2, 9, 7, 1), (2, 3, 5, 6)]


def tensors(batch, length, channels, width, dtype=torch.float32):
    torch.manual_seed(0)
    x, weight, bias = torch.randn(batch, length, channels), torch.randn(channels, width), torch.randn(channels)
    return [a.to(dtype).requires_grad_() for a in (x, weight, bias)]


def close(ours, theirs, tolerance):
    assert ours.shape == theirs.shape
    assert (ours - theirs).abs().max() <= tolerance * theirs.abs().max().clamp(min=1e-30)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("with_bias", [True, False])
def test_output_and_gradients_are_those_of_grouped_conv1d(shape, with_bias):
    x, weight, bias = tensors(*shape)
    inputs = [x, weight, bias] if with_bias else [x, weight]
    y, expected = short_conv(*inputs), short_conv_reference(*[a.double() for a in inputs])
    close(y, expected, 1e-6)
    grad = torch.randn_like(y)
    theirs = torch.autograd.grad(expected, inputs, grad.double())
    for a, b in zip(torch.autograd.grad(y, inputs, grad), theirs, strict=True):
        close(a, b, 2e-6)


@pytest.mark.parametrize("shape", [(1, 1, 2, 4), (2, 7, 3, 4)])
def test_gradients_in_float64(shape):
    assert torch.autograd.gradcheck(short_conv, tensors(*shape, dtype=torch.float64))


def test_the_last_tap_weighs_the_current_position():
    x = torch.tensor([1.0, 10.0, 100.0])[None, :, None]
    assert short_conv(x, torch.tensor([[2.0, 1.0]])).flatten().tolist() == [1.0, 12.0, 120.0]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-10)])
def test_phi_times_x_is_the_convolution(shape, dtype, tolerance):
    x, weight, _ = tensors(*shape, dtype=dtype)
    phi = short_conv_phi(weight, shape[1])
    assert phi.equal(phi.tril())
    close(torch.einsum("cij,bjc->bic", phi, x), short_conv(x, weight), tolerance)
    assert torch.autograd.grad(phi.sum(), weight)[0].isfinite().all()


def test_non_contiguous_inputs():
    x = torch.randn(5, 11, 2).transpose(0, 2)[..., ::2]
    weight = torch.randn(4, 3).T
    assert not x.is_contiguous()
    close(short_conv(x, weight), short_conv_reference(x, weight), 1e-6)


def test_only_the_gradients_asked_for():
    x, weight, bias = tensors(2, 5, 3, 4)
    short_conv(x.detach(), weight, bias.detach()).sum().backward()
    assert x.grad is None
    assert weight.grad is not None


@pytest.mark.parametrize("length", [1, 2, 9])
def test_token_shift_moves_every_position_one_on(length):
    x = torch.randn(2, length, 3)
    shifted = token_shift(x)
    assert shifted[:, 0].eq(0).all()
    assert shifted[:, 1:].equal(x[:, :-1])
    assert torch.einsum("ij,bjc->bic", token_shift_phi(length), x).equal(shifted)
