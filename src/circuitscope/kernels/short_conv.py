"""Depthwise convolution over a few positions, causal or with some taps ahead, the token shift, and their matrices.

The reference is short_conv_reference, torch's own grouped conv1d, which also computes on a GPU and in float64. The fast
path is long_conv's loop over taps, which keeps channels last, so that nothing is transposed.
"""

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from circuitscope.kernels.long_conv import direct_conv, takes_direct_path, toeplitz


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
    ahead: int = 0,
) -> Float[Tensor, "batch pos channel"]:
    """y_i = Σ_{t<w} weight[:, w−1−t] x_{i+ahead−t} + bias, with x zero outside the sequence.

    Without taps `ahead`, the last tap of `weight` is for the current position, as in torch's conv1d, so published
    weights load unchanged once their middle axis of size 1 is dropped. The fast path is differentiable once.
    """
    if ahead:
        return short_conv(F.pad(x, (0, 0, 0, ahead)), weight, bias)[:, ahead:]
    if takes_direct_path(x, weight.shape[1]):
        return direct_conv(x, weight.flip(1), bias)
    return short_conv_reference(x, weight, bias)


def short_conv_steps(
    x: Float[Tensor, "batch pos channel"],
    weight: Float[Tensor, "channel width"],
    bias: Float[Tensor, " channel"] | None,
    before: Float[Tensor, "batch tail channel"],
) -> tuple[Float[Tensor, "batch pos channel"], Float[Tensor, "batch tail channel"]]:
    """The causal conv of a sequence that goes on: y, and the last width − 1 inputs, which `before` holds for x."""
    seen = torch.cat([before, x], dim=1)
    y = F.conv1d(seen.mT, weight[:, None], bias, groups=len(weight)).mT
    return y, seen[:, x.shape[1] :].clone()  # a copy, so that the rest of a long chunk is not kept with it


def short_conv_phi(
    weight: Float[Tensor, "channel width"], length: int, ahead: int = 0
) -> Float[Tensor, "channel dest src"]:
    """Φ_ij = weight[:, w−1−(i+ahead−j)] for 0 ≤ i+ahead−j < w, else 0: banded, without the bias.

    It is lower-triangular if no tap is ahead.
    """
    return toeplitz(weight.flip(1), length + ahead)[:, ahead:, :length]


def token_shift(x: Float[Tensor, "batch pos channel"]) -> Float[Tensor, "batch pos channel"]:
    """y_i = x_{i−1}, and zero at the first position."""
    return F.pad(x, (0, 0, 1, 0))[:, :-1]


def token_shift_phi(
    length: int, *, dtype: torch.dtype | None = None, device: torch.device | None = None
) -> Float[Tensor, "dest src"]:
    """The matrix of token_shift: ones just below the diagonal."""
    return torch.ones(max(length - 1, 0), dtype=dtype, device=device).diag(-1)[:length, :length]
