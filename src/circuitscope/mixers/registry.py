"""Mixers by name: the registry, and the decorator that adds a mixer to it."""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

from torch import nn

from circuitscope.mixers.mixer import MixerConfig
from circuitscope.registry import Registry

Module = TypeVar("Module", bound=type[nn.Module])


class Kind(NamedTuple):
    """A mixer's options and its module, built as `module(config, d_model, positions)`."""

    config: type[MixerConfig]
    module: Any


MIXERS: Registry[Kind] = Registry("mixer", "mixers")


def register(*configs: type[MixerConfig]) -> Callable[[Module], Module]:
    """Registers a module for each of these configs, under the default of the config's field `name`."""

    def remember(module: Module) -> Module:
        for config in configs:
            MIXERS.add(config.model_fields["name"].default, Kind(config, module), module.__module__)
        return module

    return remember
