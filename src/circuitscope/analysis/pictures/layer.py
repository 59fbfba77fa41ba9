"""The mixing matrices of one layer on one held-out example: factors, units or means of them, the strongest by a score.

Only what is shown is built: one sequence, and slices of units.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any, Literal, NamedTuple

import torch
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor

from circuitscope.analysis.checkpoints.runner import held_out, saved_steps
from circuitscope.analysis.checkpoints.steps import ChosenSteps, choose_steps
from circuitscope.analysis.pictures.choice import Entries, leading_score
from circuitscope.analysis.reading.opened import opened
from circuitscope.analysis.scores.edges import named_edges
from circuitscope.analysis.scores.weight_on_edges import weightings_of, weights_on
from circuitscope.devices import on_cpu, widened
from circuitscope.errors import UserError, shown, unknown
from circuitscope.lens import HookedModel, layer_index
from circuitscope.memory import check_fits
from circuitscope.mixers.reading import Product, Reading, Unit
from circuitscope.models.dtype import default_dtype
from circuitscope.models.stack import HookedStack
from circuitscope.runs.damage import warn_once
from circuitscope.runs.run import Run
from circuitscope.tasks import Batch

Mean = Literal["mean", "mean_abs"]
UnitChoice = Literal["all"] | Mean | Sequence[int]
MEANS: tuple[Mean, ...] = ("mean", "mean_abs")
MOST = 48  # matrices in one figure
FEW_HEADS = 8  # up to so many heads are shown one by one; more heads, and channels, are shown as a mean
_SEQUENCES = 32  # sequences on which units are ranked


@dataclass(frozen=True)
class Picture:
    """One matrix.

    Args:
        values: [dest, src], or [pos] for a factor that is diagonal.
        of: how many units the matrix has.
        which: the number of the unit, or which mean over all units it is.
        score: the name and value of the score by which the unit was chosen.
        causal: whether no position reads a later one.
    """

    values: Float[NDArray[Any], "..."]
    factor: str
    unit: Unit
    of: int
    which: int | Mean
    entries: Entries
    step: int | None = None
    score: tuple[str, float] | None = None
    causal: bool = True


@dataclass(frozen=True)
class LayerPictures:
    """Matrices of a layer, and the example on which they were computed."""

    layer: int
    mixer: str
    example: Batch
    steps: list[int]
    pictures: list[Picture]


class Ranked(NamedTuple):
    """A unit and its score."""

    unit: int
    score: float


@torch.no_grad()
@default_dtype(torch.float32)
def layer_pictures(
    run: Run,
    layer: int = 0,
    *,
    steps: ChosenSteps = None,
    example: int = 0,
    factors: str | Sequence[str] | None = None,
    units: UnitChoice | None = None,
    top: int | None = None,
    by: str | None = None,
) -> LayerPictures:
    """The matrices of a layer on one example of the test split; `viz.phi_figure.phi_figure` explains the arguments."""
    saved = saved_steps(run)
    chosen = choose_steps(saved[-1:] if steps is None else steps, saved)
    if len(chosen) > MOST:
        raise UserError(f"{len(chosen)} steps are more than a figure holds ({MOST}); name some, such as 0:2000:200")
    if top is not None and units is not None:
        raise UserError("give heads by number or the strongest of them, not both")
    if by is not None and top is None:
        raise UserError(f"by {by} ranks the strongest heads: say how many with top")
    batch = example_of(run, example)
    model, chosen = _last_readable(run, chosen)
    layer, kind = layer_index(model, layer), opened(model).called(layer)
    reading = opened(model).reading(batch.inputs, layer)
    if reading.no_phi:
        raise UserError(f"layer {layer} is {kind}: {reading.no_phi}")
    wanted = factors if factors is not None else ("all" if len(chosen) == 1 else reading.whole.name)
    products = chosen_products(reading, wanted)
    names = [product.name for product in products]
    scored: dict[tuple[str, int], tuple[str, float]] = {}
    if top is not None:
        ranked_on = reading.whole if reading.whole.name in names else products[0]
        by = leading_score(batch.layout).name if by is None else by
        ranked = strongest_units(model, held_out(run, _SEQUENCES).own, layer, ranked_on.name, by, top)
        units = [r.unit for r in ranked]
        scored = {(ranked_on.name, r.unit): (by, r.score) for r in ranked}
    if units is None:
        core = reading.core
        one_by_one = core.unit == "head" and core.size <= FEW_HEADS and names == [core.name]
        units = "all" if one_by_one else "mean_abs"
    pictures: list[Picture] = []
    shown_steps: list[int] = []
    for step in chosen:
        loaded = model if step == chosen[-1] else _loaded(run, step)
        if loaded is None:
            continue
        shown_steps.append(step)
        here = reading if loaded is model else opened(loaded).reading(batch.inputs, layer)
        pictures += read_pictures(here, names, units, step=step, scored=scored)
        if len(pictures) > MOST:
            raise UserError(f"more panels than a figure holds ({MOST}); ask for fewer steps, factors or heads")
    return LayerPictures(layer, kind, batch, shown_steps, pictures)


def _last_readable(run: Run, steps: list[int]) -> tuple[HookedStack, list[int]]:
    """The model of the last of these checkpoints that can be read, and the steps up to it."""
    for count in range(len(steps), 1, -1):
        if (model := _loaded(run, steps[count - 1])) is not None:
            return model, steps[:count]
    return run.load(steps[0]), steps[:1]


def _loaded(run: Run, step: int) -> HookedStack | None:
    """The model of a checkpoint; None, with a warning, where the checkpoint cannot be read."""
    try:
        return run.load(step)
    except UserError as error:
        warn_once(f"{error}; it is left out")
        return None


def example_of(run: Run, example: int) -> Batch:
    """One of the held-out examples that analyses use."""
    if example < 0:
        raise UserError(f"example must be 0 or more, got {shown(example)}")
    config = run.config
    return config.task.batch(example, split="test", size=1, seed=config.train.batch_seed)


def chosen_products(reading: Reading, factors: str | Sequence[str] = "all") -> list[Product]:
    """The matrices to show.

    Args:
        factors: "all" for every factor in the order of multiplication, then Φ if it is a product, then all factors
            composed; or names of factors, "phi", "composed".
    """
    if factors in ("all", ["all"]):
        return list(reading.products(diagonal=True).values()) or [reading.core]
    names = [factors] if isinstance(factors, str) else list(factors)
    if "all" in names:
        raise UserError(f"all stands for every factor and goes with no other name, got {shown(','.join(names))}")
    found = [reading.product(name) for name in names] or [reading.product(())]
    return list({product.name: product for product in found}.values())


@torch.no_grad()
def read_pictures(
    reading: Reading,
    factors: str | Sequence[str] = "all",
    units: UnitChoice = "all",
    *,
    step: int | None = None,
    scored: dict[tuple[str, int], tuple[str, float]] | None = None,
) -> list[Picture]:
    """The matrices of a reading of one sequence, factor by factor; all come to the CPU by one transfer.

    Args:
        units: numbers of heads or channels, "all", "mean" or "mean_abs". Where some matrices are per head and others
            per channel, a number means a channel, and matrices per head show the head of that channel.
        scored: names and values of scores to note, by factor and number.
    """
    products = chosen_products(reading, factors)
    _check_memory(reading)
    if units in MEANS:
        return _arrived([_mean(reading, product, units, step) for product in products])
    finest = max(products, key=lambda product: product.size)
    numbers = _numbers(units, finest)
    if len(numbers) * len(products) > MOST:
        raise UserError(
            f"{len(numbers) * len(products)} panels are more than a figure holds ({MOST});"
            " ask for a mean, for some by number, or for the strongest by a score"
        )
    pictures = []
    for product in products:
        for number in numbers:
            own = number // (finest.size // product.size)
            entries: Entries = "shares" if product.shares else "signed"
            score = (scored or {}).get((product.name, number))
            about = (product.name, product.unit, product.size, own, entries, step, score, product.causal)
            pictures.append((_one(product, own), about))
    return _arrived(pictures)


def _arrived(pictures: list[tuple[Tensor, tuple[Any, ...]]]) -> list[Picture]:
    """Pictures of matrices wherever they are, each with the other fields of its picture."""
    here = on_cpu([matrix for matrix, _ in pictures])
    return [Picture(values.double().numpy(), *about) for values, (_, about) in zip(here, pictures, strict=True)]


@torch.no_grad()
def strongest_units(
    model: HookedModel, batch: Batch, layer: int, factor: str = "phi", by: str = "previous_token", count: int = 4
) -> list[Ranked]:
    """The units of a matrix with the most weight on a set of edges (`scores.edges.named_edges`), best first.

    The weight is the share of |Φ| in its row, averaged over destinations and the sequences of the batch.
    """
    if count < 1:
        raise UserError(f"the number of strongest heads must be at least 1, got {shown(count)}")
    edges = named_edges(by, batch.layout)
    reading = opened(model).reading(batch.inputs, layer)
    product = reading.product(factor)
    _check_memory(reading)
    if product.diagonal:
        raise UserError(f"{factor} is diagonal: it moves nothing between positions, so its heads have no score")
    kind = weightings_of(product)[0]
    values = [
        weights_on([edges], matrix, [kind])[edges.name, kind].mean(dim=0) for _, matrix in reading.slices(product)
    ]
    best, units = on_cpu(torch.cat(values).topk(min(count, product.size)))
    return [Ranked(int(unit), float(value)) for value, unit in zip(best, units, strict=True)]


def _check_memory(reading: Reading) -> None:
    """Refuses where one unit does not fit into memory; no smaller part can be built."""
    size, what = 4 * reading.batch * reading.length**2, f"one channel of Φ at length {reading.length}"
    check_fits(size, torch.device("cpu"), what, "use fewer or shorter sequences")


def _numbers(units: UnitChoice, finest: Product) -> list[int]:
    if units == "all":
        return list(range(finest.size))
    if isinstance(units, str):
        raise unknown("choice of heads", units, ["all", *MEANS])
    for number in units:
        if not isinstance(number, Integral) or not 0 <= number < finest.size:
            raise UserError(
                f"{finest.unit} must be from 0 to {finest.size - 1}, got {shown(number)}:"
                f" {finest.name} has {finest.size} {finest.unit}{'s' if finest.size != 1 else ''}"
            )
    return list(units)


def _one(product: Product, unit: int) -> Tensor:
    """The matrix of a unit, or only its diagonal if the factor is diagonal."""
    matrix = product.build(slice(unit, unit + 1))[0, 0]
    return matrix.diagonal() if product.diagonal else matrix


def _mean(reading: Reading, product: Product, how: Mean, step: int | None) -> tuple[Tensor, tuple[Any, ...]]:
    total: Tensor | float = 0.0
    for _, matrix in reading.slices(product):
        total = total + widened((matrix.abs() if how == "mean_abs" else matrix)[0]).sum(dim=0)
    assert isinstance(total, Tensor)
    mean = total / product.size
    entries: Entries = "shares" if product.shares else "sizes" if how == "mean_abs" else "signed"
    values = mean.diagonal() if product.diagonal else mean
    return values, (product.name, product.unit, product.size, how, entries, step, None, product.causal)
