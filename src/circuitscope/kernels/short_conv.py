"""Causal depthwise convolution over a few positions, the token shift, and their matrices.

Reference: short_conv_reference, torch's own grouped conv1d. The fast path stays channels-last, so nothing is
transposed, and sums w shifted products in place. Long filters live in long_conv.
"""

from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from circuitscope.kernels.long_conv import toeplitz


def short_conv_reference(
    x: Float[Tensor, "batch pos channel"],
    weight: Float[Tensor, "channel width"],
    bias: Float[Tensor, " channel"] | None = None,
) -> Float[Tensor, "batch pos channel"]:
    """y_i = Σ_{t<w} weight[:, w−1−t] x_{i−t} + bias by F.conv1d with one group per channel."""
    padded = F.pad(x.transpose(1, 2), (weight.shape[1] - 1, 0))
    return F.conv1d(padded, weight[:, None], bias, groups=weight.shape[0]).transpose(1, 2)


def short_conv(
    x: Float[Tensor, "batch pos channel"],
    weight: Float[Tensor, "channel width"],
    bias: Float[Tensor, " channel"] | None = None,
) -> Float[Tensor, "batch pos channel"]:
    """y_i = Σ_{t<w} weight[:, w−1−t] x_{i−t} + bias, with x zero before the first position.

    The last tap of `weight` is the current position, as in torch's conv1d, so published weights load unchanged
    after dropping their middle axis of size 1.
    """
    if x.device.type != "cpu":
        return short_conv_reference(x, weight, bias)
    y: Tensor = _ShortConv.apply(x, weight, bias)  # type: ignore[no-untyped-call]
    return y


class _ShortConv(torch.autograd.Function):
    """Keeps only x and the weight; one pass over memory per tap in both directions. Differentiable once."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        length, taps = x.shape[1], weight.t().contiguous().flip(0)  # taps[t] weighs x_{i−t}
        y = x * taps[0] if bias is None else torch.addcmul(bias, x, taps[0])
        for t in range(1, min(len(taps), length)):
            y[:, t:].addcmul_(x[:, : length - t], taps[t])
        ctx.save_for_backward(x, taps)
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:  # type: ignore[override]
        x, taps = ctx.saved_tensors
        length, reach = x.shape[1], min(len(taps), x.shape[1])
        grad_x = grad_weight = None
        if ctx.needs_input_grad[0]:
            grad_x = grad * taps[0]
            for t in range(1, reach):
                grad_x[:, : length - t].addcmul_(grad[:, t:], taps[t])
        if ctx.needs_input_grad[1]:
            grad_taps = torch.zeros_like(taps)
            product = torch.empty(grad.shape, dtype=grad.dtype, device=grad.device)
            for t in range(reach):
                kept = product[:, : length - t]
                torch.mul(grad[:, t:], x[:, : length - t], out=kept)
                grad_taps[t] = kept.sum((0, 1))
            grad_weight = grad_taps.flip(0).t()
        return grad_x, grad_weight, grad.sum((0, 1)) if ctx.needs_input_grad[2] else None


def short_conv_phi(weight: Float[Tensor, "channel width"], length: int) -> Float[Tensor, "channel dest src"]:
    """Φ_ij = weight[:, w−1−(i−j)] for 0 ≤ i−j < w, else 0: banded, lower-triangular, without the bias."""
    return toeplitz(weight.flip(1), length)


def token_shift(x: Float[Tensor, "batch pos channel"]) -> Float[Tensor, "batch pos channel"]:
    """y_i = x_{i−1}, and zero at the first position."""
    return F.pad(x, (0, 0, 1, 0))[:, :-1]


def token_shift_phi(
    length: int, *, dtype: torch.dtype | None = None, device: torch.device | None = None
) -> Float[Tensor, "dest src"]:
    """The matrix of token_shift: ones just below the diagonal."""
    return torch.ones(max(length - 1, 0), dtype=dtype, device=device).diag(-1)[:length, :length]
