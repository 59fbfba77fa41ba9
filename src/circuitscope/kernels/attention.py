"""Causal softmax attention: the plain scores, and the fused kernel, which is chosen by device and dtype."""

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from circuitscope.kernels.backends import FLASH_ATTN


def causal_scores(
    q: Float[Tensor, "batch dest head d_head"],
    k: Float[Tensor, "batch src head d_head"],
    bias: Float[Tensor, "head dest src"] | None = None,
) -> Float[Tensor, "batch head dest src"]:
    """QKᵀ/√d + bias with −∞ above the diagonal; softmax of this is the pattern.

    Where there are fewer queries than keys, the queries are those of the last positions.
    """
    scores: Tensor = torch.einsum("bihd,bjhd->bhij", q, k) * q.shape[-1] ** -0.5
    if bias is not None:
        scores = scores + bias
    future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1 + k.shape[1] - q.shape[1])
    return scores.masked_fill_(future, float("-inf"))


def fused_attention(
    q: Float[Tensor, "batch pos head d_head"],
    k: Float[Tensor, "batch pos head d_head"],
    v: Float[Tensor, "batch pos head d_head"],
    bias: Float[Tensor, "head dest src"] | None = None,
) -> Float[Tensor, "batch pos head d_head"]:
    """softmax(causal(QKᵀ/√d + bias)) V, without building the pattern.

    On a GPU, in half precision and without a bias, flash-attn computes it if it is available; otherwise torch's
    scaled_dot_product_attention does.
    """
    if FLASH_ATTN.serves(q, d_head=q.shape[-1], bias=bias is not None):
        out: Tensor = FLASH_ATTN(q, k, v, causal=True, deterministic=torch.are_deterministic_algorithms_enabled())
        return out
    mask = None
    if bias is not None:
        future = bias.new_ones(bias.shape[-2:], dtype=torch.bool).triu(1)
        mask = bias.masked_fill(future, float("-inf")).to(q.dtype)[None]
    z = F.scaled_dot_product_attention(
        q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), attn_mask=mask, is_causal=mask is None
    )
    return z.transpose(1, 2)
