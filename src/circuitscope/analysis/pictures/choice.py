"""Which mixing matrices are worth showing: the matrices of a model, and the units of each that score highest."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import pandas as pd
import torch

from circuitscope.analysis.reading.opened import Inputs, opened
from circuitscope.analysis.scores.registry import SCORES, Score, shown_in
from circuitscope.lens import HookedModel
from circuitscope.mixers.reading import Product, Unit
from circuitscope.models.build import build_model
from circuitscope.models.config import ModelConfig
from circuitscope.tasks import Layout

Entries = Literal["signed", "sizes", "shares"]  # entries of either sign; means of |M|; rows that sum to 1


@dataclass(frozen=True)
class Source:
    """One mixing matrix of a layer.

    Args:
        of: how many units it has.
        shares: whether its rows are shares of 1.
        shared: whether it is the same for every sequence.
        alone: whether the layer has no other matrix.
        causal: whether no position reads a later one.
    """

    layer: int
    factor: str
    unit: Unit
    of: int
    shares: bool = False
    shared: bool = False
    alone: bool = False
    causal: bool = True


@dataclass(frozen=True)
class View:
    """What can be looked at: one unit of a source or, where `head` is None, the mean of |M| over all of them."""

    source: Source
    head: int | None

    @property
    def entries(self) -> Entries:
        return "shares" if self.source.shares else "sizes" if self.head is None else "signed"


def sources_of(config: ModelConfig, tokens: Inputs) -> list[Source]:
    """Every mixing matrix of a model with this config.

    No checkpoint is read, because what a layer offers does not depend on its weights.
    """
    return sources(build_model(config).eval(), tokens)


@torch.no_grad()
def sources(model: HookedModel, tokens: Inputs) -> list[Source]:
    """Every mixing matrix that a model shows; one unit of each is built."""
    out = []
    for layer, reading in opened(model).walk(tokens[:2]):
        products = reading.products()
        out += [_source(layer, product, alone=len(products) == 1) for product in products.values()]
    return out


def _source(layer: int, product: Product, alone: bool) -> Source:
    shared = len(product.build(slice(0, 1))) == 1
    return Source(layer, product.name, product.unit, product.size, product.shares, shared, alone, product.causal)


def views(every: Sequence[Source], scores: pd.DataFrame, most: int) -> list[View]:
    """Of each source the mean over its units, and all units or, if there are more, the `most` that score highest."""
    out = []
    for source in every:
        if source.of > 1:
            out.append(View(source, None))
        heads = range(source.of) if source.of <= most else highest(scores, source, most)
        out += [View(source, head) for head in heads]
    return out


def highest(scores: pd.DataFrame, source: Source, most: int) -> list[int]:
    """The `most` strongest at the last step; the scores that the report shows take turns in naming their next best."""
    rows = scores[(scores.layer == source.layer) & (scores.factor == source.factor) & scores["head"].notna()]
    rows = rows[(rows.step == rows.step.max()) & (rows.weighting != "signed")]
    names = [name for score in shown_in("report") for name in score.means]
    orders = [rows[rows.score == name].sort_values("value", ascending=False)["head"].tolist() for name in names]
    in_turn = [int(order[place]) for place in range(source.of) for order in orders if place < len(order)]
    return list(dict.fromkeys([*in_turn, *range(source.of)]))[:most]


def leading_score(layout: Layout) -> Score:
    """The score by which units are ranked on sequences with this layout.

    It is the last score that the report shows, because the steps of a circuit are registered in their order, recall
    after binding. Scores on the task's own sequences are preferred to those on repeated blocks.
    """
    possible = [score for score in SCORES.values() if score.edges is not None and score.possible_on(layout)]
    reported = [score for score in possible if "report" in score.shown]
    own = [score for score in reported if score.on == "own"]
    return (own or reported or possible[:1])[-1]
