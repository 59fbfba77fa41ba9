"""Causal depthwise convolution with a filter of any length up to the sequence's, and its Toeplitz matrix.

Reference: long_conv_reference, the Toeplitz matrix times u. Two fast paths: a Numba loop over the taps, for float32 on
a CPU up to DIRECT_TAPS taps, and the FFT for everything else. The few taps of a model's short convolution, with torch's
order of weights and a bias, are in short_conv.
"""

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float
from numba import prange
from torch import Tensor

from circuitscope.kernels.numba_simd import LANES, kernel, load, pad_last, splat, store, task
from circuitscope.kernels.once import differentiable_once
from circuitscope.kernels.opaque import opaque

DIRECT_TAPS = 512  # about where the FFT catches up: the loop grows with the square of the length
_BLOCK = 64  # channels per task


def toeplitz(
    kernel: Float[Tensor, "channel lag"], length: int, skip: Float[Tensor, " channel"] | None = None
) -> Float[Tensor, "channel dest src"]:
    """Φ_ij = kernel_{i−j} for i ≥ j (0 past the filter's end), plus skip on the diagonal."""
    kernel = _cut_to(kernel, length)
    if skip is not None:
        kernel = torch.cat([kernel[:, :1] + skip[:, None], kernel[:, 1:]], dim=1)
    # rows of a sliding window over [0, ..., 0, K_0, ..., K_{l−1}] read backwards in lag are the rows of Φ
    padded = F.pad(kernel.flip(1), (0, length - 1))
    return padded.unfold(1, length, 1).flip(1)


def long_conv_reference(
    u: Float[Tensor, "batch pos channel"],
    kernel: Float[Tensor, "channel lag"],
    skip: Float[Tensor, " channel"] | None = None,
) -> Float[Tensor, "batch pos channel"]:
    """y_i = Σ_{j≤i} kernel_{i−j} u_j + skip u_i as a product with the Toeplitz matrix."""
    return torch.einsum("cij,bjc->bic", toeplitz(kernel, u.shape[1], skip), u)


def long_conv(
    u: Float[Tensor, "batch pos channel"],
    kernel: Float[Tensor, "channel lag"],
    skip: Float[Tensor, " channel"] | None = None,
) -> Float[Tensor, "batch pos channel"]:
    """y_i = Σ_{j≤i} kernel_{i−j} u_j + skip u_i, by taps or by an FFT padded so that nothing wraps around.

    The filter may be shorter or longer than the sequence; taps past the sequence are not used. Half precision is
    computed in float32 and rounded at the end. Differentiable once.
    """
    length, dtype = u.shape[1], u.dtype
    wide = torch.promote_types(torch.promote_types(dtype, kernel.dtype), torch.float32)
    u, kernel = u.to(wide), kernel.to(wide)
    if takes_direct_path(u, min(kernel.shape[1], length)):
        y = direct_conv(u, kernel[:, :length])
    else:
        y = fft_conv(u, kernel)
    return (y if skip is None else torch.addcmul(y, u, skip.to(wide))).to(dtype)


def takes_direct_path(u: Tensor, taps: int) -> bool:
    """Whether the loop over taps serves: float32 on a CPU, and at most DIRECT_TAPS taps."""
    return bool(u.device.type == "cpu" and u.dtype == torch.float32 and taps <= DIRECT_TAPS)


def fft_conv(
    u: Float[Tensor, "batch pos channel"], kernel: Float[Tensor, "channel lag"]
) -> Float[Tensor, "batch pos channel"]:
    """y_i = Σ_{j≤i} kernel_{i−j} u_j by FFT, on any device and in any precision that torch has an FFT for."""
    y: Tensor = _FFTConv.apply(u, _cut_to(kernel, u.shape[1]))  # type: ignore[no-untyped-call]
    return y


@opaque
def direct_conv(
    u: Float[Tensor, "batch pos channel"],
    kernel: Float[Tensor, "channel lag"],
    bias: Float[Tensor, " channel"] | None = None,
) -> Float[Tensor, "batch pos channel"]:
    """y_i = Σ_{j≤i} kernel_{i−j} u_j + bias tap by tap: Numba, float32 on a CPU only."""
    _check(u, kernel, bias)
    y: Tensor = _DirectConv.apply(u, kernel, bias)  # type: ignore[no-untyped-call]
    return y


def _cut_to(kernel: Float[Tensor, "channel lag"], length: int) -> Float[Tensor, "channel pos"]:
    """The filter's first `length` taps, with zeros where it is shorter."""
    return F.pad(kernel, (0, length - kernel.shape[1]))


def _check(u: Tensor, kernel: Tensor, bias: Tensor | None) -> None:
    """The loop does not check its indices, so every shape must fit and every number be a float32 before it starts."""
    channels = u.shape[-1]
    if u.ndim != 3 or kernel.ndim != 2 or len(kernel) != channels:
        raise ValueError(
            f"u is [batch, pos, channel] and kernel is [channel, lag], not {list(u.shape)} and {list(kernel.shape)}"
        )
    if bias is not None and tuple(bias.shape) != (channels,):
        raise ValueError(f"bias is {list(bias.shape)}, expected {[channels]}")
    for name, tensor in {"u": u, "kernel": kernel, "bias": bias}.items():
        if tensor is not None and (tensor.dtype != torch.float32 or tensor.device.type != "cpu"):
            raise ValueError(f"{name} is {tensor.dtype} on {tensor.device}, expected float32 on a CPU")


class _FFTConv(torch.autograd.Function):
    """Six real FFTs for both directions, where autograd's rfft goes through complex ones. Differentiable once."""

    @staticmethod
    def forward(ctx: Any, u: Tensor, kernel: Tensor) -> Tensor:
        length = u.shape[1]
        size = 1 << (2 * length - 2).bit_length()  # at least 2 length − 1
        spectrum_u = torch.fft.rfft(u.transpose(1, 2).contiguous(), size)
        spectrum_k = torch.fft.rfft(kernel.contiguous(), size)
        y: Tensor = torch.fft.irfft(spectrum_u * spectrum_k, size)[..., :length]
        ctx.save_for_backward(spectrum_u, spectrum_k)
        ctx.size = size
        return y.transpose(1, 2)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:  # type: ignore[override]
        spectrum_u, spectrum_k = ctx.saved_tensors
        length = grad.shape[1]
        spectrum_g = torch.fft.rfft(grad.transpose(1, 2).contiguous(), ctx.size)
        grad_u = grad_kernel = None
        if ctx.needs_input_grad[0]:
            grad_u = torch.fft.irfft(spectrum_g * spectrum_k.conj(), ctx.size)[..., :length].transpose(1, 2)
        if ctx.needs_input_grad[1]:
            summed = (spectrum_g * spectrum_u.conj()).sum(0)
            grad_kernel = torch.fft.irfft(summed, ctx.size)[..., :length]
        return grad_u, grad_kernel


class _DirectConv(torch.autograd.Function):
    """Saves the inputs only. Differentiable once."""

    @staticmethod
    def forward(ctx: Any, u: Tensor, kernel: Tensor, bias: Tensor | None) -> Tensor:
        channels = u.shape[-1]
        u, taps = pad_last(u), pad_last(kernel.T)
        y = torch.empty_like(u)
        offset = taps.new_zeros(taps.shape[1]) if bias is None else pad_last(bias)
        _conv_forward(u.numpy(), taps.numpy(), offset.numpy(), y.numpy())
        ctx.save_for_backward(u, taps)
        return y[..., :channels]

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:  # type: ignore[override]
        u, taps = ctx.saved_tensors
        channels = grad.shape[-1]
        grad_u = torch.empty_like(u)
        grad_taps = u.new_empty(len(u), *taps.shape)
        grad_bias = u.new_empty(len(u), taps.shape[1])
        arrays = (u, taps, pad_last(grad), grad_u, grad_taps, grad_bias)
        _conv_backward(*(a.numpy() for a in arrays))
        return (
            grad_u[..., :channels],
            grad_taps.sum(0)[:, :channels].T,
            grad_bias.sum(0)[:channels] if ctx.needs_input_grad[2] else None,
        )


@task
def _filter(taps, x, front, length, y):  # type: ignore[no-untyped-def]
    """y_i ← y_i + Σ_t taps_t x_{i−t} for one vector of channels; x has `front` zero rows before position 0.

    Four positions at a time, so that each tap is loaded once for all of them; x and y have rows to spare at the end.
    """
    for i in range(0, length, 4):
        y0, y1, y2, y3 = load(y, (i, 0)), load(y, (i + 1, 0)), load(y, (i + 2, 0)), load(y, (i + 3, 0))
        for t in range(min(len(taps), i + 4)):
            tap, at = load(taps, (t, 0)), front + i - t
            y0 = y0 + tap * load(x, (at, 0))
            y1 = y1 + tap * load(x, (at + 1, 0))
            y2 = y2 + tap * load(x, (at + 2, 0))
            y3 = y3 + tap * load(x, (at + 3, 0))
        store(y, (i, 0), y0)
        store(y, (i + 1, 0), y1)
        store(y, (i + 2, 0), y2)
        store(y, (i + 3, 0), y3)


@task
def _correlate(x, front, g, length, out):  # type: ignore[no-untyped-def]
    """out_t ← Σ_i g_i x_{i−t}, four lags at a time; out has rows to spare at the end."""
    zero = splat(0.0)
    for t in range(0, len(out), 4):
        s0, s1, s2, s3 = zero, zero, zero, zero
        for i in range(t, length):
            grad, at = load(g, (i, 0)), front + i - t
            s0 = s0 + grad * load(x, (at, 0))
            s1 = s1 + grad * load(x, (at - 1, 0))
            s2 = s2 + grad * load(x, (at - 2, 0))
            s3 = s3 + grad * load(x, (at - 3, 0))
        store(out, (t, 0), s0)
        store(out, (t + 1, 0), s1)
        store(out, (t + 2, 0), s2)
        store(out, (t + 3, 0), s3)


@task
def _forward_channels(b, first, last, x, taps, bias, y):  # type: ignore[no-untyped-def]
    length, width = x.shape[1], len(taps)
    rows = (length + 3) // 4 * 4
    column = np.zeros((rows + 4, LANES), np.float32)  # 4 zero rows: a tap reaches at most 3 before position 0
    filtered = np.empty((rows, LANES), np.float32)
    weights = np.empty((width, LANES), np.float32)
    for c in range(first, last, LANES):
        offset = load(bias, (c,))
        for t in range(width):
            store(weights, (t, 0), load(taps, (t, c)))
        for i in range(length):
            store(column, (i + 4, 0), load(x, (b, i, c)))
        for i in range(rows):
            store(filtered, (i, 0), offset)
        _filter(weights, column, 4, length, filtered)
        for i in range(length):
            store(y, (b, i, c), load(filtered, (i, 0)))


@kernel
def _conv_forward(x, taps, bias, y):  # type: ignore[no-untyped-def]
    batch, _, channels = x.shape
    blocks = (channels + _BLOCK - 1) // _BLOCK
    for item in prange(batch * blocks):
        first = item % blocks * _BLOCK
        _forward_channels(item // blocks, first, min(first + _BLOCK, channels), x, taps, bias, y)


@task
def _backward_channels(b, first, last, x, taps, g, gx, gtaps, gbias):  # type: ignore[no-untyped-def]
    """∂x is the filter run over ∂y backwards in time, ∂taps the correlation of ∂y with x."""
    length, width = x.shape[1], len(taps)
    rows, lags = (length + 3) // 4 * 4, (width + 3) // 4 * 4
    column = np.zeros((rows + 4, LANES), np.float32)
    grads = np.empty((length, LANES), np.float32)
    backwards = np.zeros((rows + 4, LANES), np.float32)
    filtered = np.empty((rows, LANES), np.float32)
    weights = np.empty((width, LANES), np.float32)
    sums = np.empty((lags, LANES), np.float32)
    zero = splat(0.0)
    for c in range(first, last, LANES):
        total = zero
        for t in range(width):
            store(weights, (t, 0), load(taps, (t, c)))
        for i in range(length):
            grad = load(g, (b, i, c))
            total = total + grad
            store(grads, (i, 0), grad)
            store(backwards, (length - 1 - i + 4, 0), grad)
            store(column, (i + 4, 0), load(x, (b, i, c)))
        store(gbias, (b, c), total)
        for i in range(rows):
            store(filtered, (i, 0), zero)
        _filter(weights, backwards, 4, length, filtered)
        for i in range(length):
            store(gx, (b, i, c), load(filtered, (length - 1 - i, 0)))
        _correlate(column, 4, grads, length, sums)
        for t in range(width):
            store(gtaps, (b, t, c), load(sums, (t, 0)))


@kernel
def _conv_backward(x, taps, g, gx, gtaps, gbias):  # type: ignore[no-untyped-def]
    batch, _, channels = x.shape
    blocks = (channels + _BLOCK - 1) // _BLOCK
    for item in prange(batch * blocks):
        first = item % blocks * _BLOCK
        _backward_channels(item // blocks, first, min(first + _BLOCK, channels), x, taps, g, gx, gtaps, gbias)
