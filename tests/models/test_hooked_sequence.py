"""A model that reads vectors has the blocks, hooks and checkpoints of one that reads tokens; only its ends differ."""

import numpy as np
import pytest
import torch

import circuitscope as cs
from circuitscope.models.accounting import forward_flops_per_token, parameters
from circuitscope.models.build import build_model
from circuitscope.models.config import ModelConfig


def vectors(preset="attention", **options):
    return cs.model(preset, **{"d_model": 16, "d_input": 5, "d_output": 3, "max_length": 12, **options})


@pytest.mark.parametrize("preset", ["attention", "mamba", "mambaformer", "hyena"])
def test_its_answers_are_the_read_out_of_the_stack_on_what_it_reads_in(preset):
    model, x = vectors(preset).eval(), torch.randn(2, 12, 5)
    resid = x @ model.encode.weight.T + model.encode.bias
    if model.config.positions == "learned":
        resid = resid + model.pos_embed
    for block in model.layers:
        resid = block(resid)
    expected = model.ln_final(resid) @ model.decode.weight.T + model.decode.bias
    torch.testing.assert_close(model(x), expected)
    some = torch.tensor([1, 9, 20])
    torch.testing.assert_close(model(x, at=some), expected.flatten(0, 1)[some])


@pytest.mark.parametrize("preset", ["attention", "mamba"])
def test_it_has_the_blocks_and_hooks_of_a_model_of_tokens(preset):
    on_vectors, on_tokens = vectors(preset), cs.model(preset, d_model=16, vocab_size=32, max_length=12)
    assert on_vectors.hook_dict.keys() == on_tokens.hook_dict.keys()
    of_blocks = [name for name in on_tokens.state_dict() if name.startswith(("blocks", "ln_final", "pos_embed"))]
    assert [name for name in on_vectors.state_dict() if not name.startswith(("encode", "decode"))] == of_blocks
    _, cache = on_vectors.run_with_cache(torch.randn(2, 12, 5), names_filter="blocks.1.mixer.hook_phi")
    assert cache["blocks.1.mixer.hook_phi"].shape[2:] == (12, 12)
    assert cs.phi(on_vectors, torch.randn(2, 12, 5), layer=0).shape[2:] == (12, 12)


def test_the_config_says_what_a_model_reads():
    assert isinstance(build_model(ModelConfig(d_input=4, d_output=2)), cs.HookedSequenceModel)
    assert isinstance(build_model(ModelConfig()), cs.HookedLM)
    with pytest.raises(cs.UserError, match=r"needs model\.d_input and model\.d_output"):
        cs.model("attention", d_input=4)
    with pytest.raises(cs.UserError, match="mqar has tokens, and a model with d_input 4 reads vectors"):
        cs.RunConfig.build({"d_input": 4, "d_output": 2}, "mqar")


def test_lists_and_arrays_and_single_sequences_are_read_and_other_things_refused():
    model, x = vectors().eval(), np.random.default_rng(0).normal(size=(12, 5))
    torch.testing.assert_close(model(x), model(torch.tensor(x[None], dtype=torch.float32)))
    torch.testing.assert_close(model(x.tolist()), model(x))
    for wrong in (torch.zeros(2, 12, dtype=torch.long), torch.randn(12, 4), "x", torch.zeros(2, 0, 5)):
        with pytest.raises(cs.UserError, match="expected vectors"):
            model(wrong)


def test_read_in_and_read_out_start_as_in_torch_whatever_init_says():
    for init in ("gpt2", "native"):
        model = vectors(d_model=256, init=init)
        assert float(model.encode.weight.detach().abs().max()) == pytest.approx(5**-0.5, rel=0.05)
        assert float(model.decode.weight.detach().abs().max()) == pytest.approx(256**-0.5, rel=0.05)


def test_parameters_and_flops_count_the_ends():
    model = vectors()
    total = sum(p.numel() for p in model.parameters())
    ends = 16 * 5 + 16 + 16 * 3 + 3
    assert parameters(model) == (total, total - ends - 12 * 16)
    smaller = vectors(d_output=2)
    assert forward_flops_per_token(model, 12) - forward_flops_per_token(smaller, 12) == 2 * 16
