"""A score: the weight two positions back; and an analysis: how much of the first matrix lies off the diagonal."""

from collections.abc import Iterator

import torch

from circuitscope.analysis.reading.opened import matrices
from circuitscope.analysis.registry import analysis
from circuitscope.analysis.scores.edges import Edges
from circuitscope.analysis.scores.registry import EVERYWHERE, edge_score


@edge_score("two_back", "on the position two before", shown=EVERYWHERE)
def two_back(layout) -> Edges:
    batch, length = layout.roles.shape
    mask = torch.ones(length, length, dtype=torch.bool).tril(-2).triu(-2)
    return Edges.of("two_back", mask.expand(batch, -1, -1))


@analysis("toy_mass", "Share of |Φ| off the diagonal, per layer.", {"layer": "int64", "value": "float64"})
def toy_mass(model, data) -> Iterator[dict]:
    for layer, product, units, matrix in matrices(model, data.own.tokens):
        if product.core and units.start == 0:
            whole, diagonal = matrix.abs().sum(), matrix.diagonal(dim1=-2, dim2=-1).abs().sum()
            yield {"layer": layer, "value": float(1 - diagonal / whole)}
