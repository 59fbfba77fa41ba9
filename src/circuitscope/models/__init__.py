"""Hookable models: the stack, its config, and how to build one by name."""

from typing import Any

from pydantic import ValidationError

from circuitscope import mixers
from circuitscope.errors import unknown
from circuitscope.explain import explain
from circuitscope.models.config import ModelConfig
from circuitscope.models.hooked_lm import HookedLM

__all__ = ["HookedLM", "ModelConfig", "model", "names"]


def names() -> list[str]:
    """Names `model` takes."""
    return mixers.names()


def model(name: str = "attention", /, *, seed: int = 0, **options: Any) -> HookedLM:
    """A freshly initialized model: every layer the named mixer.

    Options are fields of the model's config (`d_model`, `n_layers`, `positions` …) or of the mixer
    (`n_heads` …).
    """
    known = set(ModelConfig.model_fields)
    mixer_fields = set(mixers.config_class(name).model_fields) - {"name"}
    for key in options:
        if key not in known | mixer_fields:
            raise unknown("option", key, known | mixer_fields)
    mixer = {"name": name, **{k: v for k, v in options.items() if k in mixer_fields}}
    fields = {"mixers": [mixer], **{k: v for k, v in options.items() if k in known}}
    try:
        return HookedLM(ModelConfig.model_validate(fields), seed=seed)
    except ValidationError as error:
        raise explain(error, ModelConfig, at="model") from None
