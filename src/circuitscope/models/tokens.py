"""Token numbers in any form, as the tensor [batch, pos] that models read."""

from typing import Any, TypeAlias

import torch
from jaxtyping import Int
from torch import Tensor

from circuitscope.errors import UserError, described

TokensLike: TypeAlias = Any
"""A tensor, an array or lists of whole numbers: [batch, pos], or [pos] for a batch of one sequence."""


def as_tokens(tokens: TokensLike, device: torch.device | None = None) -> Int[Tensor, "batch pos"]:
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
