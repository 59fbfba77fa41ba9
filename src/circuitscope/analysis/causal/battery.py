"""A battery of interventions on one model as tidy rows: ablations, knockouts by role, interchange patching."""

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from circuitscope.analysis.causal.affordable import affordable
from circuitscope.analysis.causal.interventions import Accuracies, Chosen, Effect, with_edges_cut, with_heads_replaced
from circuitscope.analysis.causal.patching import Moves, moves, table_of
from circuitscope.analysis.reading.hooked import on_device_of
from circuitscope.analysis.reading.opened import opened
from circuitscope.analysis.registry import Row, analysis
from circuitscope.analysis.scores.edges import between_roles, named_edges
from circuitscope.analysis.scores.held_out import HeldOut
from circuitscope.analysis.scores.weight_on_edges import weightings_of, weights_on
from circuitscope.devices import Transfer
from circuitscope.errors import UserError
from circuitscope.lens import HookedModel
from circuitscope.mixers.reading import Reading
from circuitscope.tasks import Batch, Role

COLUMNS = {
    "intervention": "string",
    "layer": "Int64",
    "where": "string",
    "unit": "string",
    "value": "float64",
    "stderr": "float64",
    "n": "int64",
}
_STRONGEST = 0.1


@analysis(
    "causal",
    "Ablations of every head or layer, knockouts between roles, and interchange patching.",
    COLUMNS,
    means={"unit": "what the value measures: accuracy or explained variance lost, or the effect in 0..1"},
    steps="last",
    leaves_out=lambda run: (
        [] if "pairs" in run.config.task.features else ["interchange is left out: it needs a task with keys and values"]
    ),
    at_most=lambda run: affordable(run.config),
)
def causal_of(model: HookedModel, data: HeldOut) -> list[Row]:
    """`causal_rows` on held-out sequences."""
    return causal_rows(model, data.own)


def causal_rows(model: HookedModel, batch: Batch) -> list[Row]:
    """Ablations by the mean, knockouts between roles, interchange patching.

    Ablations are done with Φ of later layers free and, if all of these layers have Φ, also frozen. Channels are
    ablated in two groups: the tenth that puts most weight on the bound value, and the rest. `unit` is "accuracy lost"
    (where labels are vectors, what their judge measures) or, for interchange, "effect" in 0..1. All of it comes to the
    CPU by one transfer.
    """
    rows: list[Row] = []
    with Transfer() as transfer:
        for intervention, layer, where, accuracies in _interventions(model, batch):
            transfer.then(accuracies, partial(_add_effect, rows, intervention, layer, where, batch.judge.measures))
        if batch.layout.key_pos is not None and batch.layout.key_pos.shape[1] > 1:
            moved = moves(model, batch)
            transfer.then(list(moved.values()), partial(_add_interchange, rows, list(moved)))
    return rows


def _interventions(model: HookedModel, batch: Batch) -> Iterator[tuple[str, int, str, Accuracies]]:
    """Every ablation and knockout: what it is, its layer and where, and the accuracies, where the model is."""
    tokens = on_device_of(model, batch.inputs)
    without_phi = [layer for layer, reading in opened(model).walk(tokens[:1]) if reading.no_phi]
    for layer, reading in opened(model).walk(tokens):
        can_freeze = not any(later > layer for later in without_phi)
        for where, heads in _groups(reading, batch, layer).items():
            for frozen in (True, False) if can_freeze else (False,):
                found = with_heads_replaced(model, batch, layer, heads, "mean", frozen)
                yield f"mean ablation, later Φ {'frozen' if frozen else 'free'}", layer, where, found
        if reading.no_phi:
            continue
        for dest, src in _roles(batch):
            found = with_edges_cut(model, batch, between_roles(batch.layout, dest, src), layer)
            yield "knockout in Φ", layer, f"{dest.name}<-{src.name}", found


def _add_effect(
    rows: list[Row], intervention: str, layer: int, where: str, measures: str, accuracies: list[Tensor]
) -> None:
    effect = Effect.of(*accuracies)
    rows.append(
        {
            "intervention": intervention,
            "layer": layer,
            "where": where,
            "unit": f"{measures} lost",
            "value": effect.lost,
            "stderr": effect.stderr,
            "n": effect.n,
        }
    )


def _add_interchange(rows: list[Row], places: list[tuple[str, str | int]], found: list[Tensor]) -> None:
    here: Moves = dict(zip(places, found, strict=True))
    rows += [
        {
            "intervention": "interchange",
            "layer": row["layer"],
            "where": f"{row['hook']} at {row['position']}",
            "unit": "effect",
            "value": row["effect"],
            "stderr": row["stderr"],
            "n": row["n"],
        }
        for row in table_of(here).to_dict("records")
    ]


def _roles(batch: Batch) -> Iterator[tuple[Role, Role]]:
    """Pairs (dest, src) of roles where some dest has an earlier src."""
    present = [Role(int(r)) for r in batch.layout.roles.unique()]
    for dest in present:
        for src in present:
            try:
                between_roles(batch.layout, dest, src)
            except UserError:
                continue
            yield dest, src


@torch.no_grad()
def _groups(reading: Reading, batch: Batch, layer: int) -> dict[str, Chosen]:
    """What is ablated in a layer: all of it, and then each head or two groups of channels."""
    groups: dict[str, Chosen] = {f"L{layer}": None}
    if reading.no_phi or reading.core.size == 1:
        return groups
    count = reading.core.size
    if reading.core.unit == "head":
        return groups | {f"L{layer}H{h}": [h] for h in range(count)}
    if batch.layout.value_pos is None:
        return groups
    edges = named_edges("recall", batch.layout)
    ranked_by = reading.whole if reading.whole.size == count else reading.core
    kind = weightings_of(ranked_by)[0]
    weights = [weights_on([edges], matrix, [kind])[edges.name, kind] for _, matrix in reading.slices(ranked_by)]
    most = max(1, int(_STRONGEST * count))
    ranked = torch.cat(weights, dim=1).mean(dim=0).argsort(descending=True)  # stays where the model is
    groups[f"L{layer}, {most} channels strongest in recall"] = ranked[:most]
    groups[f"L{layer}, the other {count - most}"] = ranked[most:]
    return groups
