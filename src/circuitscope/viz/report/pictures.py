"""Mixing matrices of chosen examples at every checkpoint, small enough to carry in a file.

An entry takes 8 bits. With m the largest |M_ij| of a matrix, q = round(n · sign(M_ij) · (|M_ij| / m)^(1/p)) is
stored, for i ≥ j only. Attention has n = 254 and p = 1; Φ spans orders of magnitude and has p = 2, with n = 127
where it is signed. One code is kept for entries that are not finite.
"""

import base64
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float, UInt8
from torch import Tensor

from circuitscope.analysis.reading.opened import Mixing, Reading
from circuitscope.analysis.scores.rows import Data
from circuitscope.errors import UserError
from circuitscope.models.hooked_lm import HookedLM
from circuitscope.tasks import Batch

BUDGET = 17e6  # bytes of matrices in one report, before they are compressed
RANKED_BY = ("recall", "binding", "induction", "previous_token")


@dataclass(frozen=True)
class Source:
    """One mixing matrix of a layer, as `analysis.matrices` gives it; `shared`: the same for every sequence."""

    layer: int
    factor: str
    of: int
    unit: Literal["head", "channel"]
    shared: bool

    @property
    def signed(self) -> bool:
        return self.factor != "pattern"


@dataclass(frozen=True)
class View:
    """What can be picked: a head or channel of a source, or (none) the mean of |M| over all of them."""

    source: Source
    head: int | None

    @property
    def levels(self) -> int:
        """Codes on one side of 0."""
        return 127 if self.signed else 254

    @property
    def signed(self) -> bool:
        return self.source.signed and self.head is not None

    @property
    def power(self) -> int:
        return 1 if self.source.factor == "pattern" else 2

    @property
    def label(self) -> str:
        """L1H0, channel 25, all 128 channels: mean |Φ|."""
        if self.head is None:
            what = "attention" if self.source.factor == "pattern" else "|Φ|"
            return f"all {self.source.of} {self.source.unit}s: mean {what}"
        return f"L{self.source.layer}H{self.head}" if self.source.unit == "head" else f"channel {self.head}"

    @property
    def title(self) -> str:
        """L1H0; L0 ssm channel 25; L0 ssm, all 128 channels: mean |Φ|."""
        factor = "" if self.source.factor == "pattern" else f" {self.source.factor}"
        if self.head is None:
            return f"L{self.source.layer}{factor}, {self.label}"
        return f"{self.label}{factor}" if self.source.unit == "head" else f"L{self.source.layer}{factor} {self.label}"


@dataclass(frozen=True)
class Examples:
    """Sequences to show: the task's own, then one of repeated blocks where the task has none."""

    own: Batch
    repeats: Batch | None

    @staticmethod
    def of(data: Data, count: int) -> "Examples":
        repeats = None if data.repeats is data.own or data.repeats is None else data.repeats.part(slice(1))
        return Examples(data.own.part(slice(count)), repeats)

    @property
    def lengths(self) -> list[int]:
        own = [self.own.tokens.shape[1]] * len(self.own)
        return own if self.repeats is None else [*own, self.repeats.tokens.shape[1]]

    def described(self) -> list[dict[str, Any]]:
        """Tokens, roles, pairs, queries and labels of every example, as plain data."""
        out = [_described(self.own, row, f"example {row + 1}") for row in range(len(self.own))]
        if self.repeats is not None:
            out.append(_described(self.repeats, 0, "repeated random blocks"))
        return out


@dataclass
class Pictures:
    """The matrices of one run. Step by step: `add`; then `stored`."""

    examples: Examples
    views: list[View]
    steps: list[int] = field(default_factory=list)
    answers: list[list[list[tuple[int, float | None]]]] = field(default_factory=list)
    error: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._scales: list[list[Float[np.ndarray, " example"]]] = [[] for _ in self.views]
        self._codes: list[list[bytes]] = [[] for _ in self.views]
        self._place = {(v.source.layer, v.source.factor, v.head): i for i, v in enumerate(self.views)}

    @torch.no_grad()
    def add(self, step: int, model: HookedLM) -> None:
        """The matrices of a checkpoint, and what it answers."""
        where, target = self.examples.own.labelled()
        reading = Reading(model, self.examples.own.tokens, at=where)
        found = dict(self._chosen(reading))
        if self.examples.repeats is not None:
            for index, extra in self._chosen(Reading(model, self.examples.repeats.tokens)):
                found[index] += extra
        for index, parts in found.items():
            self._scales[index].append(np.array([scale for scale, _ in parts], dtype=np.float32))
            self._codes[index].append(b"".join(code.tobytes() for _, code in parts))
        self.steps.append(step)
        assert reading.logits is not None
        self.answers.append(_answers(reading.logits, target, where, self.examples.own))

    def _chosen(self, reading: Reading) -> Iterator[tuple[int, list[tuple[float, UInt8[np.ndarray, " entry"]]]]]:
        """(view, [(scale, codes) of each example]) of one pass."""
        total: Tensor | None = None
        for mixing in reading:
            start = mixing.heads.start
            for head in range(start, mixing.heads.stop):
                if (index := self._place.get((mixing.layer, mixing.factor, head))) is not None:
                    yield index, self._packed(index, mixing.matrix[:, head - start])
            if (index := self._place.get((mixing.layer, mixing.factor, None))) is not None:
                part = mixing.matrix.abs().sum(dim=1)
                total = part if start == 0 or total is None else total + part
                if mixing.heads.stop == mixing.of:
                    yield index, self._packed(index, total / mixing.of)

    def _packed(
        self, index: int, matrices: Float[Tensor, "example dest src"]
    ) -> list[tuple[float, UInt8[np.ndarray, " entry"]]]:
        view = self.views[index]
        kind = "attention" if view.power == 1 else "Φ" if view.signed else "mean |Φ|"
        out = []
        for matrix in matrices:
            scale, codes, error = packed(matrix, view)
            self.error[kind] = max(self.error.get(kind, 0.0), error)
            out.append((scale, codes))
        return out

    def stored(self) -> list[str]:
        """Each view as text: base64 of zlib of the scales [step, example], then the codes [step, example, entry]."""
        return [
            base64.b64encode(zlib.compress(np.stack(scales).astype("<f4").tobytes() + b"".join(codes), 6)).decode()
            for scales, codes in zip(self._scales, self._codes, strict=True)
        ]


def packed(matrix: Float[Tensor, "dest src"], view: View) -> tuple[float, UInt8[np.ndarray, " entry"], float]:
    """(m, codes of the causal half row by row, the largest error as a share of m)."""
    rows, columns = np.tril_indices(matrix.shape[0])
    entries = matrix.numpy()[rows, columns].astype(np.float64)
    finite = np.isfinite(entries)
    scale = float(np.abs(entries, where=finite, out=np.zeros_like(entries)).max())
    shares = np.where(finite, entries, 0.0) / (scale or 1.0)
    codes = np.rint(view.levels * np.sign(shares) * np.abs(shares) ** (1 / view.power))
    back = np.sign(codes) * np.abs(codes / view.levels) ** view.power
    error = float(np.abs(back - shares).max())
    if view.signed:
        return scale, np.where(finite, codes, -128).astype(np.int8).view(np.uint8), error
    return scale, np.where(finite, codes, 255).astype(np.uint8), error


def unpacked(scale: float, codes: UInt8[np.ndarray, " entry"], view: View) -> Float[np.ndarray, " entry"]:
    """The entries that `packed` stored, as the page reads them."""
    numbers = codes.view(np.int8).astype(np.float64) if view.signed else codes.astype(np.float64)
    lost = numbers == (-128 if view.signed else 255)
    values = scale * np.sign(numbers) * np.abs(numbers / view.levels) ** view.power
    return np.where(lost, np.nan, values)


def sources(model: HookedLM, tokens: Tensor) -> list[Source]:
    """Every mixing matrix that the model shows."""
    found: dict[tuple[int, str], Mixing] = {}
    for mixing in Reading(model, tokens[:2]):
        found.setdefault((mixing.layer, mixing.factor), mixing)
    out = []
    for (layer, factor), mixing in found.items():
        mixer = model.layers[layer].mixer
        unit: Literal["head", "channel"] = "head" if mixing.of == mixer.n_heads and mixer.d_head > 1 else "channel"
        shared = len(mixing.matrix) > 1 and mixing.matrix.stride(0) == 0
        out.append(Source(layer, factor, mixing.of, unit, shared))
    return out


def views(every: Sequence[Source], scores: pd.DataFrame, most: int) -> list[View]:
    """All heads of a source or, of more than `most`, those with the highest scores; and their mean."""
    out = []
    for source in every:
        if source.of > 1:
            out.append(View(source, None))
        heads = range(source.of) if source.of <= most else highest(scores, source, most)
        out += [View(source, head) for head in heads]
    return out


def highest(scores: pd.DataFrame, source: Source, most: int) -> list[int]:
    """Heads in turn from the best of each score in RANKED_BY at the last step."""
    rows = scores[(scores.layer == source.layer) & (scores.factor == source.factor) & scores["head"].notna()]
    rows = rows[(rows.step == rows.step.max()) & (rows.weighting != "signed")]
    orders = [rows[rows.score == s].sort_values("value", ascending=False)["head"].tolist() for s in RANKED_BY]
    in_turn = [int(order[place]) for place in range(source.of) for order in orders if place < len(order)]
    return sorted(dict.fromkeys([*in_turn, *range(source.of)]), key=[*in_turn, *range(source.of)].index)[:most]


@dataclass(frozen=True)
class Need:
    """What the pictures of a run take: its sources, lengths of an own example and of the repeats, checkpoints."""

    sources: list[Source]
    length: int
    extra: int
    steps: int

    def bytes(self, examples: int, channels: int, steps: int) -> int:
        """Of all matrices; those that are the same for all sequences compress to one."""
        half, extra = (n * (n + 1) // 2 for n in (self.length, self.extra))
        total = 0
        for source in self.sources:
            count = min(source.of, channels) + (source.of > 1)
            total += count * ((1 if source.shared else examples) * half + extra)
        return total * min(steps, self.steps)


@dataclass(frozen=True)
class Plan:
    """How many examples, heads or channels of a layer, and checkpoints of a run a report shows."""

    examples: int
    channels: int
    steps: int


def plan(needs: Sequence[Need], examples: int, channels: int) -> Plan:
    """The most that fits the budget: fewer examples first, then fewer channels, then fewer checkpoints."""
    longest = max(need.steps for need in needs)
    tries = [Plan(e, channels, longest) for e in range(examples, 0, -1)]
    tries += [Plan(1, c, longest) for c in range(channels - 1, 0, -1)]
    tries += [Plan(1, 1, s) for s in range(longest - 1, 0, -1)]
    for found in tries:
        if sum(need.bytes(found.examples, found.channels, found.steps) for need in needs) <= BUDGET:
            return found
    raise UserError(
        f"one checkpoint of these runs takes more than the {BUDGET / 1e6:.0f} MB a report has for matrices"
        f" (length {max(need.length for need in needs)}); report fewer runs at a time"
    )


def spread(steps: Sequence[int], most: int) -> list[int]:
    """At most so many of the steps, evenly spaced, first and last among them."""
    if len(steps) <= most:
        return list(steps)
    if most == 1:
        return [steps[-1]]
    return [steps[round(i * (len(steps) - 1) / (most - 1))] for i in range(most)]


def _described(batch: Batch, row: int, name: str) -> dict[str, Any]:
    layout = batch.layout
    out: dict[str, Any] = {
        "name": name,
        "tokens": batch.tokens[row].tolist(),
        "roles": layout.roles[row].tolist(),
        "labels": [[i, token] for i, token in enumerate(batch.labels[row].tolist()) if token >= 0],
        "period": layout.period,
        "pairs": [],
        "queries": [],
    }
    if layout.key_pos is not None and layout.value_pos is not None:
        out["pairs"] = torch.stack([layout.key_pos[row], layout.value_pos[row]], dim=1).tolist()
    if layout.query_pos is not None and layout.query_pair is not None:
        out["queries"] = torch.stack([layout.query_pos[row], layout.query_pair[row]], dim=1).tolist()
    return out


def _answers(
    logits: Float[Tensor, "label vocab"], target: Tensor, where: Tensor, batch: Batch
) -> list[list[tuple[int, float | None]]]:
    """By example: at each label, the token answered and the probability of the right one."""
    right = logits.softmax(-1).gather(1, target[:, None])[:, 0].tolist()
    out: list[list[tuple[int, float | None]]] = [[] for _ in range(len(batch))]
    for index, said, p in zip(where.tolist(), logits.argmax(-1).tolist(), right, strict=True):
        out[index // batch.tokens.shape[1]].append((said, round(p, 4) if np.isfinite(p) else None))
    return out
