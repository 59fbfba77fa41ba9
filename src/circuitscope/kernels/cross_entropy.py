"""Cross-entropy of a linear read-out, with the softmax turned into its own gradient in place.

The reference is F.cross_entropy(F.linear(x, weight), target), which makes five arrays of size
[label, vocab]. This version makes one. On a CPU, with a vocabulary of thousands of tokens, these arrays are
most of the cost of the loss.
"""

from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from circuitscope.kernels.once import differentiable_once


def linear_cross_entropy(
    x: Float[Tensor, "label d_model"],
    weight: Float[Tensor, "vocab d_model"],
    target: Int[Tensor, " label"],
) -> Float[Tensor, ""]:
    """Mean over labels of −log softmax(x Wᵀ)[target]."""
    if x.device.type != "cpu":
        return F.cross_entropy(F.linear(x, weight).float(), target)
    loss: Tensor = _LinearCrossEntropy.apply(x, weight, target)  # type: ignore[no-untyped-call]
    return loss


class _LinearCrossEntropy(torch.autograd.Function):
    """The forward pass keeps p − onehot; the backward pass is two matrix products. Differentiable once."""

    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu", cast_inputs=torch.float32)  # type: ignore[untyped-decorator]
    def forward(ctx: Any, x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        p = x @ weight.T
        p -= p.amax(dim=1, keepdim=True)
        chosen = p.gather(1, target[:, None])
        p.exp_()
        total = p.sum(dim=1, keepdim=True)
        loss = (total.log() - chosen).mean()
        p /= total
        p.scatter_add_(1, target[:, None], torch.full_like(chosen, -1.0))
        ctx.save_for_backward(x, weight, p)
        return loss

    @staticmethod
    @differentiable_once
    @torch.amp.custom_bwd(device_type="cpu")  # type: ignore[untyped-decorator]
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:  # type: ignore[override]
        x, weight, p = ctx.saved_tensors
        grad = grad / len(p)
        return (p @ weight) * grad, (p.T @ x).mul_(grad), None
