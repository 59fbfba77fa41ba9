"""The recall circuit of a model, found by its scores and proved by knockouts.

Recall needs two steps: somewhere a value meets its key (binding), and a query reads from there
(recall). In two layers of attention the value itself reads the key, and the query reads the value. In one layer a short
conv or a shift may bring the key to the value, on whatever Φ is made from: keys, B, or the values themselves. It may
also bring both to a position after the value, where Φ reads them (carry). So both steps are tried in every matrix that
can be cut by itself, at the value and at the positions after it.

On repeated blocks every token is the value of the one before it, and the key of the next: binding is the edge to the
position before (a previous-token head), and recall the edge to the token after an earlier occurrence (an induction
head).
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import pandas as pd
import torch
from torch import Tensor

from circuitscope.analysis.causal.affordable import affordable
from circuitscope.analysis.causal.interventions import Accuracies, Before, Effect, with_edges_cut
from circuitscope.analysis.measured import measured
from circuitscope.analysis.reading.gradients import without_gradients
from circuitscope.analysis.reading.opened import opened
from circuitscope.analysis.registry import Row, analysis
from circuitscope.analysis.scores.edges import LATER, OFFSET, named_edges
from circuitscope.analysis.scores.head_weights import compositions
from circuitscope.analysis.scores.held_out import HeldOut
from circuitscope.analysis.scores.of_layers import EdgeSets, layer_weights
from circuitscope.analysis.scores.weight_on_edges import summarize, weightings_of
from circuitscope.arguments import explained
from circuitscope.devices import on_cpu
from circuitscope.errors import UserError
from circuitscope.lens import HookedModel
from circuitscope.mixers.reading import Product
from circuitscope.models.build import build_model
from circuitscope.runs.run import Run
from circuitscope.tasks import Batch, Layout, any_value, check_batch

Step = Literal["binding", "recall", "carry"]
ENOUGH = 0.5  # share of the accuracy that a knockout must cost for a part to count as used
_OFFSETS = (0, *LATER)
_BETWEEN = "\n"  # the reasons in the column `untried`
_NEEDS = (
    "a circuit needs a task with keys, values and queries, such as mqar, or with repeated blocks, such as induction"
)
_DOES = {
    "binding": "at {place}a context value to the key",
    "carry": "at {place}a context value to that value",
    "recall": "at a query to {place}the bound value",
    "previous_token": "to the position before",
    "induction": "at a repeated token to the token after its earlier occurrences",
}


@dataclass(frozen=True)
class Part:
    """One step of the circuit at one place: how much weight lies on its edges, and what removing them costs.

    `head` is None for a layer as a whole. `core` says whether the matrix is Φ itself, not a conv or shift before it.
    `weight` is the share of the matrix's row on these edges (of |Φ| over all channels for a layer as a whole), and
    `top` is the strongest head or channel with its share.
    """

    step: Step
    edges: str
    layer: int
    head: int | None
    factor: str
    core: bool
    weight: float
    stderr: float
    top: tuple[int, float]
    effect: Effect

    @property
    def used(self) -> bool:
        """Whether removing the edges costs at least half of the accuracy, and more than three standard errors."""
        return self.effect.share >= ENOUGH and self.effect.lost > 3 * self.effect.stderr

    @property
    def offset(self) -> int:
        """How many positions after the value the step is done."""
        return int(self.edges.partition("+")[2] or 0)

    @property
    def place(self) -> str:
        """L1H0, L0 conv, L0 ssm."""
        if self.head is not None:
            return f"L{self.layer}H{self.head}"
        return f"L{self.layer} {self.factor}"

    def sentence(self, since: float | None = None) -> str:
        """What the part does, since which step (if that is known), and the evidence for it."""
        place = {0: "", 1: "the position after "}.get(self.offset, f"{self.offset} positions after ")
        where = _DOES[self.edges.partition("+")[0]].format(place=place)
        does = f"{self.place} moves {self.weight:.2f} of its weight {where}"
        e = self.effect
        when = "" if since is None else f" from step {since:.0f}"
        return (
            f"{does}{when}; removing those edges costs {e.share:.2f} of the accuracy"
            f" ({e.before:.2f} to {e.after:.2f}, a loss of {measured(e.lost, e.stderr)})"
        )


@dataclass(frozen=True)
class Circuit:
    """Every place that was tried, and the two that carry recall, if there are such places."""

    tried: list[Part]
    binding: Part | None
    recall: Part | None
    composition: float | None  # of the two heads through the keys, above that of random weights; attention only
    chance: float  # accuracy of answering with any value of the context, or with any token of the repeated block
    carry: Part | None = None  # what brings the value to where recall reads it, where that is after the value
    untried: tuple[str, ...] = ()  # the matrices and layers in which nothing was cut, each with the reason

    @property
    def solved(self) -> bool:
        """Whether accuracy is more than 2 points above chance."""
        return _recalls(self.tried, self.chance)

    @property
    def found(self) -> bool:
        """Whether the model recalls, and both steps are used."""
        return len(self.parts) == 2

    @property
    def parts(self) -> tuple[Part, ...]:
        """The places that carry recall, at most two; none where there is no recall to explain."""
        return tuple(p for p in (self.binding, self.recall) if p is not None) if self.solved else ()

    def __repr__(self) -> str:
        parts = {"binding": self.binding, "recall": self.recall}
        where = ", ".join(f"{step}: {part.place if part else None}" for step, part in parts.items())
        return f"Circuit({where}; {len(self.tried)} places tried)"

    def sentences(self, since: Mapping[str, float] | None = None) -> list[str]:
        """The verdict in words; `since` gives the steps since which binding and recall are there."""
        if self.tried and not self.solved:
            return [
                f"no recall to explain: accuracy {self.tried[0].effect.before:.2f}, and answering with any"
                f" {_answer(self.tried[0])} gives {self.chance:.2f}"
            ]
        lines = []
        for step, part in (("binding", self.binding), ("recall", self.recall)):
            if part is not None:
                lines.append(part.sentence((since or {}).get(step)))
                continue
            tried = [p for p in self.tried if p.step == step]
            if not tried:
                lines.append(f"no place to look for {step}")
                continue
            best = max(tried, key=lambda p: p.effect.lost)
            lines.append(
                f"no place found where {step} is done: removing its edges costs at most"
                f" {best.effect.lost:.2f} of {best.effect.before:.2f} accuracy ({best.place}, {best.edges})"
            )
            lines.append(self._account(tried))
        if self.found:
            lines += self._together()
        return lines

    def _other_places(self) -> list[str]:
        """Matrices of the same layer, other than the chosen one, in which removing the binding edges costs as much."""
        chosen = self.binding
        assert chosen is not None
        return [
            f"{p.place} is needed for it too: removing the same edges there costs {p.effect.share:.2f} of the accuracy"
            for p in self.tried
            if (p.step, p.edges, p.layer) == (chosen.step, chosen.edges, chosen.layer)
            and p.used
            and not p.core
            and p is not chosen
        ]

    def _account(self, tried: list[Part]) -> str:
        """What was tried for a step that was not found, and what was not."""
        places = ", ".join(dict.fromkeys(p.place for p in tried))
        furthest = max(p.offset for p in tried)
        where = f", at the value and up to {furthest} positions after it" if furthest else ""
        return f"tried one at a time: {places}{where}; not tried: several places at once" + "".join(
            f", {one}" for one in self.untried
        )

    def _together(self) -> list[str]:
        assert self.binding is not None
        lines = self._other_places()
        if self.carry is not None:
            lines.append(self.carry.sentence())
        if self.composition is not None:
            return [
                *lines,
                f"the second reads the first through its keys: K-composition {self.composition:+.2f}"
                " above that of random weights",
            ]
        if self.binding.core:
            return lines
        shift = self.binding.factor
        others = [p for p in self.tried if p.step == "binding" and p.core and p.layer == self.binding.layer]
        if not others:
            return lines
        name, most = others[0].factor, max(p.effect.share for p in others)
        borne = f"by the {shift} and by {name}" if any(p.used for p in others) else f"by the {shift}, not by {name}"
        return [
            *lines,
            f"the key gets there {borne}: removing the edges of {name} to the key costs at most"
            f" {most:.2f} of the accuracy",
        ]


COLUMNS = {
    "part": "string",
    "edges": "string",
    "layer": "int64",
    "head": "Int64",
    "factor": "string",
    "core": "bool",
    "weight": "float64",
    "weight_stderr": "float64",
    "top_head": "int64",
    "top_weight": "float64",
    "before": "float64",
    "after": "float64",
    "lost": "float64",
    "lost_stderr": "float64",
    "n": "int64",
    "chosen": "bool",
    "composition": "float64",
    "chance": "float64",
    "untried": "string",
}


def _no_circuit(run: Run) -> str:
    batch = run.config.task.batch(0, size=1)
    if not _edges_of_steps(batch.layout):
        return _NEEDS
    untrained = build_model(run.config.model).eval()  # what a layer offers does not depend on its weights
    has_phi = any(reading.factors for _, reading in opened(untrained).walk(batch.inputs))
    return _ahead(untrained, batch) if has_phi else "no layer has Φ, so there is no circuit to look for"


@torch.no_grad()
def _ahead(model: HookedModel, batch: Batch) -> str:
    """Why there is no circuit to look for in a model with a matrix that reads later positions; "" in any other."""
    for layer, reading in opened(model).walk(batch.inputs[:1]):
        for factor in reading.factors:  # not those beside: a key may hold what follows it, values stay where they are
            if not factor.causal:
                return (
                    f"a recall circuit is looked for at the values and after them, and {factor.name} of layer {layer}"
                    " also brings a value to positions before it; use scores and knockouts of single edges"
                )
    return ""


@analysis(
    "circuit",
    "The parts of the recall circuit, each with the knockout that proves it.",
    COLUMNS,
    means={
        "part": "binding, recall, or carry, which brings a value to where recall reads it",
        "core": "whether the matrix is Φ itself",
        "chosen": "whether this place is part of the circuit",
        "untried": "the matrices and layers in which nothing was cut, and why; the same in every row",
    },
    steps="last",
    refuses=_no_circuit,
    at_most=lambda run: affordable(run.config),
)
def circuit_of_model(model: HookedModel, data: HeldOut) -> Iterator[Row]:
    """`circuit_rows` on held-out sequences."""
    return circuit_rows(model, data.own)


def circuit_rows(model: HookedModel, batch: Batch) -> Iterator[Row]:
    """Every place that `find_circuit` tried, as rows; `chosen` marks the two parts of the circuit."""
    found = find_circuit(model, batch)
    for part in found.tried:
        yield {
            "part": part.step,
            "edges": part.edges,
            "layer": part.layer,
            "head": part.head,
            "factor": part.factor,
            "core": part.core,
            "weight": part.weight,
            "weight_stderr": part.stderr,
            "top_head": part.top[0],
            "top_weight": part.top[1],
            "before": part.effect.before,
            "after": part.effect.after,
            "lost": part.effect.lost,
            "lost_stderr": part.effect.stderr,
            "n": part.effect.n,
            "chosen": part in (*found.parts, found.carry),
            "composition": float("nan") if found.composition is None else found.composition,
            "chance": found.chance,
            "untried": _BETWEEN.join(found.untried),
        }


def circuit_of(rows: pd.DataFrame) -> Circuit:
    """The circuit that the rows of one step describe."""
    tried: list[Part] = []
    chosen: dict[str, Part] = {}
    for row in rows.to_dict("records"):
        part = Part(
            step=row["part"],
            edges=row["edges"],
            layer=row["layer"],
            head=None if pd.isna(row["head"]) else int(row["head"]),
            factor=row["factor"],
            core=row["core"],
            weight=row["weight"],
            stderr=row["weight_stderr"],
            top=(row["top_head"], row["top_weight"]),
            effect=Effect(row["before"], row["after"], row["lost"], row["lost_stderr"], row["n"]),
        )
        tried.append(part)
        if row["chosen"]:
            chosen[part.step] = part
    composition, chance = (float(rows[name].iloc[0]) if len(rows) else math.nan for name in ("composition", "chance"))
    return Circuit(
        tried,
        chosen.get("binding"),
        chosen.get("recall"),
        None if math.isnan(composition) else composition,
        chance,
        chosen.get("carry"),
        tuple(rows["untried"].iloc[0].split(_BETWEEN)) if len(rows) and rows["untried"].iloc[0] else (),
    )


@explained
def find_circuit(model: HookedModel, batch: Batch) -> Circuit:
    """Tries both steps in every matrix with a hook of its own, at the value and up to 3 positions after it.

    Positions after the value are tried only where no place carries the step at the value itself, not on repeated
    blocks, where they are values too, and not in a model that does not recall, where there is nothing to find.
    """
    check_batch(batch)
    steps = _edges_of_steps(batch.layout)
    if not steps:
        raise UserError(_NEEDS)
    if ahead := _ahead(model, batch):
        raise UserError(ahead)
    tried: list[Part] = []
    before: Before = {}
    chance = _chance(batch)

    def best(step: Step, edges: str, offsets: Sequence[int]) -> Part | None:
        for offset in offsets:
            here = list(_parts(model, batch, step, f"{edges}+{offset}" if offset else edges, before))
            tried.extend(here)
            if used := [p for p in here if p.used]:
                return max(used, key=_rank)
            if not _recalls(tried, chance):
                break
        return None

    binding, recall = (best(step, edges, _OFFSETS if edges in OFFSET else (0,)) for step, edges in steps.items())
    carry = best("carry", "carry", [recall.offset]) if recall is not None and recall.offset else None
    composition, untried = _composition(model, binding, recall), tuple(_untried(model, batch))
    return Circuit(tried, binding, recall, composition, chance, carry, untried)


def _edges_of_steps(layout: Layout) -> dict[Step, str]:
    """The edges of binding, then of recall, on sequences with this layout; none if it has neither pairs nor blocks."""
    if layout.key_pos is not None:
        return {"binding": "binding", "recall": "recall"}
    return {"binding": "previous_token", "recall": "induction"} if layout.period is not None else {}


def _chance(batch: Batch) -> float:
    """Accuracy of answering with any value of the context, or with any token of the repeated block."""
    if batch.layout.key_pos is not None:
        return float(any_value(batch).mean())
    assert batch.layout.period is not None
    where, _ = batch.labelled()
    periods = torch.as_tensor(batch.layout.period).expand(len(batch))[where // batch.length]
    return float((1 / periods).mean())


def _recalls(tried: Sequence[Part], chance: float) -> bool:
    return bool(tried) and tried[0].effect.before > chance + 0.02


def _answer(part: Part) -> str:
    return "value of the context" if part.edges.partition("+")[0] in OFFSET else "token of the block"


def _rank(part: Part) -> float:
    """What a knockout costs; a head that costs more than nine tenths of what its layer costs ranks above the layer."""
    return part.effect.lost if part.head is None else part.effect.lost / 0.9


@without_gradients
def _untried(model: HookedModel, batch: Batch) -> Iterator[str]:
    """What `_parts` passes over: layers without Φ, and matrices that cannot be cut and are in nothing that can be."""
    for layer, reading in opened(model).walk(batch.inputs[:1]):
        if reading.no_phi:
            yield f"L{layer} ({reading.no_phi})"
        for factor in (*reading.factors, *reading.beside):
            if not (factor.hook or factor.core or factor.diagonal):
                yield f"L{layer} {factor.name} (it cannot be cut by itself)"


@without_gradients
def _parts(model: HookedModel, batch: Batch, step: Step, name: str, before: Before) -> Iterator[Part]:
    """Tries one step at every place: each layer as a whole, and then its heads if the layer's knockout costs enough.

    The numbers of all layers come to the CPU at once, and so do those of all heads that are tried.
    """
    edges = named_edges(name, batch.layout)
    if not len(edges.src):
        return
    weights: dict[tuple[int, str], list[tuple[float, float]]] = {}
    whole: dict[tuple[int, str], tuple[float, float]] = {}
    found: dict[tuple[int, str], Product] = {}
    on_edges: dict[tuple[int, str], tuple[Tensor, Tensor]] = {}  # weights of units, of the layer
    for layer, product, by_unit, of_layer in layer_weights(opened(model).walk(batch.inputs), EdgeSets((edges,))):
        if not product.hook:  # without a knockout of its own nothing is proved
            continue
        key, per_unit = (layer, product.name), by_unit[edges.name, weightings_of(product)[0]]
        found[key] = product
        on_edges[key] = (per_unit, of_layer.get(edges.name, per_unit))
    cuts = {key: with_edges_cut(model, batch, edges, key[0], factor=key[1], before=before) for key in found}
    here = iter(on_cpu([part for key in found for part in (*on_edges[key], *cuts[key])]))
    effects: dict[tuple[int, str], Effect] = {}
    for key in found:
        value, stderr, _ = summarize(next(here))
        weights[key] = list(zip(value.tolist(), stderr.tolist(), strict=True))
        value, stderr, _ = summarize(next(here))
        whole[key] = (value.item(), stderr.item())
        effects[key] = Effect.of(next(here), next(here))

    in_heads = {key: product.core and product.unit == "head" for key, product in found.items()}
    single: dict[tuple[int, str, int], Accuracies] = {
        (*key, head): with_edges_cut(model, batch, edges, key[0], [head], before=before)
        for key in found
        if in_heads[key] and len(weights[key]) > 1 and effects[key].share >= ENOUGH
        for head in range(len(weights[key]))
    }
    here = iter(on_cpu([part for accuracies in single.values() for part in accuracies]))
    of_heads = {key: Effect.of(next(here), next(here)) for key in single}
    for key, product in found.items():
        layer, name_of = key
        top = max(range(len(weights[key])), key=lambda h: weights[key][h][0])
        strongest = (top, weights[key][top][0])
        place = (layer, 0 if in_heads[key] and len(weights[key]) == 1 else None, name_of, product.core)
        yield Part(step, name, *place, *whole[key], strongest, effects[key])
        for head, weight in enumerate(weights[key]):
            if (effect := of_heads.get((*key, head))) is not None:
                yield Part(step, name, layer, head, name_of, True, *weight, strongest, effect)


def _composition(model: HookedModel, binding: Part | None, recall: Part | None) -> float | None:
    if binding is None or recall is None or binding.head is None or recall.head is None:
        return None
    for c in compositions(model):
        if c.through == "k" and c.earlier == (binding.layer, binding.head) and c.later == (recall.layer, recall.head):
            return c.value
    return None
