"""The only module that imports transformer_lens: hook points, the hooked root module, the activation cache, layers."""

import re
from collections.abc import Callable, Iterable, Sequence
from numbers import Integral
from typing import TYPE_CHECKING, Any

import torch
from transformer_lens import ActivationCache, HookedRootModule
from transformer_lens.hook_points import HookPoint
from transformer_lens.utilities import get_act_name  # type: ignore[attr-defined]

from circuitscope.errors import UserError, shown, unknown

__all__ = [
    "Cache",
    "HookNames",
    "HookPoint",
    "HookedModel",
    "HookedRootModule",
    "NamesFilter",
    "layer_count",
    "layer_index",
    "layer_of",
    "resolve_filter",
]

# Any model with TransformerLens's hooks. A TransformerBridge has the methods of a HookedRootModule, but it is not one.
if TYPE_CHECKING:
    HookedModel = HookedRootModule
else:
    HookedModel = torch.nn.Module

NamesFilter = str | Sequence[str] | Callable[[str], bool] | None


def layer_of(name: str) -> int | None:
    """The layer in a hook's name: 3 for blocks.3.mixer.hook_z."""
    found = re.match(r"blocks\.(\d+)\.", name)
    return int(found[1]) if found else None


def layer_count(model: HookedModel) -> int:
    """The number of layers in a model's hook names."""
    return 1 + max((layer for name in model.hook_dict if (layer := layer_of(name)) is not None), default=-1)


def layer_index(model: HookedModel, layer: int) -> int:
    """The number of a layer, counted from 0; −1 is the last."""
    n = layer_count(model)
    if not n:
        raise UserError("the model has no hooks named blocks.0.…; expected a HookedLM or TransformerLens's hook names")
    if not isinstance(layer, Integral) or not -n <= layer < n:
        raise UserError(f"layer must be from 0 to {n - 1}, got {shown(layer)}")
    return int(layer) % n


class HookNames(dict[str, torch.nn.Module]):
    """Modules by name; an unknown name raises an error that gives the nearest hook."""

    def __missing__(self, name: str) -> torch.nn.Module:
        raise unknown("hook", name, (n for n, m in self.items() if isinstance(m, HookPoint)))


class Cache(ActivationCache):
    """TransformerLens's ActivationCache, which here also accepts alias names and short names of mixers' hooks."""

    def __init__(self, cache: dict[str, torch.Tensor], model: Any, aliases: dict[str, str], has_batch_dim: bool = True):
        super().__init__(cache, model, has_batch_dim=has_batch_dim)
        self.aliases = aliases

    def apply_slice_to_batch_dim(self, batch_slice: Any) -> "Cache":
        """The same activations for some of the examples."""
        part = super().apply_slice_to_batch_dim(batch_slice)
        return Cache(part.cache_dict, self.model, self.aliases, has_batch_dim=part.has_batch_dim)

    def __getitem__(self, key: Any) -> torch.Tensor:
        if key in self.cache_dict:
            return self.cache_dict[key]
        if isinstance(key, str):
            name = get_act_name(key)
        else:
            short, layer, *rest = key if isinstance(key, tuple) and len(key) > 1 else ("", "")
            if not isinstance(layer, Integral | None):
                raise UserError(
                    f'expected the name of a hook, or a short name and a layer such as ("phi", 0), got {shown(key)}'
                )
            if layer is not None and layer < 0:
                layer += self.model.cfg.n_layers
            name = get_act_name(short, layer, *rest)
            name = self._of_mixer(short, layer, name)
        name = self.aliases.get(name, name)
        if name not in self.cache_dict:
            raise self._not_here(name)
        return self.cache_dict[name]

    def _of_mixer(self, short: str, layer: int | None, name: str) -> str:
        """The mixer's hook of that short name where the block itself has none."""
        of_mixer, hooks = f"blocks.{layer}.mixer.hook_{short}", getattr(self.model, "mod_dict", {})
        return of_mixer if name not in hooks and of_mixer in hooks else name

    def _not_here(self, name: str) -> UserError:
        """Why the cache does not hold an activation."""
        hooks = getattr(self.model, "hook_dict", {})
        again = f'run_with_cache(tokens, names_filter="{name}")'
        if name in getattr(self.model, "on_demand", ()):
            return UserError(f"{name} is large and made on demand: add a names_filter, as in {again}")
        if name in hooks:
            return UserError(f"the cache does not hold {name}, which its names_filter left out; use {again}")
        phi = re.sub(r"attn\.hook_(pattern|attn_scores)$", "mixer.hook_phi", name)
        if phi != name and phi in hooks:
            return UserError(f"there is no {name}, because this layer is not attention; ask for {phi}")
        if name.rsplit(".", 1)[-1] in ("hook_mlp_out", "hook_resid_mid") and "blocks.0.hook_mlp_out" not in hooks:
            return UserError(f"there is no {name}, because this model has no MLP")
        return unknown("activation", name, self.cache_dict)


def resolve_filter(
    names_filter: NamesFilter, hooks: Iterable[str], aliases: dict[str, str], on_demand: frozenset[str]
) -> list[str]:
    """The hook names that a filter asks for; without a filter, all but the large ones that are made on demand."""
    hooks = list(hooks)
    if names_filter is None:
        return [h for h in hooks if h not in on_demand]
    if callable(names_filter) and not isinstance(names_filter, type):
        by_hook: dict[str, list[str]] = {h: [h] for h in hooks}
        for alias, name in aliases.items():
            by_hook[name].append(alias)
        return [h for h, called in by_hook.items() if any(names_filter(c) for c in called)]
    asked: Any = [names_filter] if isinstance(names_filter, str) else names_filter
    if not isinstance(asked, list | tuple | set | frozenset) or not all(isinstance(name, str) for name in asked):
        raise UserError(f"names_filter: expected a name, a list of names or a function, got {shown(names_filter)}")
    names: list[str] = [aliases.get(str(n), str(n)) for n in asked]
    for name in names:
        if name not in hooks:
            raise unknown("hook", name, hooks)
    return names
