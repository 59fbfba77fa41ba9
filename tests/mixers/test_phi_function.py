"""circuitscope.phi and phi_chunks: what they give under hooks, in slices and reduced, and what they refuse."""

import psutil
import pytest
import torch

import circuitscope as cs
from circuitscope import mixers

TOKENS = torch.randint(9, (2, 12), generator=torch.Generator().manual_seed(0))
NAMES = [name for name in mixers.names() if name != "lstm"]


def model(*names: str, **options) -> cs.HookedLM:
    specs = [{"name": n, **({"headdim": 8, "d_state": 4} if n == "mamba2" else {})} for n in names]
    shape = {"mixers": specs, "n_layers": len(names), "d_model": 16, "vocab_size": 9, "max_length": 12}
    return cs.HookedLM(cs.models.ModelConfig.model_validate(shape | options)).eval()


def halve(value, hook):
    return 0.5 * value


def entering_phi(built: cs.HookedLM, layer: int) -> torch.Tensor:
    name = f"blocks.{layer}.mixer.hook_phi"
    return built.run_with_cache(TOKENS, names_filter=name)[1][name].detach()


@pytest.mark.parametrize("name", NAMES)
def test_phi_is_what_hook_phi_carries_and_slices_and_reductions_are_of_it(name):
    """1e-6 of the largest entry."""
    built = model(name)
    whole = cs.phi(built, TOKENS, 0).detach()
    torch.testing.assert_close(whole, entering_phi(built, 0), rtol=0, atol=1e-6 * float(whole.abs().max()))
    for factors in ("phi", *built.reading(TOKENS, 0).products(diagonal=True)):
        whole = cs.phi(built, TOKENS, 0, factors).detach()
        small = {"rtol": 0, "atol": 1e-6 * float(whole.abs().max())}
        parts = list(cs.phi_chunks(built, TOKENS, 0, factors, chunk=3))
        assert [s.start for s, _ in parts] == list(range(0, whole.shape[1], 3))
        torch.testing.assert_close(torch.cat([part for _, part in parts], 1), whole, **small)
        torch.testing.assert_close(cs.phi(built, TOKENS, 0, factors, reduce="mean"), whole.mean(1), **small)
        torch.testing.assert_close(cs.phi(built, TOKENS, 0, factors, reduce="mean_abs"), whole.abs().mean(1), **small)


@pytest.mark.parametrize(
    "hook", ["blocks.0.hook_mixer_out", "blocks.1.mixer.hook_k", "blocks.1.mixer.hook_attn_scores"]
)
def test_hooks_before_phi_act_in_earlier_layers_and_in_its_own(hook):
    built = model("mamba", "attention")
    plain = cs.phi(built, TOKENS, 1)
    with built.hooks(fwd_hooks=[(hook, halve)]):
        hooked = cs.phi(built, TOKENS, 1)
        torch.testing.assert_close(hooked, entering_phi(built, 1), rtol=0, atol=1e-6)
        torch.testing.assert_close(cs.phi(built, TOKENS, 1, reduce="mean"), hooked.mean(1), rtol=0, atol=1e-6)
    assert (hooked - plain).abs().max() > 1e-6
    assert torch.equal(cs.phi(built, TOKENS, 1), plain)


def test_hook_phi_itself_does_not_act():
    built = model("mamba")
    plain = cs.phi(built, TOKENS, 0)
    with built.hooks(fwd_hooks=[("blocks.0.mixer.hook_phi", halve)]):
        assert torch.equal(cs.phi(built, TOKENS, 0), plain)


@pytest.mark.parametrize("reduce", [None, "mean", "mean_abs"])
def test_a_hook_fires_once_a_call(reduce):
    built, fired = model("mamba", "mamba"), []
    names = ["blocks.0.mixer.hook_dt", "blocks.1.mixer.hook_dt"]
    with built.hooks(fwd_hooks=[(name, lambda value, hook: fired.append(hook.name)) for name in names]):
        cs.phi(built, TOKENS, 1, reduce=reduce)
    assert fired == names


def test_slices_have_the_hooks_of_the_call_not_those_of_the_moment_they_are_built():
    built = model("attention", "mamba")
    with built.hooks(fwd_hooks=[("blocks.1.mixer.hook_dt", halve), ("blocks.0.mixer.hook_pattern", halve)]):
        whole, slices = cs.phi(built, TOKENS, 1), cs.phi_chunks(built, TOKENS, 1, chunk=5)
        pattern, rows = cs.phi(built, TOKENS, 0), cs.phi_chunks(built, TOKENS, 0)
    torch.testing.assert_close(torch.cat([part for _, part in slices], 1), whole)
    torch.testing.assert_close(torch.cat([part for _, part in rows], 1), pattern)
    rows = cs.phi_chunks(built, TOKENS, 0)
    with built.hooks(fwd_hooks=[("blocks.0.mixer.hook_pattern", halve)]):
        torch.testing.assert_close(torch.cat([part for _, part in rows], 1), 2 * pattern)


@pytest.mark.parametrize("name", NAMES)
def test_gradients_reach_the_weights_through_phi(name):
    built = model(name)
    cs.phi(built, TOKENS, 0, reduce="mean_abs").sum().backward()
    reached = [p for p in built.layers[0].mixer.parameters() if p.grad is not None and p.grad.abs().max() > 0]
    # the rows of a softmax sum to 1 whatever the weights
    assert reached or name in ("attention", "based")


def test_a_model_in_float64_has_a_phi_in_float64():
    for reduce in (None, "mean"):
        assert cs.phi(model("mamba").double(), TOKENS, 0, reduce=reduce).dtype == torch.float64


def test_a_batch_of_none_is_none():
    assert cs.phi(model("mamba"), TOKENS[:0], 0).shape == (0, 32, 12, 12)
    assert cs.phi(model("mamba"), TOKENS[:0], 0, reduce="mean").shape == (0, 12, 12)


# -- what is refused ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "positions"), [("attention", "none"), ("attention", "alibi"), ("mamba", "none")])
def test_a_phi_larger_than_memory_is_refused_with_its_size_before_it_is_built(name, positions):
    """A million positions: 4 TB a head. At no time is a matrix of that size asked for."""
    built, tokens = model(name, positions=positions, d_model=4), torch.zeros(1, 10**6, dtype=torch.long)
    heads = built.layers[0].mixer.n_heads
    with pytest.raises(
        cs.UserError, match=rf'{4000 * heads}\.0 GB and .* GB are free; .*reduce="mean_abs".*phi_chunks'
    ):
        cs.phi(built, tokens, 0)
    for call in (cs.phi_chunks, lambda *a: cs.phi(*a, reduce="mean")):
        with pytest.raises(cs.UserError, match=r"one channel .* 4000\.0 GB .* fewer or shorter sequences"):
            call(built, tokens, 0)
    hooks = ["phi", "pattern", "attn_scores"] if name == "attention" else ["phi", "phi_conv"]
    for hook in hooks:
        with pytest.raises(cs.UserError, match=r"0\.0 GB and .* GB are free; use fewer sequences"):
            built.run_with_hooks(tokens, fwd_hooks=[(f"blocks.0.mixer.hook_{hook}", halve)])
    with (
        built.hooks(fwd_hooks=[(f"blocks.0.mixer.hook_{hooks[1]}", halve)]),
        pytest.raises(cs.UserError, match=r"0\.0 GB and .* GB are free; use fewer sequences"),
    ):
        cs.phi_chunks(built, tokens, 0)


def test_the_size_is_that_of_the_models_precision(monkeypatch):
    size = 2 * 32 * 12**2 * 4  # in float32
    monkeypatch.setattr(psutil, "virtual_memory", lambda: type("Memory", (), {"available": 1.5 * size}))
    assert cs.phi(model("mamba"), TOKENS, 0).element_size() == 4
    with pytest.raises(cs.UserError, match="2 sequences and 32 channels at length 12"):
        cs.phi(model("mamba").double(), TOKENS, 0)
    assert cs.phi(model("mamba").double(), TOKENS, 0, reduce="mean").shape == (2, 12, 12)


@pytest.mark.usefixtures("without_type_checks")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"factors": "sssm"},
            r"unknown factor 'sssm'; did you mean 'ssm'\? valid: composed, conv, gate, phi, silu, ssm",
        ),
        ({"factors": ["phi", "conv"]}, r"unknown factor 'phi'; valid: conv, gate, silu, ssm"),
        ({"factors": ["ssm", "gates"]}, r"unknown factor 'gates'; did you mean 'gate'"),
        ({"factors": []}, "factors is empty; valid: gate, ssm, silu, conv, phi, composed"),
        ({"reduce": "mean_ab"}, "unknown reduction 'mean_ab'; did you mean 'mean_abs'"),
        ({"layer": 1}, "layer must be from 0 to 0, got 1"),
        ({"layer": "0"}, "layer must be from 0 to 0, got '0'"),
        ({"tokens": TOKENS.float()}, r"expected token numbers \[batch, pos\].* of shape \[\d+, 12\] and type float32"),
        ({"tokens": "12 7"}, r"expected token numbers \[batch, pos\], such as batch.tokens, got '12 7'"),
    ],
)
def test_bad_arguments_are_named(arguments, message):
    with pytest.raises(cs.UserError, match=message):
        cs.phi(model("mamba"), **{"tokens": TOKENS, "layer": 0} | arguments)


@pytest.mark.parametrize("chunk", [0, -1])
def test_a_chunk_below_one_is_refused_at_the_call(chunk):
    with pytest.raises(cs.UserError, match=f"chunk must be at least 1, got {chunk}"):
        cs.phi_chunks(model("mamba"), TOKENS, 0, chunk=chunk)


def test_an_unknown_mixer_names_the_nearest():
    with pytest.raises(cs.UserError, match="unknown mixer 'mamba22'; did you mean 'mamba2'"):
        mixers.mixer_config("mamba22")
    with pytest.raises(cs.UserError, match="unknown mixer 'delta_net'; did you mean 'deltanet'"):
        model("delta_net")


def test_one_sequence_and_an_array_are_tokens_too():
    built = model("mamba")
    whole = cs.phi(built, TOKENS, 0)
    assert torch.equal(cs.phi(built, TOKENS.numpy(), 0), whole)
    torch.testing.assert_close(cs.phi(built, TOKENS[0], 0), whole[:1])
    ((_, first), *_) = cs.phi_chunks(built, TOKENS[0], 0, chunk=2)
    torch.testing.assert_close(first, whole[:1, :2])
