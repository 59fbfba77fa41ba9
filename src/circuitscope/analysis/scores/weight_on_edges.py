"""Circuit scores of a mixing matrix [batch, head, dest, src], from attention or from Φ.

Each score is the weight on a set of edges (`scores.edges`), averaged over destinations, for each sequence
and head; `summarize` gives the mean over sequences and its standard error.

Weightings:
  raw     M itself; for attention, whose rows are non-negative and sum to 1
  abs     |M_ij| / Σ_j |M_ij|, in 0..1; for signed Φ
  signed  M_ij / Σ_j |M_ij|, in −1..1: where the weight is, and with which sign
"""

from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from circuitscope.analysis.scores.edges import Edges, named_edges
from circuitscope.arguments import explained
from circuitscope.errors import UserError, described, unknown
from circuitscope.mixers.reading import Product
from circuitscope.tasks import Layout, Role

Matrix = Float[Tensor, "batch head dest src"]
PerSequence = Float[Tensor, "batch head"]
Weighting = Literal["raw", "abs", "signed"]
WEIGHTINGS = ("raw", "abs", "signed")


class Estimate(NamedTuple):
    """A mean over sequences for each head, with its standard error."""

    value: Float[Tensor, " head"]
    stderr: Float[Tensor, " head"]
    n: int


@explained
def score(matrix: Matrix, name: str, layout: Layout | None = None, weighting: Weighting | None = None) -> PerSequence:
    """Weight of a matrix on a set of edges (`scores.edges.named_edges` says which).

    Args:
        layout: says which position has which role; previous_token needs none.
        weighting: by default raw for a matrix whose rows are shares of 1, and abs for any other.
    """
    matrix = torch.as_tensor(matrix) if isinstance(matrix, np.ndarray) else matrix
    if not isinstance(matrix, Tensor) or matrix.ndim != 4 or matrix.shape[2] != matrix.shape[3]:
        raise UserError(f"a mixing matrix is [batch, head, dest, src], got {described(matrix)}")
    chosen = named_edges(name, layout or _plain(matrix))
    if not matrix.is_floating_point():
        raise UserError(f"a mixing matrix has floating-point entries, got {matrix.dtype}")
    weighting = weighting or default_weighting(matrix)
    if weighting == "raw" and matrix.numel() and matrix.amin() < 0:
        raise UserError(
            "weighting raw is for attention: this matrix has negative entries,"
            " and a share of a signed sum means nothing; use abs or signed"
        )
    return weights_on([chosen], matrix, [weighting])[chosen.name, weighting]


def weights_on(
    sets: Sequence[Edges], matrix: Matrix, weightings: Sequence[Weighting]
) -> dict[tuple[str, Weighting], PerSequence]:
    """Weight of one matrix on several sets of edges, in one pass over it."""
    for weighting in weightings:
        if weighting not in WEIGHTINGS:
            raise unknown("weighting", weighting, WEIGHTINGS)
    shares = [w for w in weightings if w != "raw"]
    mass = row_mass(matrix) if shares else None
    out: dict[tuple[str, Weighting], PerSequence] = {}
    for chosen in (edges.to(matrix.device) for edges in sets):
        entries = chosen.on(matrix)
        for weighting in weightings:
            if weighting == "raw":
                out[chosen.name, weighting] = chosen.total(entries)
                continue
            assert mass is not None
            share = entries / mass[chosen.sequence, :, chosen.dest]
            out[chosen.name, weighting] = chosen.total(share.abs() if weighting == "abs" else share)
    return out


def row_mass(matrix: Matrix) -> Float[Tensor, "batch head dest"]:
    """Σ_j |M_ij|; 1 where a row is all zeros, so that its shares are 0."""
    if matrix.shape[0] > 1 and matrix.stride(0) == 0:  # one matrix for all sequences
        return row_mass(matrix[:1].contiguous()).expand(matrix.shape[:3])
    mass = matrix.abs().sum(dim=-1)
    return torch.where(mass > 0, mass, torch.ones_like(mass))


@explained
def previous_token_score(
    matrix: Matrix, layout: Layout | None = None, weighting: Weighting | None = None
) -> PerSequence:
    """Mean over i ≥ 1 of M[i, i − 1]; the layout, which the other scores need, makes no difference."""
    return score(matrix, "previous_token", layout, weighting)


@explained
def induction_score(matrix: Matrix, layout: Layout, weighting: Weighting | None = None) -> PerSequence:
    """Prefix matching on repeated blocks: weight on what follows earlier occurrences; a perfect head scores 1."""
    return score(matrix, "induction", layout, weighting)


@explained
def duplicate_score(matrix: Matrix, layout: Layout, weighting: Weighting | None = None) -> PerSequence:
    """Weight on earlier occurrences of the token itself."""
    return score(matrix, "duplicate", layout, weighting)


@explained
def recall_score(matrix: Matrix, layout: Layout, weighting: Weighting | None = None) -> PerSequence:
    """At a query, weight on the value bound to the queried key."""
    return score(matrix, "recall", layout, weighting)


@explained
def value_score(matrix: Matrix, layout: Layout, weighting: Weighting | None = None) -> PerSequence:
    """At a query, weight on all context values; if high while recall is 1/k, values are found but not the match."""
    return score(matrix, "value", layout, weighting)


@explained
def binding_score(matrix: Matrix, layout: Layout, weighting: Weighting | None = None) -> PerSequence:
    """At a context value, weight on its own key."""
    return score(matrix, "binding", layout, weighting)


def default_weighting(matrix: Matrix) -> Weighting:
    """raw where every row is non-negative and sums to at most 1, else abs."""
    is_share = bool((matrix >= 0).all()) and bool((matrix.sum(dim=-1) <= 1 + 1e-4).all())
    return "raw" if is_share else "abs"


def weightings_of(product: Product) -> tuple[Weighting, ...]:
    """How to weight the rows of a mixing matrix: as they are if they are shares, else by size and with sign."""
    return ("raw",) if product.shares else ("abs", "signed")


@explained
def summarize(per_sequence: PerSequence) -> Estimate:
    """Mean over sequences and its standard error (nan for one sequence)."""
    n = len(per_sequence)
    return Estimate(per_sequence.mean(dim=0), per_sequence.std(dim=0) / n**0.5, n)


def _plain(matrix: Matrix) -> Layout:
    """A layout that says nothing but the sizes."""
    return Layout(torch.full((matrix.shape[0], matrix.shape[2]), Role.FILLER, dtype=torch.int8))
