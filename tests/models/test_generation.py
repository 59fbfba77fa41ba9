"""A model as a recurrence: steps are the forward pass, a state stands for the past, and generation takes such steps."""

import re

import pytest
import torch

import circuitscope as cs
from circuitscope.errors import UserError
from circuitscope.mixers import MixerState
from circuitscope.models.generation import ModelState

LENGTH, VOCABULARY = 9, 23
PRESETS = pytest.mark.parametrize("name", cs.models.names())


def small(name: str = "attention", dtype: torch.dtype = torch.float32, **options) -> cs.HookedLM:
    """A model of width 16 or, where heads need it, 32, with noise on its weights, so that its tokens differ."""
    sizes = {
        "d_model": 32 if name == "mamba2" else 16,
        "vocab_size": VOCABULARY,
        "max_length": LENGTH,
        "tied": False,
        "embed_std": 1.0,
    }
    model = cs.model(name, **sizes | options, seed=3)
    noise = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in model.parameters():
            p.add_((0.3 if p.ndim > 1 else 0.1) * torch.randn(p.shape, generator=noise))
    return model.eval().to(dtype)


def some_tokens(batch: int = 3, length: int = LENGTH) -> torch.Tensor:
    return torch.randint(VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(1))


def assert_near(got: torch.Tensor, want: torch.Tensor, tolerance: float = 1e-4) -> None:
    """Relative to the largest logit."""
    assert float((got - want).detach().abs().max()) <= tolerance * float(want.detach().abs().max())


# -- the state ----------------------------------------------------------------------------------------


@PRESETS
def test_step_by_step_a_preset_gives_its_logits(name):
    model, tokens = small(name), some_tokens()
    with torch.no_grad():
        want, state, got = model(tokens), model.start(len(tokens)), []
        for t in range(LENGTH):
            logits, state = model.step(tokens[:, t : t + 1], state)
            got.append(logits)
            assert state.position == t + 1
    assert_near(torch.cat(got, dim=1), want)


@PRESETS
def test_a_sequence_goes_on_from_its_state_at_any_position(name):
    model, tokens = small(name), some_tokens()
    with torch.no_grad():
        want = model(tokens)
        for pos in range(LENGTH):
            state = model.state_at(tokens, pos)
            assert state.position == pos
            assert_near(model(tokens[:, pos:], initial_state=state), want[:, pos:])


@PRESETS
def test_through_a_state_gradients_are_those_of_the_whole(name):
    """float64: parameters get the gradients of the fused pass, and the embedded tokens before the state do too."""
    model, tokens = small(name, torch.float64), some_tokens(2, 6)
    weights = torch.randn(2, 3, VOCABULARY, dtype=torch.float64, generator=torch.Generator().manual_seed(2))

    def gradients(by_state: bool) -> tuple[torch.Tensor, ...]:
        after = model(tokens[:, 3:], initial_state=model.state_at(tokens, 3)) if by_state else model(tokens)[:, 3:]
        return torch.autograd.grad((after * weights).sum(), list(model.parameters()), materialize_grads=True)

    named = zip(dict(model.named_parameters()), gradients(False), gradients(True), strict=True)
    for parameter, want, got in named:
        assert float((got - want).abs().max()) <= 1e-9 * max(float(want.abs().max()), 1e-3), parameter


@PRESETS
def test_every_tensor_of_a_state_gets_a_gradient(name):
    model, tokens = small(name, torch.float64), some_tokens(2, 6)
    state = model.state_at(tokens, 3).map(lambda part: part.detach().requires_grad_())
    model(tokens[:, 3:], initial_state=state).square().sum().backward()
    for layer in state.layers:
        for part, tensor in layer.parts.items():
            assert tensor.grad is not None, part
            assert tensor.grad.abs().max() > 0, part


@pytest.mark.parametrize("positions", ["none", "learned", "sinusoidal", "rope", "alibi"])
def test_positions_count_on_from_the_state(positions):
    model, tokens = small(positions=positions, n_heads=2), some_tokens()
    want = model(tokens)
    for pos in (1, 5):
        assert_near(model(tokens[:, pos:], initial_state=model.state_at(tokens, pos)), want[:, pos:])


def test_labelled_positions_alone_have_the_same_logits_from_a_state():
    model, tokens = small("mamba"), some_tokens()
    state, at = model.state_at(tokens, 4), torch.tensor([0, 3, 7])
    whole = model(tokens[:, 4:], initial_state=state)
    assert_near(model(tokens[:, 4:], at, initial_state=state), whole.flatten(0, 1)[at], 1e-6)


def test_a_state_of_a_finite_mixer_does_not_grow_and_a_cache_does():
    def size(state: ModelState) -> int:
        return sum(part.numel() for layer in state.layers for part in layer.parts.values())

    for name, grows in {"mamba": False, "gated_deltanet": False, "attention": True, "hyena": True}.items():
        model, tokens = small(name, max_length=64), some_tokens(1, 40)
        assert (size(model.state_at(tokens, 40)) > size(model.state_at(tokens, 8))) == grows


def test_hooks_see_the_run_from_a_state():
    model, tokens = small("mamba"), some_tokens()
    _, whole = model.run_with_cache(tokens)
    _, rest = model.run_with_cache(tokens[:, 4:], initial_state=model.state_at(tokens, 4))
    for hook in ("blocks.1.hook_resid_pre", "blocks.1.mixer.hook_v", "blocks.1.mixer.hook_z"):
        assert_near(rest[hook], whole[hook][:, 4:])


def test_an_edited_state_changes_what_follows_as_the_edited_past_does():
    model, tokens = small("mamba"), some_tokens()
    other = tokens.roll(1, dims=1)
    state = model.state_at(tokens, 5)
    donor = model.state_at(other, 5)
    mixed = torch.cat([other[:, :5], tokens[:, 5:]], dim=1)
    assert_near(model(tokens[:, 5:], initial_state=donor), model(mixed)[:, 5:])
    assert not torch.allclose(
        model(tokens[:, 5:], initial_state=donor), model(tokens[:, 5:], initial_state=state), atol=1e-3
    )


# -- generation ---------------------------------------------------------------------------------------


@PRESETS
def test_greedy_generation_is_the_repeated_argmax_of_whole_runs(name):
    model, prompt = small(name), some_tokens(4, 3)
    want = prompt
    with torch.no_grad():
        for _ in range(6):
            want = torch.cat([want, model(want)[:, -1:].argmax(-1)], dim=1)
    assert len(want[:, 3:].unique()) >= 2  # or any constant would do
    assert torch.equal(model.generate(prompt, 6), want)


def test_generation_begins_with_the_prompt_and_needs_no_gradients():
    model, prompt = small(), some_tokens(2, 3)
    assert torch.equal(model.generate(prompt, 0), prompt)
    said = model.generate(prompt[0], 2)
    assert said.shape == (1, 5)
    assert torch.equal(said[0, :3], prompt[0])


def test_draws_are_those_of_the_seed_and_become_greedy_as_the_temperature_falls():
    model, prompt = small("mamba", max_length=64), some_tokens(3, 3)
    drawn = model.generate(prompt, 30, temperature=2.0, seed=5)
    assert torch.equal(model.generate(prompt, 30, temperature=2.0, seed=5), drawn)
    assert not torch.equal(model.generate(prompt, 30, temperature=2.0, seed=6), drawn)
    assert torch.equal(model.generate(prompt, 30, temperature=1e-9), model.generate(prompt, 30))


def test_draws_follow_softmax_of_the_logits():
    model, temperature = small("s6", vocab_size=5), 1.5
    prompt = torch.tensor([[1, 2, 3]])
    with torch.no_grad():
        want = (model(prompt)[0, -1] / temperature).softmax(-1)
    drawn = model.generate(prompt.expand(4000, -1), 1, temperature=temperature)[:, -1]
    counts = torch.bincount(drawn, minlength=5)
    assert float(((counts - 4000 * want) ** 2 / (4000 * want)).sum()) < 4 + 5 * 8**0.5


def test_after_the_stop_token_nothing_else_is_said():
    model, prompt = small("mamba", max_length=64), some_tokens(4, 3)
    free = model.generate(prompt, 20, temperature=3.0, seed=1)
    stop = int(free[0, 8])
    said = model.generate(prompt, 20, temperature=3.0, seed=1, stop=stop)
    assert said.shape == free.shape
    first = said[0, 3:].tolist().index(stop)
    assert (said[0, 3 + first :] == stop).all()
    assert torch.equal(said[0, : 3 + first], free[0, : 3 + first])


# -- bad input ----------------------------------------------------------------------------------------


def refused(words: str):
    return pytest.raises(UserError, match=re.escape(words))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"n": -1}, "n: expected a number of tokens to generate, 0 or more, got -1"),
        ({"n": 1.5}, "n: expected a number of tokens to generate, 0 or more, got 1.5"),
        ({"temperature": -1.0}, "temperature: expected 0, for the likeliest token, or a positive number, got -1.0"),
        ({"temperature": float("nan")}, "temperature: expected 0, for the likeliest token, or a positive number"),
        ({"seed": -3}, "seed: expected a whole number"),
        ({"stop": VOCABULARY}, f"stop: expected a token from 0 to {VOCABULARY - 1}, or None, got {VOCABULARY}"),
        ({"n": 100}, f"sequence of 102 positions, but the model has learned positions for {LENGTH}"),
    ],
)
def test_generation_says_what_it_expects(without_type_checks, options, words):
    with refused(words):
        small().generate(some_tokens(2, 3), **{"n": 2} | options)


def test_the_last_token_that_is_said_needs_no_position():
    model = small()
    assert model.generate(some_tokens(2, 3), LENGTH - 2).shape == (2, LENGTH + 1)
    with refused(f"learned positions for {LENGTH}"):
        model.generate(some_tokens(2, 3), LENGTH - 1)


def test_a_model_that_reads_later_positions_cannot_generate():
    model = small(conv_on="v", conv_mode="centred")
    for call in (lambda: model.generate(some_tokens(), 2), model.start, lambda: model.state_at(some_tokens(), 2)):
        with refused("generation needs a causal model, and layer 0 (attention, centred conv) reads 2 positions ahead"):
            call()
    assert "needs a causal model" in model.cannot_generate
    assert small().cannot_generate == ""


def test_a_mixer_without_steps_is_said_to_have_none(monkeypatch):
    model = small("lstm")
    monkeypatch.delattr(type(model.layers[0].mixer), "step")
    with refused("generation needs recurrent steps, and layer 0 (lstm) has no `step`"):
        model.generate(some_tokens(), 2)


def test_a_state_must_be_of_this_model_and_this_batch(without_type_checks):
    model, tokens = small("mamba"), some_tokens()
    one, two = tokens[:, :1], tokens[:2]
    with refused("a state of 2 sequences, but 3 sequences of tokens"):
        model.step(one, model.state_at(two, 4))
    with refused("a state of another model: layer 0 keeps scan, conv, and the state has k, v"):
        model.step(one, small().state_at(tokens, 4))
    with refused("a state of 1 layers, but the model has 2"):
        model.step(one, small("mamba", n_layers=1).start(3))
    with refused("a state of another model: scan of layer 0 is Tensor of shape [3, 32, 4]"):
        model.step(one, small("mamba", d_state=4).start(3))
    with refused("type float64"):
        model.step(one, small("mamba", torch.float64).start(3))
    with refused("expected a state, as model.start or model.step gives, got 3"):
        model.step(one, 3)
    with refused("batch: expected a number of sequences, got -1"):
        model.start(-1)
    with refused(f"pos: expected a position from 0 to {LENGTH}, the end of the sequence, got 10"):
        model.state_at(tokens, 10)


def test_a_state_too_far_along_for_learned_positions_is_refused():
    model, tokens = small(), some_tokens()
    with refused(f"sequence of {LENGTH + 1} positions"):
        model.step(tokens[:, :1], model.state_at(tokens, LENGTH))


def test_a_state_is_plain_data():
    state = small("mamba").start(2)
    assert all(isinstance(layer, MixerState) for layer in state.layers)
    assert set(state.layers[0].parts) == {"scan", "conv"}
