"""Reach of gradients against torch's own Jacobian, and its estimate against the exact value."""

import pytest
import torch
from torch import nn
from transformer_lens import HookedRootModule
from transformer_lens.hook_points import HookPoint

import circuitscope as cs
from circuitscope.analysis.decay.gradient_reach import gradient_reach
from circuitscope.errors import UserError
from circuitscope.lens import layer_index

pytestmark = pytest.mark.slow

LENGTH, BATCH, SIZE = 5, 3, 4
TOKENS = torch.randint(0, 20, (BATCH, LENGTH), generator=torch.Generator().manual_seed(0))
MIXERS = ["attention", "based", "deltanet", "gated_deltanet", "h3", "hyena", "lstm", "mamba", "mamba2", "rwkv", "s4"]


def build(name: str, dtype: torch.dtype = torch.float64, **options) -> cs.HookedLM:
    extra = {"mamba2": {"headdim": 4, "d_state": 4}, "based": {"feature_dim": 2}}.get(name, {})
    sizes = {"d_model": SIZE, "n_layers": 2, "vocab_size": 20, "max_length": 8}
    model = cs.model(name, **sizes | extra | options)
    noise = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.3 * torch.randn(p.shape, generator=noise))
    return model.to(dtype)


def by_jacobian(model: cs.HookedLM, layer: int, tokens: torch.Tensor = TOKENS) -> torch.Tensor:
    """Mean over i and sequences of ‖∂ resid_post_i / ∂ resid_pre_{i−lag}‖², sequence by sequence."""
    name = f"blocks.{layer}.hook_resid_pre"
    with torch.no_grad():
        resid = model.run_with_cache(tokens, names_filter=name)[1][name]
    length = tokens.shape[1]
    squares = torch.zeros(len(tokens), length, length, dtype=torch.float64)
    for b, x in enumerate(resid):
        J = torch.autograd.functional.jacobian(lambda x: model.layers[layer](x[None])[0], x)
        squares[b] = J.double().square().sum((1, 3))
    return torch.stack([squares.diagonal(-lag, 1, 2).mean() for lag in range(length)])


@pytest.mark.parametrize("name", MIXERS)
def test_the_exact_reach_is_that_of_the_jacobian(name):
    model = build(name)
    found = gradient_reach(model, TOKENS, 1, probes=None)
    torch.testing.assert_close(found.squared, by_jacobian(model, 1), rtol=1e-8, atol=1e-14)
    assert found.n.tolist() == [BATCH] * LENGTH


@pytest.mark.parametrize("name", ["mamba", "rwkv", "deltanet"])
def test_the_fast_kernels_carry_the_same_gradients(name):
    model = build(name, torch.float32)
    found = gradient_reach(model, TOKENS, 0, probes=None)
    torch.testing.assert_close(found.squared, by_jacobian(model.double(), 0), rtol=1e-3, atol=1e-8)


def test_gradients_go_through_the_dependence_of_phi_on_its_input():
    """With Φ frozen the reach of Mamba is another number."""
    model = build("mamba")
    name = "blocks.0.mixer.hook_phi"
    with torch.no_grad():
        phi = model.run_with_cache(TOKENS, names_filter=name)[1][name]
    whole = gradient_reach(model, TOKENS, 0, probes=None)
    with model.hooks(fwd_hooks=[(name, lambda value, hook: phi)]):
        frozen = gradient_reach(model, TOKENS, 0, probes=None)
    assert (whole.squared[1:] > 1.01 * frozen.squared[1:]).any()


@pytest.mark.parametrize("batch", [1, 3])
def test_the_estimate_is_unbiased_for_the_square(batch):
    model = build("mamba")
    tokens = TOKENS[:batch]
    exact = gradient_reach(model, tokens, 0, probes=None).squared
    runs = torch.stack([gradient_reach(model, tokens, 0, probes=1, seed=seed).squared for seed in range(200)])
    assert ((runs.mean(0) - exact).abs() < 4 * runs.std(0) / 200**0.5).all()
    assert (runs.std(0) > 0).all()


def test_the_standard_error_says_how_far_estimates_scatter():
    """Its square is the variance over draws of sequences and probes; to 20% of the root, over 200 draws.

    Squares of Jacobians are heavy-tailed, so single standard errors scatter widely: their mean square is compared.
    """
    model = build("attention")

    def draw(seed: int):
        tokens = torch.randint(0, 20, (40, 6), generator=torch.Generator().manual_seed(1000 + seed))
        return gradient_reach(model, tokens, 0, probes=10, seed=seed)

    runs = [draw(seed) for seed in range(200)]
    scatter = torch.stack([run.squared for run in runs]).std(0)
    stated = torch.stack([run.squared_stderr for run in runs]).square().mean(0).sqrt()
    torch.testing.assert_close(stated, scatter, rtol=0.2, atol=0)


def test_more_probes_scatter_less():
    model = build("deltanet")

    def scatter(probes: int) -> torch.Tensor:
        runs = [gradient_reach(model, TOKENS, 0, probes=probes, seed=seed).squared for seed in range(30)]
        return torch.stack(runs).std(0)

    assert (scatter(16) < scatter(1)).all()


def test_every_lag_has_a_sample_whatever_the_batch():
    for batch in (1, 2, 3):
        found = gradient_reach(build("mamba"), TOKENS[:batch], 0, probes=1)
        assert (found.n >= 1).all()
        assert found.squared.isfinite().all()
        assert found.n[-1] == 1
        assert found.squared_stderr[-1].isnan()


def test_the_seed_decides():
    model = build("mamba")
    one, same, other = (gradient_reach(model, TOKENS, 0, probes=2, seed=seed).squared for seed in (0, 0, 1))
    assert torch.equal(one, same)
    assert not torch.equal(one, other)


def test_a_layer_that_mixes_nothing_reaches_nothing():
    model = build("attention", state_mixer="none")
    with torch.no_grad():
        for p in model.layers[0].mixer.out.parameters():
            p.zero_()
    found = gradient_reach(model, TOKENS, 0, probes=1)
    assert found.norm[0].item() == pytest.approx(SIZE**0.5, rel=1e-12)  # the residual branch alone
    assert torch.equal(found.norm[1:], torch.zeros(LENGTH - 1, dtype=torch.float64))


@pytest.mark.parametrize("length", [1, 2])
def test_short_sequences(length):
    model = build("mamba")
    tokens = TOKENS[:, :length]
    found = gradient_reach(model, tokens, 0, probes=None)
    torch.testing.assert_close(found.squared, by_jacobian(model, 0, tokens), rtol=1e-8, atol=0)


def test_it_works_where_gradients_are_off_and_leaves_none_behind():
    model = build("mamba")
    with torch.no_grad():
        found = gradient_reach(model, TOKENS, 1, probes=2)
    assert found.squared.isfinite().all()
    assert all(p.grad is None for p in model.parameters())


class Blur(HookedRootModule):
    """Another's model: x + ½ x of the position before, in each of two blocks."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(20, SIZE)
        self.blocks = nn.ModuleList(
            nn.ModuleDict({"hook_resid_pre": HookPoint(), "hook_resid_post": HookPoint()}) for _ in range(2)
        )
        self.setup()

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block["hook_resid_pre"](x)
            x = block["hook_resid_post"](x + 0.5 * nn.functional.pad(x, (0, 0, 1, 0))[:, :-1])
        return x


@pytest.mark.parametrize("probes", [None, 3])
@pytest.mark.parametrize("layer", [0, 1, -1])
def test_another_model_needs_only_its_residual_hooks(layer, probes):
    found = gradient_reach(Blur(), TOKENS, layer, probes=probes)
    expected = torch.tensor([SIZE**0.5, 0.5 * SIZE**0.5, 0, 0, 0], dtype=torch.float64)
    torch.testing.assert_close(found.norm, expected, rtol=1e-6, atol=0)


def test_a_model_without_residual_hooks_is_told_so():
    model = Blur()
    del model.hook_dict["blocks.0.hook_resid_post"]
    with pytest.raises(UserError, match=r"unknown hook 'blocks\.0\.hook_resid_post'"):
        gradient_reach(model, TOKENS, 0)


def test_bad_requests_are_refused_in_one_line():
    model = build("mamba")
    with pytest.raises(UserError, match="probes must be from 1 to"):
        gradient_reach(model, TOKENS, 0, probes=0)
    with pytest.raises(UserError, match="layer must be from 0 to 1, got -3"):
        gradient_reach(model, TOKENS, -3)
    assert layer_index(model, -2) == 0


def test_it_works_under_inference_mode_and_refuses_a_model_made_there():
    model = build("mamba", torch.float32)
    expected = gradient_reach(model, TOKENS, 0).squared
    with torch.inference_mode():
        assert torch.equal(gradient_reach(model, TOKENS.clone(), 0).squared, expected)
        made_there = cs.model("attention", d_model=SIZE, vocab_size=20, max_length=8)
        with pytest.raises(UserError, match=r"made under torch\.inference_mode"):
            gradient_reach(made_there, TOKENS, 0)
