"""What models read, in any form, as a tensor: token numbers [batch, pos], or vectors [batch, pos, channel]."""

from typing import Any, TypeAlias

import torch
from jaxtyping import Float, Int
from torch import Tensor

from circuitscope.errors import UserError, described

InputsLike: TypeAlias = Any
"""A tensor, an array or lists: whole numbers [batch, pos], or [pos] for a batch of one sequence; or vectors, which have
one more axis, [batch, pos, channel]."""


def as_tokens(tokens: InputsLike, device: torch.device | None = None) -> Int[Tensor, "batch pos"]:
    """Token numbers as a tensor [batch, pos], on a device if one is given; one sequence is a batch of one."""
    try:
        out = torch.as_tensor(tokens, device=device)
    except (TypeError, ValueError, RuntimeError):
        out = None
    if out is None or out.ndim not in (1, 2) or out.dtype == torch.bool or out.is_floating_point() or out.is_complex():
        raise UserError(f"expected token numbers [batch, pos], such as batch.tokens, got {described(tokens)}")
    if out.shape[-1] == 0:
        raise UserError(f"expected at least one token per sequence, got {described(tokens)}")
    out = out.long()
    return out[None] if out.ndim == 1 else out


def as_vectors(
    vectors: InputsLike, width: int, device: torch.device | None = None, dtype: torch.dtype | None = None
) -> Float[Tensor, "batch pos channel"]:
    """Vectors of a width as a tensor [batch, pos, channel], on a device if one is given; one sequence is a batch."""
    try:
        out = torch.as_tensor(vectors, device=device)
    except (TypeError, ValueError, RuntimeError):
        out = None
    if out is None or out.ndim not in (2, 3) or not out.is_floating_point():
        raise UserError(f"expected vectors [batch, pos, {width}], such as batch.inputs, got {described(vectors)}")
    if out.shape[-1] != width or out.shape[-2] == 0:
        raise UserError(f"expected vectors of width {width}, at least one per sequence, got {described(vectors)}")
    out = out if dtype is None else out.to(dtype)
    return out[None] if out.ndim == 2 else out
