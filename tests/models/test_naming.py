"""A model is called by what distinguishes it, as its config says."""

import pytest

from circuitscope.models.config import ModelConfig
from circuitscope.models.naming import layer_names, model_name, preset_of
from circuitscope.models.presets import PRESETS


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("layers", [2, 4])
def test_every_preset_is_recognized_from_the_config_that_it_makes(preset, layers):
    made = ModelConfig.model_validate({"preset": preset, "n_layers": layers, "d_model": 32})
    again = ModelConfig.model_validate(made.model_dump(mode="json"))
    assert preset_of(again) == preset
    assert preset in model_name(again)


def test_no_two_presets_have_the_same_name_in_a_heading():
    names = [model_name(ModelConfig.model_validate({"preset": preset, "n_layers": 2})) for preset in PRESETS]
    assert len(set(names)) == len(PRESETS)


TWO_HEADS = {"name": "attention", "conv_on": "k", "n_heads": 2}


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({}, "attention + attention"),
        ({"preset": "attention_conv_k"}, "attention_conv_k + attention_conv_k"),
        ({"preset": "attention_conv_k", "n_layers": 1, "positions": "rope"}, "attention_conv_k"),
        ({"mixers": [TWO_HEADS], "n_layers": 1}, "attention (n_heads 2, conv_on k)"),
        ({"mixers": [{"name": "mamba", "conv": False, "gate": False}], "n_layers": 1}, "mamba (no conv, no gate)"),
        ({"preset": "mamba", "n_layers": 1, "state_mixer": "none"}, "mamba_bare"),
        ({"mixers": ["mamba", "attention"]}, "mamba + attention"),
        ({"preset": "mambaformer", "n_layers": 1}, "mambaformer (mamba + attention + mamba)"),
        ({"preset": "based"}, "gated_conv + based"),
    ],
    ids=str,
)
def test_names_say_what_is_set(fields, name):
    assert model_name(ModelConfig.model_validate(fields)) == name


def test_a_layer_has_a_name_of_its_own():
    assert layer_names(ModelConfig.model_validate({"preset": "attention_conv_q"})) == ["attention_conv_q"] * 2
    assert layer_names(ModelConfig.model_validate({"preset": "mambaformer", "n_layers": 1}))[1] == "attention"
