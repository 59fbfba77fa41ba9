"""Token mixers by name, one file each."""

from typing import Any

from pydantic import ValidationError
from torch import nn

from circuitscope.errors import UserError, shown, unknown
from circuitscope.explain import explain
from circuitscope.mixers.attention import Attention, AttentionConfig
from circuitscope.mixers.based import Based, BasedConfig
from circuitscope.mixers.deltanet import DeltaNet, DeltaNetConfig, GatedDeltaNetConfig
from circuitscope.mixers.gated_conv import GatedConv, GatedConvConfig
from circuitscope.mixers.h3 import H3, H3Config
from circuitscope.mixers.hyena import Hyena, HyenaConfig
from circuitscope.mixers.lstm import LSTM, LSTMConfig
from circuitscope.mixers.mamba import Mamba, MambaConfig
from circuitscope.mixers.mamba2 import Mamba2, Mamba2Config
from circuitscope.mixers.mixer import Mixer, MixerConfig
from circuitscope.mixers.rwkv import RWKV, RWKVConfig
from circuitscope.mixers.s4 import S4, S4Config
from circuitscope.mixers.s4_mamba import S4Mamba, S4MambaConfig
from circuitscope.mixers.s6 import S6, S6Config

__all__ = ["Attention", "AttentionConfig", "Mixer", "MixerConfig", "build_mixer", "has_phi", "mixer_config", "names"]

_MIXERS: dict[str, tuple[type[MixerConfig], type[nn.Module]]] = {
    "attention": (AttentionConfig, Attention),
    "based": (BasedConfig, Based),
    "deltanet": (DeltaNetConfig, DeltaNet),
    "gated_deltanet": (GatedDeltaNetConfig, DeltaNet),
    "gated_conv": (GatedConvConfig, GatedConv),
    "h3": (H3Config, H3),
    "hyena": (HyenaConfig, Hyena),
    "lstm": (LSTMConfig, LSTM),
    "mamba": (MambaConfig, Mamba),
    "mamba2": (Mamba2Config, Mamba2),
    "rwkv": (RWKVConfig, RWKV),
    "s4": (S4Config, S4),
    "s4_mamba": (S4MambaConfig, S4Mamba),
    "s6": (S6Config, S6),
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


def as_mapping(spec: Any) -> dict[str, Any]:
    """A mixer's name and the options that were given for it."""
    config = mixer_config(spec)
    return config.model_dump(mode="json", exclude_unset=True) | {"name": config.name}


def set_option(specs: list[dict[str, Any]], key: str, value: Any) -> None:
    """Sets an option on every mixer that has it."""
    for spec in specs:
        if key in config_class(spec["name"]).model_fields:
            spec[key] = value


def has_phi(config: MixerConfig) -> bool:
    """Whether a mixer has a mixing matrix, known without building it."""
    kind: Any = _MIXERS[config.name][1]
    return not kind.no_phi


def build_mixer(config: MixerConfig, d_model: int, positions: str) -> nn.Module:
    """The module for a mixer's config."""
    return _MIXERS[config.name][1](config, d_model, positions)
