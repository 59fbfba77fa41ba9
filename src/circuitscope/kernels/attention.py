"""Causal softmax attention: the plain reference, and the fused call chosen by device and dtype."""

from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor


def causal_scores(
    q: Float[Tensor, "batch dest head d_head"],
    k: Float[Tensor, "batch src head d_head"],
    bias: Float[Tensor, "head dest src"] | None = None,
) -> Float[Tensor, "batch head dest src"]:
    """QKᵀ/√d + bias with −∞ above the diagonal; softmax of this is the pattern."""
    scores: Tensor = torch.einsum("bihd,bjhd->bhij", q, k) * q.shape[-1] ** -0.5
    if bias is not None:
        scores = scores + bias
    future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
    return scores.masked_fill_(future, float("-inf"))


def fused_attention(
    q: Float[Tensor, "batch pos head d_head"],
    k: Float[Tensor, "batch pos head d_head"],
    v: Float[Tensor, "batch pos head d_head"],
    bias: Float[Tensor, "head dest src"] | None = None,
) -> Float[Tensor, "batch pos head d_head"]:
    """softmax(causal(QKᵀ/√d + bias)) V without the pattern.

    On a GPU in half precision and without a bias this is flash-attn where it is installed; otherwise
    torch's scaled_dot_product_attention.
    """
    if bias is None and attention_path(q.device, q.dtype)[0] == "flash-attn":
        try:
            out: Tensor = _flash_attn()(q, k, v, causal=True)
            return out
        except torch.OutOfMemoryError:
            raise
        except Exception:  # a head size or a device it refuses: torch can do it
            pass
    mask = None
    if bias is not None:
        length = q.shape[1]
        mask = bias.masked_fill(torch.ones(length, length, dtype=torch.bool, device=q.device).triu(1), float("-inf"))
        mask = mask.to(q.dtype)[None]
    z = F.scaled_dot_product_attention(
        q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), attn_mask=mask, is_causal=mask is None
    )
    return z.transpose(1, 2)


def attention_path(device: torch.device | str, dtype: torch.dtype) -> tuple[str, str]:
    """The fused path that tensors like these take ("flash-attn" or "torch"), and why."""
    if torch.device(device).type != "cuda":
        return "torch", "scaled_dot_product_attention; flash-attn needs a CUDA device"
    if dtype not in (torch.float16, torch.bfloat16):
        return "torch", f"flash-attn takes half precision, not {str(dtype).removeprefix('torch.')}"
    if _flash_attn() is None:
        return "torch", "flash-attn cannot be imported"
    return "flash-attn", "a CUDA device in half precision, and flash-attn is installed"


def _flash_attn() -> Any:
    """flash-attn's function, or None: without a driver its import fails in many ways."""
    try:
        from flash_attn import flash_attn_func
    except Exception:
        return None
    return flash_attn_func
