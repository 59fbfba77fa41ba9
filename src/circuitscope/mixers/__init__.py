"""Token mixers by name, one file each. A mixer registers itself with the decorator `register`."""

from typing import Any

from pydantic import ValidationError
from torch import nn

from circuitscope.errors import UserError, shown
from circuitscope.explain import explain
from circuitscope.mixers import (  # noqa: F401  each registers its mixers
    attention,
    based,
    deltanet,
    gated_conv,
    h3,
    hyena,
    lstm,
    mamba,
    mamba2,
    rwkv,
    s4,
    s4_mamba,
    s6,
)
from circuitscope.mixers.mixer import Mixer, MixerConfig, RotaryConfig
from circuitscope.mixers.reading import Factor, Product, Reading
from circuitscope.mixers.registry import MIXERS, register
from circuitscope.mixers.state import MixerState

__all__ = [
    "MIXERS",
    "Factor",
    "Mixer",
    "MixerConfig",
    "MixerState",
    "Product",
    "Reading",
    "RotaryConfig",
    "build_mixer",
    "config_class",
    "mixer_config",
    "names",
    "register",
]


def names() -> list[str]:
    """The names that a list of mixers can hold."""
    return sorted(MIXERS)


def config_class(name: object) -> type[MixerConfig]:
    """The options of the mixer with this name."""
    return MIXERS[name].config  # type: ignore[index]


def mixer_config(spec: Any) -> MixerConfig:
    """The config of a mixer that is given by its name, by a mapping with `name` and options, or by a config."""
    if isinstance(spec, MixerConfig):
        return spec
    if isinstance(spec, str):
        spec = {"name": spec}
    if not isinstance(spec, dict) or "name" not in spec:
        raise UserError(f"a mixer is a name or a mapping with a name, got {shown(spec)}; names: {', '.join(names())}")
    cls = config_class(spec["name"])
    try:
        return cls.model_validate(spec)
    except ValidationError as error:
        raise explain(error, cls, at="mixer") from None


def as_mapping(spec: Any) -> dict[str, Any]:
    """A mixer's name and the options that were given for it."""
    config = mixer_config(spec)
    return config.model_dump(mode="json", exclude_unset=True) | {"name": config.name}


def set_option(specs: list[dict[str, Any]], key: str, value: Any) -> None:
    """Sets an option on every mixer that has it."""
    for spec in specs:
        if key in config_class(spec["name"]).model_fields:
            spec[key] = value


def build_mixer(config: MixerConfig, d_model: int, positions: str) -> nn.Module:
    """The module for a mixer's config."""
    module: nn.Module = MIXERS[config.name].module(config, d_model, positions)
    return module
