"""What differs from device to device: its name, the widest numbers it has, and how values come from it to the CPU.

`reading_on` says where models are loaded to be read; without it that is the CPU.

On a GPU every transfer waits until all that was asked of the GPU is done. Code that reads a model therefore computes
everything of a batch where the model is and brings it to the CPU by one call of `on_cpu`. Where several functions read
the same batch, they hand their numbers to one `Transfer`.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from types import TracebackType
from typing import Any

import torch
from jaxtyping import Shaped
from torch import Tensor

from circuitscope.errors import UserError, unknown

_CPU = torch.device("cpu")
_reading: ContextVar[torch.device] = ContextVar("where models are loaded to be read", default=_CPU)
WITHOUT_FLOAT64 = {"mps"}  # types of devices that have nothing wider than float32


def choose_device(name: str, order: Sequence[str] = ("cuda", "mps", "cpu")) -> torch.device:
    """The device of that name; `auto` is the first of `order` that is available."""
    have = {"cpu": True, "cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    if name == "auto":
        return torch.device(next(d for d in order if have[d]))
    if name not in have:
        raise unknown("device", name, ["auto", *have])
    if not have[name]:
        present = ", ".join(d for d, there in have.items() if there)
        raise UserError(f"device '{name}' is not available; this machine has: {present}")
    return torch.device(name)


@contextmanager
def reading_on(device: torch.device | str = "auto") -> Iterator[torch.device]:
    """Inside, models are loaded onto this device to be read, so `analyze`, `probe` and others compute there.

        with circuitscope.reading_on("cuda"):
            table = circuitscope.analyze("runs/NAME")

    Numbers agree with those of the CPU up to rounding: everything is computed in the format of the weights, float32.
    A table that is kept records where each checkpoint was read.

    Args:
        device: a device, or its name; "auto" is CUDA if available, otherwise the CPU. Apple's GPU has to be asked for.
    """
    chosen = choose_device(device, ("cuda", "cpu")) if isinstance(device, str) else device
    before = _reading.set(chosen)
    try:
        with whole_float32():
            yield chosen
    finally:
        _reading.reset(before)


def reading_device() -> torch.device:
    """Where models are loaded to be read."""
    return _reading.get()


@contextmanager
def whole_float32() -> Iterator[None]:
    """Inside, cuDNN multiplies float32 as float32; by itself it drops 13 bits in LSTMs and convs (TF32)."""
    cudnn: Any = torch.backends.cudnn
    if not hasattr(cudnn, "rnn"):  # torch before 2.9
        before, cudnn.allow_tf32 = cudnn.allow_tf32, False
        try:
            yield
        finally:
            cudnn.allow_tf32 = before
        return
    parts = (cudnn.rnn, cudnn.conv)
    formats = [part.fp32_precision for part in parts]
    try:
        for part in parts:
            part.fp32_precision = "ieee"
        yield
    finally:
        for part, was in zip(parts, formats, strict=True):
            part.fp32_precision = was


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
