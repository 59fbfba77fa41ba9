"""Token mixers by name, one file each."""

from typing import Any

from pydantic import ValidationError
from torch import nn

from circuitscope.errors import UserError, shown, unknown
from circuitscope.explain import explain
from circuitscope.mixers.attention import Attention, AttentionConfig
from circuitscope.mixers.mamba import Mamba, MambaConfig
from circuitscope.mixers.mixer import Mixer, MixerConfig

__all__ = ["Attention", "AttentionConfig", "Mixer", "MixerConfig", "build_mixer", "mixer_config", "names"]

_MIXERS: dict[str, tuple[type[MixerConfig], type[nn.Module]]] = {
    "attention": (AttentionConfig, Attention),
    "mamba": (MambaConfig, Mamba),
}


def names() -> list[str]:
    """Names a mixer list takes."""
    return sorted(_MIXERS)


def config_class(name: object) -> type[MixerConfig]:
    """The options of the mixer with this name."""
    if not isinstance(name, str) or name not in _MIXERS:
        raise unknown("mixer", name, _MIXERS)
    return _MIXERS[name][0]


def mixer_config(spec: Any) -> MixerConfig:
    """A mixer from its name, a mapping with `name` and options, or a config."""
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


def build_mixer(config: MixerConfig, d_model: int, positions: str) -> nn.Module:
    """The module for a mixer's config."""
    return _MIXERS[config.name][1](config, d_model, positions)
