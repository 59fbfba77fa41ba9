"""The recall circuit of a model, found by its scores and proved by knockouts.

Recall needs two steps: somewhere a value meets its key (binding), and a query reads from there
(recall). In two layers of attention the value itself reads the key and the query the value. A short
conv may bring both to a position after the value, and a scan read from there: so both steps are tried
at the value and at the positions after it.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import pandas as pd
import torch

from circuitscope.analysis.edges import named_edges
from circuitscope.analysis.interventions import Effect, knock_out
from circuitscope.analysis.matrices import matrices
from circuitscope.analysis.scores import summarize, weights_on
from circuitscope.analysis.weights import compositions
from circuitscope.errors import UserError
from circuitscope.models import HookedLM
from circuitscope.tasks import Batch, any_value

Step = Literal["binding", "recall"]
ENOUGH = 0.5  # share of the accuracy that a knockout must cost for a part to count as used
SHIFTS = ("conv", "shift")  # factors that stand at `hook_phi_conv`
_OFFSETS = (0, 1, 2, 3)


@dataclass(frozen=True)
class Part:
    """One step of the circuit at one place: how much weight lies on its edges, and what removing them costs.

    `head` is None for a layer as a whole. `weight` is the share of the matrix's row on these edges (of
    |Φ| over all channels for a layer as a whole), `top` that of its strongest head or channel.
    """

    step: Step
    edges: str
    layer: int
    head: int | None
    factor: str
    weight: float
    stderr: float
    top: tuple[int, float]
    effect: Effect

    @property
    def used(self) -> bool:
        """Whether removing the edges costs at least half of the accuracy, and more than three standard errors."""
        return self.effect.share >= ENOUGH and self.effect.lost > 3 * self.effect.stderr

    @property
    def place(self) -> str:
        """L1H0, L0 conv, L0 ssm."""
        if self.head is not None:
            return f"L{self.layer}H{self.head}"
        return f"L{self.layer} {self.factor}"

    def sentence(self, since: float | None = None) -> str:
        """What the part does, from which step on where that is known, and what says so."""
        after = int(self.edges.partition("+")[2] or 0)
        place = {0: "", 1: "the position after "}.get(after, f"{after} positions after ")
        moves = f"{self.place} moves {self.weight:.2f} of its weight"
        if self.step == "binding":
            does = f"{moves} at {place}a context value to the key"
        else:
            does = f"{moves} at a query to {place}the bound value"
        e = self.effect
        when = "" if since is None else f" from step {since:.0f}"
        return (
            f"{does}{when}; removing those edges costs {e.share:.2f} of the accuracy"
            f" ({e.before:.2f} to {e.after:.2f}, ±{e.stderr:.3f})"
        )


@dataclass(frozen=True)
class Circuit:
    """Every place that was tried, and the two that carry recall, where there are such."""

    tried: list[Part]
    binding: Part | None
    recall: Part | None
    composition: float | None  # of the two heads through the keys, above chance; attention only
    chance: float  # accuracy of answering with any value of the context

    @property
    def solved(self) -> bool:
        """Whether the model answers better than with any value of the context, by more than 2 points."""
        return bool(self.tried) and self.tried[0].effect.before > self.chance + 0.02

    @property
    def found(self) -> bool:
        """Whether the model recalls, and both steps are used."""
        return self.solved and self.binding is not None and self.recall is not None

    def sentences(self, since: Mapping[str, float] | None = None) -> list[str]:
        """The verdict in words; `since` says from which step on binding and recall are there."""
        lines = []
        if self.tried and not self.solved:
            lines.append(
                f"no recall to explain: accuracy {self.tried[0].effect.before:.2f}, and answering with any value of"
                f" the context gives {self.chance:.2f}"
            )
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
        if self.found:
            lines += self._together()
        return lines

    def _together(self) -> list[str]:
        assert self.binding is not None
        if self.composition is not None:
            return [f"the second reads the first through its keys: K-composition {self.composition:+.2f} above chance"]
        if self.binding.factor not in SHIFTS:
            return []
        shift = self.binding.factor
        scan = [
            p for p in self.tried if p.step == "binding" and p.factor not in SHIFTS and p.layer == self.binding.layer
        ]
        borne = f"by the {shift} and by the scan" if any(p.used for p in scan) else f"by the {shift}, not by the scan"
        most = max((p.effect.share for p in scan), default=0.0)
        return [f"the shift is done {borne}: the scan's own edges to the key cost at most {most:.2f} of the accuracy"]


CIRCUIT_COLUMNS = {
    "run": "string",
    "step": "int64",
    "part": "string",
    "edges": "string",
    "layer": "int64",
    "head": "Int64",
    "factor": "string",
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
}


def circuit_rows(model: HookedLM, batch: Batch) -> Iterator[dict[str, Any]]:
    """Every place that `find_circuit` tried, as rows; `chosen` marks the two parts of the circuit."""
    found = find_circuit(model, batch)
    for part in found.tried:
        yield {
            "part": part.step,
            "edges": part.edges,
            "layer": part.layer,
            "head": part.head,
            "factor": part.factor,
            "weight": part.weight,
            "weight_stderr": part.stderr,
            "top_head": part.top[0],
            "top_weight": part.top[1],
            "before": part.effect.before,
            "after": part.effect.after,
            "lost": part.effect.lost,
            "lost_stderr": part.effect.stderr,
            "n": part.effect.n,
            "chosen": part in (found.binding, found.recall),
            "composition": float("nan") if found.composition is None else found.composition,
            "chance": found.chance,
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
            weight=row["weight"],
            stderr=row["weight_stderr"],
            top=(row["top_head"], row["top_weight"]),
            effect=Effect(row["before"], row["after"], row["lost"], row["lost_stderr"], row["n"]),
        )
        tried.append(part)
        if row["chosen"]:
            chosen[part.step] = part
    composition = float(rows.composition.iloc[0])
    return Circuit(
        tried,
        chosen.get("binding"),
        chosen.get("recall"),
        None if math.isnan(composition) else composition,
        float(rows.chance.iloc[0]),
    )


def find_circuit(model: HookedLM, batch: Batch) -> Circuit:
    """Tries both steps in every layer and factor, at the value and up to 3 positions after it.

    Positions after the value are tried only where no place carries the step at the value itself.
    """
    if batch.layout.value_pos is None:
        raise UserError("a recall circuit needs a task with keys, values and queries, such as mqar")
    tried: list[Part] = []
    best: dict[Step, Part | None] = {}
    for step in ("binding", "recall"):
        best[step] = None
        for offset in _OFFSETS:
            here = list(_parts(model, batch, step, f"{step}+{offset}" if offset else step))
            tried += here
            used = [p for p in here if p.used]
            if used:
                best[step] = max(used, key=_rank)
                break
    binding, recall = best["binding"], best["recall"]
    return Circuit(tried, binding, recall, _composition(model, binding, recall), float(any_value(batch).mean()))


def _rank(part: Part) -> float:
    """By what a knockout costs; a head that costs nine tenths of what its layer does stands for the layer."""
    return part.effect.lost if part.head is None else part.effect.lost / 0.9


@torch.no_grad()
def _parts(model: HookedLM, batch: Batch, step: Step, name: str) -> Iterator[Part]:
    """The step at every place, whole layers first, then the heads of those that are used."""
    edges = named_edges(name, batch.layout)
    if not len(edges.src):
        return
    weights: dict[tuple[int, str], list[tuple[float, float]]] = {}
    whole: dict[tuple[int, str], tuple[float, float]] = {}
    sums: dict[tuple[int, str], torch.Tensor] = {}
    for layer, factor, heads, of, matrix in matrices(model, batch.tokens):
        if factor not in (*SHIFTS, core_factor(model, layer)):
            continue
        key = (layer, factor)
        kind: Literal["raw", "abs"] = "raw" if factor == "pattern" else "abs"
        value, stderr, _ = summarize(weights_on([edges], matrix, [kind])[edges.name, kind])
        weights.setdefault(key, []).extend(zip(value.tolist(), stderr.tolist(), strict=True))
        part = matrix.abs().sum(dim=1, keepdim=True)
        sums[key] = sums[key] + part if key in sums else part
        if heads.stop == of:
            value, stderr, _ = summarize(weights_on([edges], sums.pop(key), ["abs"])[edges.name, "abs"])
            whole[key] = (value.item(), stderr.item())
    for (layer, factor), of_heads in weights.items():
        through: Literal["conv", "phi"] = "phi" if factor == core_factor(model, layer) else "conv"
        top = max(range(len(of_heads)), key=lambda h: of_heads[h][0])
        strongest = (top, of_heads[top][0])
        lone = 0 if factor == "pattern" and len(of_heads) == 1 else None
        effect = knock_out(model, batch, edges, layer=layer, factor=through)
        yield Part(step, name, layer, lone, factor, *whole[layer, factor], strongest, effect)
        if factor == "pattern" and len(of_heads) > 1 and effect.share >= ENOUGH:
            for head, weight in enumerate(of_heads):
                effect = knock_out(model, batch, edges, layer=layer, heads=[head])
                yield Part(step, name, layer, head, factor, *weight, strongest, effect)


def core_factor(model: HookedLM, layer: int) -> str:
    """What the matrix at `hook_phi` is called among the factors of a layer."""
    core: tuple[str, ...] = model.layers[layer].mixer.core
    return core[0] if len(core) == 1 else "phi"


def _composition(model: HookedLM, binding: Part | None, recall: Part | None) -> float | None:
    if binding is None or recall is None or binding.head is None or recall.head is None:
        return None
    for c in compositions(model):
        if c.through == "k" and c.earlier == (binding.layer, binding.head) and c.later == (recall.layer, recall.head):
            return c.value
    return None
