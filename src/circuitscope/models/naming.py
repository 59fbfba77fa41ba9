"""What people call a model: by the preset that its config is equal to, else by its mixers and how they are set."""

from bisect import bisect_left

from circuitscope import mixers
from circuitscope.mixers import MixerConfig, mixer_config
from circuitscope.models.config import ModelConfig
from circuitscope.models.presets import PRESETS, Preset


def model_name(model: ModelConfig) -> str:
    """The layers in order, such as "attention_conv_k + attention_conv_k"; a preset of unlike layers by its name."""
    layers = " + ".join(layer_names(model))
    preset = preset_of(model)
    return layers if preset is None or _like(model.mixers) or preset in mixers.names() else f"{preset} ({layers})"


def layer_names(model: ModelConfig) -> list[str]:
    """Each layer: by the preset if all are alike, else by its mixer, with what is set if no preset says that."""
    preset = preset_of(model)
    if preset is None:
        return [_with_options(mixer) for mixer in model.mixers]
    return [preset if _like(model.mixers) else mixer.name for mixer in model.mixers]


def preset_of(model: ModelConfig) -> str | None:
    """The preset whose mixers the model has; of several, the one that fixes most of the model's other fields."""
    fixed = {name: _fixes(preset, model) for name, preset in PRESETS.items()}
    return max((name for name, count in fixed.items() if count), key=lambda name: fixed[name], default=None)


def _fixes(preset: Preset, model: ModelConfig) -> int:
    """How many fields of the model's config the preset fixes; 0 if it is not the model's preset.

    A hybrid that is so small that its layers are alike is not called by the hybrid's name.
    """
    sizes = range(1, model.n_layers + 1)
    size = sizes[bisect_left(sizes, model.n_layers, key=lambda n: len(preset.fields(n)["mixers"]))]
    fields = preset.fields(size)
    listed = fields.pop("mixers")
    if len(listed) != model.n_layers or any(getattr(model, name) != value for name, value in fields.items()):
        return 0
    same = tuple(map(mixer_config, listed)) == model.mixers
    alike = _like(tuple(map(mixer_config, preset.fields(preset.layers)["mixers"])))
    return 1 + len(fields) if same and alike == _like(model.mixers) else 0


def _like(several: tuple[MixerConfig, ...]) -> bool:
    return len({mixer.name for mixer in several}) == 1


def _with_options(mixer: MixerConfig) -> str:
    said = []
    for name, field in type(mixer).model_fields.items():
        value = getattr(mixer, name)
        if name != "name" and value != field.get_default(call_default_factory=True):
            said.append(f"{'' if value else 'no '}{name}" if isinstance(value, bool) else f"{name} {value}")
    return f"{mixer.name} ({', '.join(said)})" if said else mixer.name
