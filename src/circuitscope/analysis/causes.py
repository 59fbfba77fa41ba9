"""A battery of interventions on one model as tidy rows: ablations, knockouts by role, interchange patching."""

from collections.abc import Iterator
from typing import Any

import torch

from circuitscope.analysis.circuit import core_factor
from circuitscope.analysis.edges import between_roles, named_edges
from circuitscope.analysis.interventions import Effect, ablate, knock_out
from circuitscope.analysis.matrices import matrices
from circuitscope.analysis.patching import interchange
from circuitscope.analysis.scores import default_weighting, weights_on
from circuitscope.errors import UserError
from circuitscope.models import HookedLM
from circuitscope.tasks import Batch, Role

COLUMNS = {
    "run": "string",
    "step": "int64",
    "intervention": "string",
    "layer": "Int64",
    "where": "string",
    "unit": "string",
    "value": "float64",
    "stderr": "float64",
    "n": "int64",
}
_MOST_HEADS = 16  # above, heads are channels and are taken in groups
_STRONGEST = 0.1


def cause_rows(model: HookedLM, batch: Batch) -> Iterator[dict[str, Any]]:
    """Ablations (mean, Φ of later layers frozen and free), knockouts between roles, interchange patching.

    `unit` is "accuracy lost" or, for interchange, "effect" in 0..1. Channels are ablated in two groups:
    the tenth that puts most weight on the bound value, and the rest.
    """
    for layer in range(model.config.n_layers):
        for where, heads in _groups(model, batch, layer).items():
            for frozen in (True, False):
                effect = ablate(model, batch, layer=layer, heads=heads, how="mean", frozen=frozen)
                yield _row(f"mean ablation, later Φ {'frozen' if frozen else 'free'}", layer, where, effect)
        if model.layers[layer].mixer.no_phi:
            continue
        for dest, src in _roles(batch):
            effect = knock_out(model, batch, between_roles(batch.layout, dest, src), layer=layer)
            yield _row("knockout in Φ", layer, f"{dest.name}<-{src.name}", effect)
    if batch.layout.value_pos is not None and batch.layout.value_pos.shape[1] > 1:
        for row in interchange(model, batch).to_dict("records"):
            yield {
                "intervention": "interchange",
                "layer": row["layer"],
                "where": f"{row['hook']} at {row['position']}",
                "unit": "effect",
                "value": row["effect"],
                "stderr": row["stderr"],
                "n": row["n"],
            }


def _row(intervention: str, layer: int, where: str, effect: Effect) -> dict[str, Any]:
    return {
        "intervention": intervention,
        "layer": layer,
        "where": where,
        "unit": "accuracy lost",
        "value": effect.lost,
        "stderr": effect.stderr,
        "n": effect.n,
    }


def _roles(batch: Batch) -> Iterator[tuple[Role, Role]]:
    """Pairs dest, src of roles that occur in this order."""
    present = [Role(int(r)) for r in batch.layout.roles.unique()]
    for dest in present:
        for src in present:
            try:
                between_roles(batch.layout, dest, src)
            except UserError:
                continue
            yield dest, src


def _groups(model: HookedLM, batch: Batch, layer: int) -> dict[str, list[int] | None]:
    """What is ablated in a layer: all of it, and each head, or two groups of channels."""
    count = model.layers[layer].mixer.n_heads
    groups: dict[str, list[int] | None] = {f"L{layer}": None}
    if 1 < count <= _MOST_HEADS:
        return groups | {f"L{layer}H{h}": [h] for h in range(count)}
    if count == 1 or model.layers[layer].mixer.no_phi or batch.layout.value_pos is None:
        return groups
    edges = named_edges("recall", batch.layout)
    weight = torch.zeros(count)
    for mixing in matrices(model, batch.tokens, factors=["composed", core_factor(model, layer)]):
        if mixing.layer == layer and mixing.of == count:  # composed comes last and wins
            kind = default_weighting(mixing.matrix)
            weight[mixing.heads] = weights_on([edges], mixing.matrix, [kind])[edges.name, kind].mean(dim=0)
    most = max(1, int(_STRONGEST * count))
    ranked = weight.argsort(descending=True).tolist()
    groups[f"L{layer}, {most} channels strongest in recall"] = sorted(ranked[:most])
    groups[f"L{layer}, the other {count - most}"] = sorted(ranked[most:])
    return groups
