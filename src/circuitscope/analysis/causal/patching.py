"""Shows where a model keeps which value belongs to which key, by moving activations between twin prompts.

The twins differ in one thing: the values of two pairs are exchanged. Their metric is the logit of the
right value minus the logit of the other one, at the queries that ask for these pairs; by symmetry it is
about as low on the exchanged prompt as it is high on the clean one. An activation of the clean run put
into the exchanged run has the effect

    (patched − exchanged) / (clean − exchanged),

0 where it does nothing and 1 where it restores the clean answer. It may leave [0, 1] where a patch
overshoots or makes things worse.

`interchange` runs every patch; `attribution_patching` estimates all of them from one gradient, to first
order. On models with TransformerLens's hook names, its own `patching` tools can do what `interchange` does, one
position or head at a time and with all logits.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import pandas as pd
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from circuitscope.analysis.draws import seeded
from circuitscope.analysis.reading.gradients import with_gradients
from circuitscope.analysis.reading.hooked import (
    Hooks,
    is_matrix,
    logits_at,
    on_device_of,
    seen_at,
    slices,
    undisturbed,
)
from circuitscope.arguments import explained
from circuitscope.devices import on_cpu
from circuitscope.errors import UserError, shown, unknown
from circuitscope.lens import HookedModel, layer_of
from circuitscope.tasks import Batch, Layout, Role, check_batch

By = Literal["role", "pos", "all"]
Chosen = str | Sequence[str] | Callable[[str], bool] | None
PerSequence = Float[Tensor, " batch"]
Places = dict[str | int, Bool[Tensor, "batch pos"]]
Moves = dict[tuple[str, str | int], PerSequence]  # patched − exchanged by hook and place; GAP has clean − exchanged
GAP = ("", "gap")
DEFAULT_HOOKS = ("resid_pre", "mixer_out", "attn_out", "mlp_out")


@dataclass(frozen=True)
class Twins:
    """Prompts, the same prompts with the values of two pairs exchanged, and the queries that ask for these pairs.

    Query q of a sequence is asked at `pos`; `right` is its answer in the clean prompt, `other` in the
    exchanged one. Where `asked` is False the query asks for another pair and does not count.
    """

    clean: Int[Tensor, "batch pos"] | Float[Tensor, "batch pos channel"]
    exchanged: Int[Tensor, "batch pos"] | Float[Tensor, "batch pos channel"]
    pos: Int[Tensor, "batch query"]
    right: Int[Tensor, "batch query"] | Float[Tensor, "batch query channel"]
    other: Int[Tensor, "batch query"] | Float[Tensor, "batch query channel"]
    asked: Bool[Tensor, "batch query"]

    def part(self, rows: slice) -> "Twins":
        """The twins of some sequences."""
        return Twins(*(x[rows] for x in self.fields()))

    def on_device_of(self, model: HookedModel) -> "Twins":
        """The twins on the device of the model's parameters."""
        return Twins(*(on_device_of(model, x) for x in self.fields()))

    def fields(self) -> tuple[Tensor, ...]:
        """All tensors."""
        return self.clean, self.exchanged, self.pos, self.right, self.other, self.asked


def exchange_values(batch: Batch, seed: int = 0) -> Twins:
    """Twin prompts: in each sequence a pair that is asked for, drawn at random, trades values with another pair."""
    layout, inputs = batch.layout, batch.inputs.cpu()
    if layout.key_pos is None or layout.value_pos is None or layout.query_pos is None or layout.query_pair is None:
        raise UserError("interchange needs a task with keys, values and queries, such as mqar; this layout has none")
    n, pairs, queries = len(batch), layout.value_pos.shape[1] // layout.passes, layout.query_pos.shape[1]
    if pairs < 2:
        raise UserError(f"interchange exchanges the values of two pairs; expected at least 2, got {pairs}")
    draw = seeded(seed)
    first = layout.query_pair.gather(1, torch.randint(queries, (n, 1), generator=draw)) % pairs
    second = (first + torch.randint(1, pairs, (n, 1), generator=draw)) % pairs
    both, traded = torch.cat([first, second], dim=1), torch.cat([second, first], dim=1)
    rows, exchanged, answer = torch.arange(n)[:, None], inputs.clone(), layout.answer_pos()
    for i in range(layout.passes):  # in every pass over the context
        to, of = (layout.value_pos.gather(1, which + i * pairs) for which in (both, traded))
        exchanged[rows, to] = inputs[rows, of]
    asked = (layout.query_pair[:, :, None] % pairs == both[:, None, :]).any(dim=2)
    return Twins(inputs, exchanged, layout.query_pos, inputs[rows, answer], exchanged[rows, answer], asked)


@explained
def interchange(
    model: HookedModel, batch: Batch, *, hooks: Chosen = None, by: By = "role", seed: int = 0
) -> pd.DataFrame:
    """Effect of putting clean activations into the run on exchanged values, one hook and place at a time.

    Args:
        hooks: names of hooks, whole ("blocks.0.mixer.hook_v") or short ("v": in every layer), or a
            function of the name; by default the stream before each layer and what each branch adds.
            A matrix [batch, head, dest, src] is patched in the rows of its destinations.
        by: what one patch covers: all positions of a "role" in the layout, one "pos", or "all".
        seed: seed for the choice of the pairs that trade values.

    Returns:
        One row per hook and place: layer, hook, position (a role, a number or "all"), effect, its
        standard error, `moved` (patched − exchanged, in logits), `gap` (clean − exchanged), n sequences.
        The effect is a ratio of means, and nan where the gap is not above three of its standard errors:
        a model that does not tell the twins apart has nothing to restore.
    """
    found = moves(model, batch, hooks, by, seed)
    return table_of(dict(zip(found, on_cpu(list(found.values())), strict=True)))


def moves(model: HookedModel, batch: Batch, hooks: Chosen = None, by: By = "role", seed: int = 0) -> Moves:
    """What `interchange` makes its table of, where the model is."""
    twins, names, places = _prepared(model, batch, hooks, by, seed)
    gaps: list[PerSequence] = []
    moved: dict[tuple[str, str | int], list[PerSequence]] = {(n, p): [] for n in names for p in places}
    with undisturbed(model):
        for rows in slices(model, twins.clean, names, labels=twins.pos.shape[1]):
            part = twins.part(rows)
            clean = seen_at(model, part.clean, names)
            low = _difference(model, part.exchanged, part)
            gaps.append(_difference(model, part.clean, part) - low)
            for name, place in moved:
                mask = places[place][rows]
                patch = (name, _patching(clean[name], _over_positions(model, name, clean[name], mask)))
                moved[name, place].append(_difference(model, part.exchanged, part, [patch]) - low)
    return {GAP: torch.cat(gaps), **{key: torch.cat(parts) for key, parts in moved.items()}}


@explained
def attribution_patching(
    model: HookedModel, batch: Batch, *, hooks: Chosen = None, by: By = "role", seed: int = 0
) -> pd.DataFrame:
    """The table of `interchange`, estimated to first order: (a_clean − a) · ∂metric/∂a, both on exchanged values.

    One gradient serves all hooks and places. Where the metric is curved between the twins (a saturated
    softmax, a norm) the estimate may be far off: check what matters with `interchange`.
    """
    twins, names, places = _prepared(model, batch, hooks, by, seed)
    gaps: list[PerSequence] = []
    moved: dict[tuple[str, str | int], list[PerSequence]] = {(n, p): [] for n in names for p in places}
    with undisturbed(model):
        for rows in slices(model, twins.clean, names, labels=twins.pos.shape[1]):
            part = twins.part(rows)
            clean = seen_at(model, part.clean, names)
            here, slopes, low = _gradients(model, part, names)
            gaps.append(_difference(model, part.clean, part) - low)
            for name, place in moved:
                mask = _over_positions(model, name, clean[name], places[place][rows])
                change = (clean[name] - here[name]) * slopes[name] * mask
                moved[name, place].append(change.flatten(1).sum(dim=1))
    on_host = on_cpu([torch.cat(gaps), *map(torch.cat, moved.values())])
    return table_of(dict(zip([GAP, *moved], on_host, strict=True)))


def _prepared(model: HookedModel, batch: Batch, hooks: Chosen, by: By, seed: int) -> tuple[Twins, list[str], Places]:
    check_batch(batch)
    names = _names(model, hooks)
    if by not in get_args(By):
        raise unknown("grouping", by, get_args(By))
    if by != "pos" and (state := [name for name in names if name.endswith("hook_state")]):
        raise UserError(f"{state[0]}: states patched at several positions add up; expected by='pos'")
    places = _places(batch.layout, by)
    twins = exchange_values(batch, seed).on_device_of(model)
    return twins, names, {place: on_device_of(model, mask) for place, mask in places.items()}


def _names(model: HookedModel, hooks: Chosen) -> list[str]:
    known = list(model.hook_dict)
    if callable(hooks) and not isinstance(hooks, type):
        found = [name for name in known if hooks(name)]
        if not found:
            raise UserError(f"no hook of the model is chosen; it has {len(known)}, such as {', '.join(known[:3])}")
        return found
    asked = DEFAULT_HOOKS if hooks is None else [hooks] if isinstance(hooks, str) else hooks
    if not isinstance(asked, list | tuple | set | frozenset) or not all(isinstance(one, str) for one in asked):
        raise UserError(f"hooks: expected a name, a list of names or a function, got {shown(hooks)}")
    aliases: dict[str, str] = getattr(model, "aliases", {})
    out: list[str] = []
    for one in asked:
        full = aliases.get(one, one)
        short = [name for name in known if name.rsplit(".", 1)[-1] in (one, f"hook_{one}")]
        if full not in known and not short and hooks is not None:
            raise unknown("hook", one, known)
        out += [full] if full in known else short
    if not out:
        raise UserError(f"the model has none of the hooks {', '.join(DEFAULT_HOOKS)}; name some")
    return list(dict.fromkeys(out))


def _places(layout: Layout, by: By) -> Places:
    roles = layout.roles
    if by == "role":
        return {Role(r).name: roles == r for r in roles.unique().tolist()}
    if by == "pos":
        here = torch.arange(roles.shape[1]).expand_as(roles)
        return {i: here == i for i in range(roles.shape[1])}
    return {"all": torch.ones_like(roles, dtype=torch.bool)}


def _over_positions(
    model: HookedModel, name: str, value: Tensor, mask: Bool[Tensor, "batch pos"]
) -> Bool[Tensor, "..."]:
    """The mask in a shape that broadcasts over an activation."""
    axis = 2 if is_matrix(model, name) else 1
    if value.ndim <= axis or (value.shape[0], value.shape[axis]) != tuple(mask.shape):
        raise UserError(
            f"{name} carries {tuple(value.shape)}, but a patch needs [batch, pos, …]"
            f" with {mask.shape[0]} sequences of {mask.shape[1]} positions"
        )
    return mask.view(mask.shape[0], *[1] * (axis - 1), mask.shape[1], *[1] * (value.ndim - axis - 1))


def _patching(clean: Tensor, mask: Tensor) -> Callable[..., Tensor]:
    return lambda value, hook: torch.where(mask, clean, value)


def _difference(model: HookedModel, tokens: Tensor, twins: Twins, hooks: Hooks = ()) -> PerSequence:
    """Logit of the right value minus that of the other one, averaged over the queries that count.

    Where values are vectors, the negative squared distance to a value takes the place of its logit.
    """
    n, length = tokens.shape[:2]
    where = torch.arange(n, device=tokens.device)[:, None] * length + twins.pos
    logits = logits_at(model, tokens, where.flatten(), hooks).unflatten(0, where.shape)
    right, other = (
        -(logits - x).square().sum(dim=2) if x.is_floating_point() else logits.gather(2, x[..., None]).squeeze(2)
        for x in (twins.right, twins.other)
    )
    difference: Tensor = ((right - other) * twins.asked).sum(dim=1) / twins.asked.sum(dim=1)
    return difference


def _gradients(
    model: HookedModel, twins: Twins, names: list[str]
) -> tuple[dict[str, Tensor], dict[str, Tensor], PerSequence]:
    """On exchanged values: the named activations, the metric's gradient at each, the metric itself."""
    live: dict[str, Tensor] = {}

    def keeps(name: str) -> Callable[..., Tensor]:
        def keep(value: Tensor, hook: Any) -> Tensor:
            live[name] = value if value.requires_grad else value.detach().requires_grad_()
            return live[name]

        return keep

    with with_gradients(model):
        twins = Twins(*(x.clone() for x in twins.fields()))
        low = _difference(model, twins.exchanged, twins, [(name, keeps(name)) for name in names])
        found = torch.autograd.grad(low.sum(), [live[name] for name in names], allow_unused=True)
    slopes = {n: torch.zeros_like(live[n]) if g is None else g for n, g in zip(names, found, strict=True)}
    return {name: value.detach() for name, value in live.items()}, slopes, low.detach()


def table_of(found: Moves) -> pd.DataFrame:
    """The table of `interchange`, from numbers on the CPU."""
    moved = {key: part.double() for key, part in found.items()}
    gap = moved.pop(GAP)
    mean, n = float(gap.mean()), len(gap)
    told_apart = mean > 3 * float(_stderr(gap)) if n > 1 else mean > 0
    rows = []
    for (name, place), move in moved.items():
        effect = float(move.mean()) / mean if told_apart else float("nan")
        stderr = float(_stderr(move - effect * gap)) / mean if told_apart else float("nan")
        rows.append((layer_of(name), name, place, effect, stderr, float(move.mean()), mean, n))
    table = pd.DataFrame(rows, columns=["layer", "hook", "position", "effect", "stderr", "moved", "gap", "n"])
    return table.astype({"layer": "Int64"})


def _stderr(x: PerSequence) -> Tensor:
    return x.std() / len(x) ** 0.5 if len(x) > 1 else x.new_tensor(float("nan"))
