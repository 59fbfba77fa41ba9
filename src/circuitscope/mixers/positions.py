"""Positional encodings: added to the stream (learned, sinusoidal) or inside a mixer (rope, alibi)."""

import torch
from jaxtyping import Float
from torch import Tensor

from circuitscope.errors import UserError


def sinusoidal(length: int, d_model: int) -> Float[Tensor, "pos d_model"]:
    """PE[t, 2i] = sin(t / 10000^(2i/d)), PE[t, 2i+1] = cos(the same)."""
    angle = torch.arange(length)[:, None] * 10000.0 ** (-torch.arange(0, d_model, 2) / d_model)
    table = torch.zeros(length, d_model)
    table[:, 0::2] = angle.sin()
    table[:, 1::2] = angle.cos()[:, : d_model // 2]
    return table


def check_rotates(size: int, what: str) -> None:
    """Refuses to rotate vectors of an odd size."""
    if size % 2:
        raise UserError(f"rope needs an even {what}, got {size}; nearest: {size + 1}")


def rotate(x: Float[Tensor, "batch pos *head d_head"], first: int = 0) -> Float[Tensor, "batch pos *head d_head"]:
    """RoPE with base 10000: it rotates the first half against the second, so that positions enter q·k only as i − j.

    Args:
        first: the position of x[:, 0].
    """
    half = x.shape[-1] // 2
    rate = 10000.0 ** (-torch.arange(half, device=x.device, dtype=torch.float32) / half)
    angle = torch.arange(first, first + x.shape[1], device=x.device, dtype=torch.float32)[:, None] * rate
    angle = angle.view(x.shape[1], *(1,) * (x.ndim - 3), half)
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


def alibi(n_heads: int, length: int, device: torch.device, first: int = 0) -> Float[Tensor, "head dest src"]:
    """Bias −m_h (dest − src) with slopes m_h = 2^(−8 (h+1) / n_heads), for dest from `first` on."""
    slope = 2.0 ** (-8.0 * torch.arange(1, n_heads + 1, device=device) / n_heads)
    at = torch.arange(length, device=device)
    return -slope[:, None, None] * (at[first:, None] - at)
