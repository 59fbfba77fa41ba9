"""Packs mixing matrices into so few bytes that a report can carry them.

An entry takes 8 bits. With m the largest |M_ij| of a matrix, the code q = round(n · sign(M_ij) · (|M_ij| / m)^(1/p))
is stored, only for i ≥ j. Rows of shares have n = 254 and p = 1; Φ spans orders of magnitude and has p = 2, with
n = 127 where it is signed. One code is reserved for entries that are not finite.
"""

import base64
import zlib
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, UInt8
from torch import Tensor

from circuitscope.analysis.pictures.at_checkpoints import Snapshot
from circuitscope.analysis.pictures.choice import Entries, View

Codes = UInt8[np.ndarray, " entry"]


class Code(NamedTuple):
    """How entries of one kind are stored: `levels` is n, the codes on one side of 0, and `power` is p."""

    levels: int
    power: int
    signed: bool
    words: str


CODES: dict[Entries, Code] = {
    "shares": Code(254, 1, False, "A matrix whose rows are shares"),
    "signed": Code(127, 2, True, "Φ"),
    "sizes": Code(254, 2, False, "A mean of |Φ|"),
}


class PackedMatrices:
    """The matrices of one run: `add` them checkpoint by checkpoint, then take `stored`."""

    def __init__(self, views: Sequence[View]):
        self.views = list(views)
        self.error: dict[Entries, float] = {}
        self._scales: list[list[Float[np.ndarray, " example"]]] = [[] for _ in self.views]
        self._codes: list[list[bytes]] = [[] for _ in self.views]

    def add(self, snapshot: Snapshot) -> None:
        """Adds the matrices of a checkpoint."""
        for index, view in enumerate(self.views):
            parts = [packed(matrix, view.entries) for matrix in snapshot.matrices[view]]
            self.error[view.entries] = max(self.error.get(view.entries, 0.0), *(error for _, _, error in parts))
            self._scales[index].append(np.array([scale for scale, _, _ in parts], dtype=np.float32))
            self._codes[index].append(b"".join(codes.tobytes() for _, codes, _ in parts))

    def stored(self) -> list[str]:
        """Each view as text: base64 of zlib of the scales [step, example], then the codes [step, example, entry]."""
        return [
            base64.b64encode(zlib.compress(np.stack(scales).astype("<f4").tobytes() + b"".join(codes), 6)).decode()
            for scales, codes in zip(self._scales, self._codes, strict=True)
        ]


def packed(matrix: Float[Tensor, "dest src"], entries: Entries) -> tuple[float, Codes, float]:
    """(m, codes of the causal half row by row, the largest error as a share of m)."""
    code = CODES[entries]
    rows, columns = np.tril_indices(matrix.shape[0])
    values = matrix.numpy()[rows, columns].astype(np.float64)
    finite = np.isfinite(values)
    scale = float(np.abs(values, where=finite, out=np.zeros_like(values)).max())
    shares = np.where(finite, values, 0.0) / (scale or 1.0)
    codes = np.rint(code.levels * np.sign(shares) * np.abs(shares) ** (1 / code.power))
    back = np.sign(codes) * np.abs(codes / code.levels) ** code.power
    error = float(np.abs(back - shares).max())
    if code.signed:
        return scale, np.where(finite, codes, -128).astype(np.int8).view(np.uint8), error
    return scale, np.where(finite, codes, 255).astype(np.uint8), error


def unpacked(scale: float, codes: Codes, entries: Entries) -> Float[np.ndarray, " entry"]:
    """The entries that `packed` stored, as the page reads them."""
    code = CODES[entries]
    numbers = codes.view(np.int8).astype(np.float64) if code.signed else codes.astype(np.float64)
    lost = numbers == (-128 if code.signed else 255)
    values = scale * np.sign(numbers) * np.abs(numbers / code.levels) ** code.power
    return np.where(lost, np.nan, values)
