"""What differs from device to device: the widest numbers it has, and how values come from it to the CPU.

On a GPU every transfer waits until all that was asked of the GPU is done. Code that reads a model therefore computes
everything of a batch where the model is and brings it to the CPU by one call of `on_cpu`. Where several functions read
the same batch, they hand their numbers to one `Transfer`.
"""

from collections.abc import Callable, Sequence
from types import TracebackType

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


class Transfer:
    """Collects what is to come to the CPU, each with what to do with it there, and moves all of it at once.

        with Transfer() as transfer:
            for layer in range(layers):
                transfer.then([scores_of(layer)], lambda here: print(here[0].mean()))

    The functions are called in the order in which they were given, at the latest when the block ends. What is on the
    CPU already does not pile up: it is used as it comes. On any other device at most `most` bytes are held; more than
    that take more than one transfer.
    """

    def __init__(self, most: float = 1e9):
        self.most = most
        self._held: list[tuple[list[Tensor], Callable[[list[Tensor]], None]]] = []
        self._away = 0  # bytes that are held and not on the CPU

    def then(self, tensors: Sequence[Tensor], use: Callable[[list[Tensor]], None]) -> None:
        """Calls `use` with these tensors when they have come to the CPU."""
        self._held.append(([tensor.detach() for tensor in tensors], use))
        self._away += sum(x.numel() * x.element_size() for x in tensors if x.device.type != "cpu")
        if not 0 < self._away <= self.most:
            self.arrive()

    def arrive(self) -> None:
        """Moves what is held, and uses it."""
        coming, self._held, self._away = self._held, [], 0
        here = iter(on_cpu([tensor for tensors, _ in coming for tensor in tensors]))
        for tensors, use in coming:
            use([next(here) for _ in tensors])

    def __enter__(self) -> "Transfer":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.arrive()
