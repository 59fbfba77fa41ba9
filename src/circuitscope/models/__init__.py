"""Models with hooks: the stack of layers, its config, and how to build a model by name."""

import importlib
from numbers import Integral
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from circuitscope import mixers
from circuitscope.arguments import explained
from circuitscope.errors import UserError, shown, unknown
from circuitscope.explain import explain
from circuitscope.models.config import ModelConfig
from circuitscope.models.presets import PRESETS, expand_preset

if TYPE_CHECKING:
    from circuitscope.models.hooked_lm import HookedLM as HookedLM
    from circuitscope.models.hooked_sequence import HookedSequenceModel as HookedSequenceModel
    from circuitscope.models.stack import HookedStack

__all__ = ["HookedLM", "HookedSequenceModel", "ModelConfig", "model", "names"]


_CLASSES = {"HookedLM": "hooked_lm", "HookedSequenceModel": "hooked_sequence"}


def __getattr__(name: str) -> Any:
    if name in _CLASSES:  # loaded on first use, because they import TransformerLens, which takes seconds
        return getattr(importlib.import_module(f"circuitscope.models.{_CLASSES[name]}"), name)
    raise AttributeError(f"module 'circuitscope.models' has no attribute '{name}'")


def names() -> list[str]:
    """The names that `model` takes."""
    return list(PRESETS)


@explained
def model(name: Any = None, /, *, seed: int = 0, **options: Any) -> "HookedStack":
    """Builds a freshly initialized model by name (by default attention), or from a config: `run.config.model`.

    Options are fields of the model's config (`d_model`, `n_layers`, `positions` …) or of its mixers
    (`n_heads` …). With `d_input` and `d_output` the model reads vectors, otherwise tokens. An option of mixers is set
    on every mixer that has it. As with any module of torch, the weights have torch's default dtype, so after
    `torch.set_default_dtype(torch.float64)` they are other random numbers.
    """
    from circuitscope.models.build import build_model

    if isinstance(seed, bool) or not isinstance(seed, Integral) or not 0 <= seed < 2**63:
        raise UserError(f"seed: expected a whole number from 0 to 2^63 − 1, got {shown(seed)}")
    if name is not None and "mixers" in options:
        raise UserError(f"give a model's name or mixers, not both: got {shown(name)} and {shown(options['mixers'])}")
    if isinstance(name, ModelConfig):
        fields = name.model_dump(mode="json")
    else:
        preset = "attention" if name is None else name
        fields = expand_preset({"preset": preset, "n_layers": options.pop("n_layers", None)})
    specs = [mixers.as_mapping(m) for m in fields["mixers"]]
    own = {field for spec in specs for field in mixers.config_class(spec["name"]).model_fields} - {"name"}
    for key, value in options.items():
        if key in ModelConfig.model_fields:
            fields[key] = value
        elif key in own:
            mixers.set_option(specs, key, value)
        else:
            raise unknown("option", key, {*ModelConfig.model_fields, *own})
    if "mixers" not in options:
        fields["mixers"] = specs
    try:
        return build_model(ModelConfig.model_validate(fields), seed=seed)
    except ValidationError as error:
        raise explain(error, ModelConfig, at="model") from None
