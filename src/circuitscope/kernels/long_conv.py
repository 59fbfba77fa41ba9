"""Causal convolution with a filter as long as the sequence, by FFT, and its Toeplitz matrix.

Reference: long_conv_reference, the Toeplitz matrix times u. Measured on a CPU the FFT is faster than that product
from about length 64 up and no slower worth naming below it, so there is one fast path. Filters of a few taps live in
short_conv.
"""

from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor


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
    """y_i = Σ_{j≤i} kernel_{i−j} u_j + skip u_i by FFT, padded so that nothing wraps around.

    The filter may be shorter or longer than the sequence; taps past the sequence are not used.
    """
    y: Tensor = _LongConv.apply(u, _cut_to(kernel, u.shape[1]))  # type: ignore[no-untyped-call]
    return y if skip is None else torch.addcmul(y, u, skip)


def _cut_to(kernel: Float[Tensor, "channel lag"], length: int) -> Float[Tensor, "channel pos"]:
    """The filter's first `length` taps, with zeros where it is shorter."""
    return F.pad(kernel, (0, length - kernel.shape[1]))


class _LongConv(torch.autograd.Function):
    """Six real FFTs for both directions, where autograd's rfft goes through complex ones. Differentiable once."""

    @staticmethod
    def forward(ctx: Any, u: Tensor, kernel: Tensor) -> Tensor:
        length = u.shape[1]
        size = 1 << (2 * length - 2).bit_length()  # at least 2 length − 1
        spectrum_u = torch.fft.rfft(u.transpose(1, 2).contiguous(), size)
        spectrum_k = torch.fft.rfft(kernel.contiguous(), size)
        y = torch.fft.irfft(spectrum_u * spectrum_k, size)[..., :length]
        ctx.save_for_backward(spectrum_u, spectrum_k)
        ctx.size = size
        return y.transpose(1, 2)

    @staticmethod
    @torch.autograd.function.once_differentiable
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
