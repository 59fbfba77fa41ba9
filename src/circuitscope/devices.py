"""What differs from device to device: the widest numbers it has, and how values come from it to the CPU.

On a GPU every transfer waits until all that was asked of the GPU is done. Code that reads a model therefore computes
everything of a batch where the model is and brings it to the CPU by one call of `on_cpu`.
"""

from collections.abc import Sequence

import torch
from jaxtyping import Shaped
from torch import Tensor

WITHOUT_FLOAT64 = {"mps"}  # types of devices that have nothing wider than float32


def widest(device: torch.device) -> torch.dtype:
    """float64, except on devices that do not have it."""
    return torch.float32 if device.type in WITHOUT_FLOAT64 else torch.float64


def widened(x: Shaped[Tensor, "*shape"]) -> Shaped[Tensor, "*shape"]:
    """The tensor in the widest numbers of its device."""
    return x.to(widest(x.device))


def on_cpu(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The tensors on the CPU, without gradients, by one transfer for all; those that are there stay as they are."""
    found = [tensor.detach() for tensor in tensors]
    away = [i for i, tensor in enumerate(found) if tensor.device.type != "cpu"]
    if not away:
        return found
    away.sort(key=lambda i: -found[i].element_size())  # the widest numbers first, so that all begin where they may
    pieces = [found[i].flatten().view(torch.uint8) for i in away]
    moved = torch.cat(pieces).cpu().split([len(piece) for piece in pieces])
    for i, piece in zip(away, moved, strict=True):
        found[i] = piece.view(found[i].dtype).view(found[i].shape)
    return found
