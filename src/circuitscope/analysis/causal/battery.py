"""A battery of interventions on one model as tidy rows: ablations, knockouts by role, interchange patching."""

from collections.abc import Iterator

import torch

from circuitscope.analysis.causal.affordable import affordable
from circuitscope.analysis.causal.interventions import Effect, ablate, knock_out
from circuitscope.analysis.causal.patching import interchange
from circuitscope.analysis.reading.hooked import on_device_of
from circuitscope.analysis.reading.opened import opened
from circuitscope.analysis.registry import Row, analysis
from circuitscope.analysis.scores.edges import between_roles, named_edges
from circuitscope.analysis.scores.held_out import HeldOut
from circuitscope.analysis.scores.weight_on_edges import default_weighting, weights_on
from circuitscope.devices import on_cpu
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
    at_most=lambda run: affordable(run.config),
)
def causal_of(model: HookedModel, data: HeldOut) -> Iterator[Row]:
    """`causal_rows` on held-out sequences."""
    return causal_rows(model, data.own)


def causal_rows(model: HookedModel, batch: Batch) -> Iterator[Row]:
    """Ablations by the mean, knockouts between roles, interchange patching.

    Ablations are done with Φ of later layers free and, if all of these layers have Φ, also frozen. Channels are
    ablated in two groups: the tenth that puts most weight on the bound value, and the rest. `unit` is "accuracy lost"
    (where labels are vectors, what their judge measures) or, for interchange, "effect" in 0..1.
    """
    tokens, measures = on_device_of(model, batch.inputs), batch.judge.measures
    without_phi = [layer for layer, reading in opened(model).walk(tokens[:1]) if reading.no_phi]
    for layer, reading in opened(model).walk(tokens):
        can_freeze = not any(later > layer for later in without_phi)
        for where, heads in _groups(reading, batch, layer).items():
            for frozen in (True, False) if can_freeze else (False,):
                effect = ablate(model, batch, layer=layer, heads=heads, how="mean", frozen=frozen)
                yield _row(f"mean ablation, later Φ {'frozen' if frozen else 'free'}", layer, where, effect, measures)
        if reading.no_phi:
            continue
        for dest, src in _roles(batch):
            effect = knock_out(model, batch, between_roles(batch.layout, dest, src), layer=layer)
            yield _row("knockout in Φ", layer, f"{dest.name}<-{src.name}", effect, measures)
    if batch.layout.key_pos is not None and batch.layout.key_pos.shape[1] > 1:
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


def _row(intervention: str, layer: int, where: str, effect: Effect, measures: str) -> Row:
    return {
        "intervention": intervention,
        "layer": layer,
        "where": where,
        "unit": f"{measures} lost",
        "value": effect.lost,
        "stderr": effect.stderr,
        "n": effect.n,
    }


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
def _groups(reading: Reading, batch: Batch, layer: int) -> dict[str, list[int] | None]:
    """What is ablated in a layer: all of it, and then each head or two groups of channels."""
    groups: dict[str, list[int] | None] = {f"L{layer}": None}
    if reading.no_phi or reading.core.size == 1:
        return groups
    count = reading.core.size
    if reading.core.unit == "head":
        return groups | {f"L{layer}H{h}": [h] for h in range(count)}
    if batch.layout.value_pos is None:
        return groups
    edges = named_edges("recall", batch.layout)
    weight = torch.zeros(count)
    ranked_by = reading.whole if reading.whole.size == count else reading.core
    for units, matrix in reading.slices(ranked_by):
        kind = default_weighting(matrix)
        weight[units] = on_cpu([weights_on([edges], matrix, [kind])[edges.name, kind].mean(dim=0)])[0]
    most = max(1, int(_STRONGEST * count))
    ranked = weight.argsort(descending=True).tolist()
    groups[f"L{layer}, {most} channels strongest in recall"] = sorted(ranked[:most])
    groups[f"L{layer}, the other {count - most}"] = sorted(ranked[most:])
    return groups
