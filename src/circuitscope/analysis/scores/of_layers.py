"""Weights on edges of every unit of a layer's mixing matrices, and of each layer as a whole.

A score needs a few entries of each row and the row's sum, not the matrix. Where a layer has a kernel for that, no
matrix is built; every other matrix is built in slices of its units and read slice by slice.
"""

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from circuitscope.analysis.reading.opened import Walk
from circuitscope.analysis.scores.edges import Edges
from circuitscope.analysis.scores.weight_on_edges import PerSequence, Weighting, weights_on
from circuitscope.kernels.edge_sums import EdgeList, EdgeSums, Surroundings, edge_sums
from circuitscope.mixers.reading import SLICE_BYTES, Factor, Product, Reading, slices_of
from circuitscope.progress import working

OfUnits = dict[tuple[str, Weighting], PerSequence]
WholeLayer = Float[Tensor, "batch 1"]


@dataclass(frozen=True)
class EdgeSets:
    """Sets of edges of the same sequences, with different names."""

    sets: tuple[Edges, ...]

    @cached_property
    def listed(self) -> EdgeList:
        """The edges as kernels read them."""
        length, batch = self.sets[0].length, len(self.sets[0].dests)
        row = torch.cat([s.sequence * length + s.dest for s in self.sets])
        src = torch.cat([s.src for s in self.sets])
        of = torch.arange(len(self.sets)).repeat_interleave(torch.tensor([len(s.src) for s in self.sets]))
        order = row.argsort(stable=True)
        start = np.zeros(batch * length + 1, np.int64)
        np.cumsum(np.bincount(row.numpy(), minlength=batch * length), out=start[1:])
        return EdgeList(start, src[order].numpy(), of[order].numpy(), len(self.sets), length)

    def even(self, product: Product) -> dict[str, float]:
        """What a matrix with the reach of this one would score if its rows were even; nan where that is not known."""
        if not product.causal:
            return {chosen.name: math.nan for chosen in self.sets}
        mixing = [factor for factor in product.factors if not factor.diagonal]
        reach = mixing[0].reach if len(mixing) == 1 else None
        if reach not in self._even:
            self._even[reach] = {chosen.name: chosen.even(reach) for chosen in self.sets}
        return self._even[reach]

    @cached_property
    def _even(self) -> dict[int | None, dict[str, float]]:
        return {}

    @cached_property
    def of_listed(self) -> "_Listed":
        """For each edge of `listed` its row and its place in a table [set, sequence]."""
        edges = self.listed
        row = torch.from_numpy(np.repeat(np.arange(len(edges.start) - 1), np.diff(edges.start)))
        return _Listed(row, torch.from_numpy(edges.of) * edges.batch + row // edges.length)


class _Listed(NamedTuple):
    row: Tensor
    place: Tensor


class LayerWeights(NamedTuple):
    """The weights of one mixing matrix: of each unit, by the name of the set and the weighting; and of the layer."""

    layer: int
    product: Product
    of_units: OfUnits
    whole: dict[str, WholeLayer]  # |M| summed over the units, weighting abs; empty where one head is the whole layer


def layer_weights(
    walk: Walk, edges: EdgeSets, wanted: Callable[[Product], bool] = lambda product: True
) -> Iterator[LayerWeights]:
    """The weights of every mixing matrix of a model on the edges, or of those that are wanted, in one pass."""
    for layer, reading in walk:
        for product, of_units, whole in _of_reading(reading, edges, wanted):
            one_head = product.size == 1 and product.unit == "head"
            yield LayerWeights(layer, product, of_units, {} if one_head else whole)


def _of_reading(
    reading: Reading, edges: EdgeSets, wanted: Callable[[Product], bool]
) -> Iterator[tuple[Product, OfUnits, dict[str, WholeLayer]]]:
    products = {name: product for name, product in reading.products().items() if wanted(product)}
    made = dict[str, EdgeSums]()
    for name, product in products.items():
        if product.shares:
            yield product, *_of_shares(reading, product, edges.sets)
            continue
        if name not in made:
            made |= _sums(reading, product, [*products.values()], edges.listed)
        yield product, *_from_sums(made.pop(name), edges)


def _of_shares(reading: Reading, product: Product, sets: Sequence[Edges]) -> tuple[OfUnits, dict[str, WholeLayer]]:
    """Weights of a matrix whose rows are shares of 1, as they are."""
    parts, total = [], None
    for _, matrix in reading.slices(product):
        sets = [edges.to(matrix.device) for edges in sets]
        parts.append(weights_on(sets, matrix, ["raw"]))
        part = matrix.sum(dim=1, keepdim=True)
        total = part if total is None else total + part
    assert total is not None
    of_units = {key: torch.cat([part[key] for part in parts], dim=1) for key in parts[0]}
    whole = {} if product.size == 1 else weights_on(sets, total, ["abs"])
    return of_units, {name: weight for (name, _), weight in whole.items()}


def _from_sums(sums: EdgeSums, edges: EdgeSets) -> tuple[OfUnits, dict[str, WholeLayer]]:
    """Weights from sums: averages over the destinations of each sequence."""
    sets, (row, place) = edges.sets, edges.of_listed
    device = sums.signed.device
    dests = torch.stack([s.dests for s in sets]).clamp(min=1).to(device)
    of_units: OfUnits = {}
    for i, chosen in enumerate(sets):
        of_units[chosen.name, "abs"] = sums.size[i] / dests[i][:, None]
        of_units[chosen.name, "signed"] = sums.signed[i] / dests[i][:, None]
    mass = torch.where(sums.mass > 0, sums.mass, 1).flatten()[row.to(device)]
    total = sums.mass.new_zeros(dests.numel()).index_add_(0, place.to(device), sums.entries / mass)
    whole = (total.view_as(dests) / dests).float()
    return of_units, {chosen.name: whole[i][:, None] for i, chosen in enumerate(sets)}


def _sums(reading: Reading, product: Product, others: Sequence[Product], edges: EdgeList) -> dict[str, EdgeSums]:
    """The sums of a matrix by its name; a factor with a kernel also gives those of a product that surrounds it."""
    factor = product.factors[0]
    if len(product.factors) > 1 or factor.on_edges is None:
        shared = len(product.build(slice(0, 1))) == 1  # one matrix for all sequences takes the memory of one
        size = max(1, int(SLICE_BYTES // (4 * reading.length**2))) if shared else None
        parts = []
        for units, matrix in reading.slices(product, units=size):
            working(f"{product.name}, {product.unit} {units.start} of {product.size}")
            parts.append(edge_sums(matrix, edges))
        return {product.name: EdgeSums.joined(parts)}
    around = next((other for other in others if _surrounds(other, factor)), None)
    bare, whole = [], []
    for units in slices_of(factor.size, max(1, int(SLICE_BYTES // (4 * reading.batch * reading.length)))):
        working(f"{product.name}, {product.unit} {units.start} of {product.size}")
        given = None if around is None else _surroundings(reading, around, factor, units)
        of_factor, of_product = factor.on_edges(units, edges, given)
        bare.append(of_factor)
        if of_product is not None:
            whole.append(of_product)
    joined = {product.name: EdgeSums.joined(bare)}
    return joined if around is None else joined | {around.name: EdgeSums.joined(whole)}


def _surrounds(product: Product, factor: Factor) -> bool:
    """Whether a product is this factor between diagonal ones, and then at most one short conv."""
    if len(product.factors) == 1 or not any(part is factor for part in product.factors):
        return False
    others = [part for part in product.factors if part is not factor]
    if others[-1] is product.factors[-1] and others[-1].taps is not None:
        others.pop()
    return all(part.diagonal for part in others) and all(part.size == factor.size for part in product.factors)


def _surroundings(reading: Reading, product: Product, factor: Factor, units: slice) -> Surroundings:
    size = (reading.batch, units.stop - units.start, reading.length)
    at = next(i for i, part in enumerate(product.factors) if part is factor)
    taps = product.factors[-1].taps
    diagonal = [
        [part.build(units) for part in side if part.diagonal] for side in (product.factors[:at], product.factors[at:])
    ]
    device = next((part.device for side in diagonal for part in side), None if taps is None else taps.device)
    left, right = (functools.reduce(torch.mul, side, torch.ones((), device=device)).expand(size) for side in diagonal)
    return Surroundings(left, right, torch.ones(size[1], 1, device=device) if taps is None else taps[units])
