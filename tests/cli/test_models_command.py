"""`circuitscope models hooks NAME` names the axes of what each hook carries."""

import pytest
from typer.testing import CliRunner

import circuitscope as cs
from circuitscope.cli.models import app


def shapes(*arguments: str) -> dict[str, str]:
    """The printed shape of each hook."""
    result = CliRunner().invoke(app, ["hooks", *arguments], env={"COLUMNS": "200"}, catch_exceptions=False)
    assert result.exit_code == 0
    lines = [line.split(maxsplit=1) for line in result.output.splitlines()[1:]]
    return {name: " ".join(rest.split()) for name, rest in lines}


def test_the_axes_of_rwkv_are_named_and_not_guessed_from_their_sizes():
    """Its state ends in three numbers, as many as the command once ran sequences."""
    found = shapes("rwkv")
    assert found["blocks.0.mixer.hook_state"] == "[batch, pos, channel 64, part 3] on demand"
    assert found["blocks.0.mixer.hook_phi"] == "[batch, channel 64, dest, src] on demand"
    assert found["blocks.1.hook_resid_post"] == "[batch, pos, d_model 64]"


def test_sizes_are_those_of_the_width_asked_for():
    found = shapes("mamba", "--d-model", "7")
    assert found["blocks.0.mixer.hook_state"].startswith("[batch, pos, channel 14, state 16]")
    assert found["hook_embed"] == "[batch, pos, d_model 7]"


@pytest.mark.parametrize("name", ["attention", "mamba2", "lstm", "attention_conv_v", "h3"])
def test_every_hook_is_listed_and_no_axis_is_a_bare_number(name):
    found = shapes(name)
    assert set(found) == set(cs.model(name).hook_dict)
    for shape in found.values():
        assert shape.startswith("[batch, ")
        assert not any(axis.strip(" []").isdecimal() for axis in shape.split("]")[0].split(","))


@pytest.mark.slow
def test_a_model_that_a_width_does_not_allow_is_named_with_the_reason_and_the_others_are_listed():
    out = CliRunner().invoke(app, ["--d-model", "7"], env={"COLUMNS": "200"}, catch_exceptions=False).output
    lines = {line.split()[0]: line for line in out.splitlines() if line.strip()}
    assert "not possible here: headdim must divide" in lines["mamba2"]
    assert "torch's LSTM" in lines["lstm"]
    with pytest.raises(cs.UserError, match="n_layers"):
        CliRunner().invoke(app, ["--layers", "0"], catch_exceptions=False)
