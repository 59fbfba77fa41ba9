"""Which mixing matrices a heatmap shows: factors, heads or channels, means of them, the strongest by a score.

Numbers only; `heatmap` draws them. Nothing more is built than is shown: one sequence, and slices of channels.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from circuitscope.analysis.scores.edges import named_edges
from circuitscope.analysis.scores.weight_on_edges import Weighting, weights_on
from circuitscope.errors import UserError, shown, unknown
from circuitscope.memory import check_fits
from circuitscope.mixers.phi import Factor, product
from circuitscope.models.hooked_lm import HookedLM
from circuitscope.models.mixing_matrix import factor_names
from circuitscope.tasks import Batch

Heads = Literal["all", "mean", "mean_abs"] | Sequence[int]
MEANS = {"mean": "mean", "mean_abs": "mean |·|"}
MOST = 48  # panels in a figure
_CHUNK_BYTES = 8e6


@dataclass(frozen=True)
class Panel:
    """One matrix to draw.

    `values` is [dest, src], or [pos] for a factor that is diagonal. `head` says in words which head or
    channel, or what mean of them.
    """

    values: Float[np.ndarray[Any, Any], "..."]
    factor: str
    head: str = ""
    step: int | None = None

    @property
    def diagonal(self) -> bool:
        return self.values.ndim == 1


class Ranked(NamedTuple):
    """A head (or channel) and its score."""

    head: int
    score: float


def factors_to_draw(model: HookedLM, layer: int, factors: str | Sequence[str] = "all") -> dict[str, tuple[str, ...]]:
    """Names to show, each with the factors that are multiplied for it.

    Args:
        factors: "all" is every factor in the order they multiply, then Φ where it is a product, then all composed;
            or names of factors, "phi", "composed".
    """
    every = factor_names(model, layer)
    mixer = model.layers[layer].mixer
    core: tuple[str, ...] = mixer.core
    found: dict[str, tuple[str, ...]] = {name: (name,) for name in every}
    if len(core) > 1:
        found["phi"] = core
    if len(every) > len(core) and not mixer.no_composed:
        found["composed"] = every
    if factors == "all":
        return found
    chosen: dict[str, tuple[str, ...]] = {}
    for name in [factors] if isinstance(factors, str) else factors:
        if name == "composed" and mixer.no_composed:
            raise UserError(mixer.no_composed)
        name = core_name(core) if name == "phi" or (name == "composed" and "composed" not in found) else name
        if name not in found:
            raise unknown("factor", name, {*found, "phi", "composed", "all"})
        chosen[name] = found[name]
    if not chosen:
        raise UserError(f"no factor to draw; valid: all, {', '.join(found)}")
    return chosen


def core_name(core: Sequence[str]) -> str:
    """What the matrix at `hook_phi` is called: by its one factor, or "phi" where it is a product."""
    return core[0] if len(core) == 1 else "phi"


@torch.no_grad()
def read_panels(
    model: HookedLM,
    tokens: Int[Tensor, " pos"],
    layer: int,
    *,
    factors: str | Sequence[str] = "all",
    heads: Heads = "all",
    step: int | None = None,
    notes: Mapping[tuple[str, int], str] | None = None,
) -> list[Panel]:
    """The matrices of a layer on one sequence, factor by factor.

    Args:
        heads: numbers of heads or channels, "all", "mean" or "mean_abs". Where factors live on different axes
            (heads and channels of them), a number is that of a channel, and its head is shown.
        notes: more to say of a head, by factor and number.
    """
    parts, noun = _parts(model, tokens, layer, factors)
    finest = max(_size(part) for part in parts.values())
    if isinstance(heads, str) and heads in MEANS:
        return [
            Panel(_mean(part, tokens, heads), name, f"{MEANS[heads]} of {_count(_size(part), noun[name])}", step)
            for name, part in parts.items()
        ]
    numbers = _numbers(heads, finest, layer, max(parts, key=lambda name: _size(parts[name])), noun)
    if len(numbers) * len(parts) > MOST:
        raise UserError(
            f"{len(numbers) * len(parts)} panels are more than a figure holds ({MOST});"
            " ask for a mean, for some by number, or for the strongest by a score"
        )
    panels = []
    for name, part in parts.items():
        for number in numbers:
            own = number // (finest // _size(part))
            note = f" ({notes[name, number]})" if notes and (name, number) in notes else ""
            panels.append(Panel(_one(part, own), name, f"{noun[name]} {own}{note}", step))
    return panels


@torch.no_grad()
def strongest_heads(
    model: HookedLM, batch: Batch, layer: int, factor: str = "phi", by: str = "previous_token", count: int = 4
) -> list[Ranked]:
    """Heads (or channels) of a matrix with most weight on a set of edges (`analysis.edges`), best first.

    The weight is the share of |Φ| in its row, averaged over destinations and the sequences of the batch.
    """
    if count < 1:
        raise UserError(f"the number of strongest heads must be at least 1, got {shown(count)}")
    edges = named_edges(by, batch.layout)
    parts, _ = _parts(model, batch.tokens, layer, factor)
    (part,) = parts.values()
    if part[0].diagonal and len(part) == 1:
        raise UserError(f"{factor} is diagonal: it moves nothing between positions, so its heads have no score")
    kind: Weighting = "raw" if [f.name for f in part] == ["pattern"] else "abs"
    values = [
        weights_on([edges], matrix.expand(len(batch), -1, -1, -1), [kind])[edges.name, kind].mean(0)
        for matrix in _slices(part, batch.tokens)
    ]
    best = torch.cat(values).topk(min(count, _size(part)))
    return [Ranked(int(h), float(v)) for v, h in zip(best.values, best.indices, strict=True)]


def _parts(
    model: HookedLM, tokens: Tensor, layer: int, factors: str | Sequence[str]
) -> tuple[dict[str, list[Factor]], dict[str, str]]:
    """The factors behind each name, and whether its axis counts heads or channels."""
    chosen = factors_to_draw(model, layer, factors)
    mixer = model.layers[layer].mixer
    rows = tokens if tokens.ndim == 2 else tokens[None]
    every = mixer.factors(model.mixer_input(rows, layer % model.config.n_layers))
    parts = {name: [f for f in every if f.name in names] for name, names in chosen.items()}
    noun = {
        name: "head" if _size(p) == mixer.n_heads and (mixer.d_head > 1 or name == "pattern") else "channel"
        for name, p in parts.items()
    }
    return parts, noun


def _size(part: Sequence[Factor]) -> int:
    return max(factor.size for factor in part)


def _count(n: int, noun: str) -> str:
    return f"{n} {noun}{'s' if n != 1 else ''}"


def _numbers(heads: Heads, n: int, layer: int, factor: str, noun: Mapping[str, str]) -> list[int]:
    if heads == "all":
        return list(range(n))
    if isinstance(heads, str):
        raise unknown("choice of heads", heads, ["all", *MEANS])
    for head in heads:
        if not 0 <= head < n:
            raise UserError(
                f"{noun[factor]} must be from 0 to {n - 1}, got {shown(head)}:"
                f" {factor} of layer {layer} has {_count(n, noun[factor])}"
            )
    return list(heads)


def _one(part: list[Factor], channel: int) -> np.ndarray[Any, Any]:
    """A channel's matrix, or its diagonal."""
    where = slice(channel, channel + 1)
    matrix = part[0].build(where) if len(part) == 1 and part[0].diagonal else product(part, where)
    return matrix[0, 0].double().cpu().numpy()


def _mean(part: list[Factor], tokens: Tensor, how: str) -> np.ndarray[Any, Any]:
    total: Tensor | float = 0.0
    for matrix in _slices(part, tokens):
        total = total + (matrix.abs() if how == "mean_abs" else matrix)[0].double().sum(0)
    assert isinstance(total, Tensor)
    return (total / _size(part)).cpu().numpy()


def _slices(part: list[Factor], tokens: Tensor) -> Iterator[Tensor]:
    """The matrix [batch, channel, dest, src] (a lone diagonal as [batch, channel, pos]) in slices of channels."""
    length, count = tokens.shape[-1], _size(part)
    size = 8 * tokens.numel() * length
    check_fits(size, tokens.device, f"one channel of Φ at length {length}", "use fewer or shorter sequences")
    chunk = max(1, int(_CHUNK_BYTES // size))
    lone = len(part) == 1 and part[0].diagonal
    for start in range(0, count, chunk):
        where = slice(start, min(start + chunk, count))
        yield part[0].build(where) if lone else product(part, where)
