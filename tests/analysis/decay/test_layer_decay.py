"""Profiles of layers, streamed, against profiles of the whole Φ; with and without D."""

import pytest
import torch
from torch import nn
from transformer_lens import HookedRootModule
from transformer_lens.hook_points import HookPoint

import circuitscope as cs
from circuitscope.analysis import pattern_reading
from circuitscope.analysis.decay import layer_decay as decay_module
from circuitscope.analysis.decay.lag_profile import (
    fit_decay,
    half_mass,
    mean_distance,
    off_diagonal_ratio,
    profile,
    profile_by_sequence,
)
from circuitscope.analysis.decay.layer_decay import layer_decay, reading_decay
from circuitscope.errors import UserError
from circuitscope.mixers import mamba
from circuitscope.mixers.reading import Product

LENGTH, BATCH = 12, 5
TOKENS = torch.randint(0, 20, (BATCH, LENGTH), generator=torch.Generator().manual_seed(0))
WITH_D = ["mamba", "s6", "s4", "s4_mamba", "mamba2", "h3", "hyena"]
WITHOUT_D = ["attention", "based", "rwkv", "deltanet", "gated_deltanet"]


def build(name: str, **options) -> cs.HookedLM:
    """A 2-layer model in float32 with noise on every parameter."""
    extra = {"mamba2": {"headdim": 4, "d_state": 5}, "attention": {"n_heads": 2}}.get(name, {})
    sizes = {"d_model": 8, "n_layers": 2, "vocab_size": 20, "max_length": LENGTH}
    model = cs.model(name, **sizes | extra | options)
    noise = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.3 * torch.randn(p.shape, generator=noise))
    return model


def skip_term(model: cs.HookedLM) -> torch.Tensor:
    """What D adds to the diagonal of Φ in the last layer: broadcastable to [batch, head, pos]."""
    mixer = model.layers[-1].mixer
    if hasattr(mixer, "ssm"):
        return mixer.ssm.D[None, :, None]
    if model.config.mixers[-1].name == "mamba2":
        return mixer.D[None, :, None]
    last = model.config.n_layers - 1
    _, cache = model.run_with_cache(TOKENS, names_filter=lambda n: n.endswith(("hook_q", "hook_k")))
    q, k = (cache[f"blocks.{last}.mixer.hook_{x}"] for x in "qk")
    D = mixer.D if hasattr(mixer, "D") else mixer.skip
    return (q * k).sum(-1).mT * D[None, :, None]


@torch.no_grad()
@pytest.mark.parametrize("name", WITH_D + WITHOUT_D)
def test_the_streamed_profile_is_that_of_the_whole_matrix(name):
    model = build(name)
    found = layer_decay(model, TOKENS, -1)
    expected = profile(cs.phi(model, TOKENS, -1))
    torch.testing.assert_close(found.whole.profile, expected, rtol=1e-5, atol=1e-8)
    assert (found.layer, found.length, found.n) == (1, LENGTH, BATCH)
    assert (found.without_D is None) == (name in WITHOUT_D)


@torch.no_grad()
@pytest.mark.parametrize(("name", "options"), [*((name, {}) for name in WITH_D), ("h3", {"head_dim": 2})])
def test_without_d_the_diagonal_alone_is_less_by_d(name, options):
    model = build(name, **options)
    phi = cs.phi(model, TOKENS, -1).double()
    expected = profile(phi - torch.diag_embed(skip_term(model).expand(phi.shape[:3]).double()))
    found = layer_decay(model, TOKENS, -1)
    torch.testing.assert_close(found.without_D.profile, expected, rtol=1e-4, atol=1e-6)
    assert not torch.allclose(found.whole.profile[:, 0], expected[:, 0], rtol=1e-2)
    for rate in fit_decay(expected)._fields:
        torch.testing.assert_close(found.without_D.numbers[rate], found.whole.numbers[rate], equal_nan=True)


@torch.no_grad()
def test_without_d_a_composed_matrix_loses_d_times_its_conv():
    model = build("mamba")
    ssm = cs.phi(model, TOKENS, 1, factors="ssm").double()
    gate, silu, conv = (cs.phi(model, TOKENS, 1, factors=f).double() for f in ("gate", "silu", "conv"))
    D = torch.diag_embed(skip_term(model).expand(ssm.shape[:3]).double())
    found = layer_decay(model, TOKENS, 1, "composed")
    torch.testing.assert_close(found.whole.profile, profile(gate @ ssm @ silu @ conv), rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(found.without_D.profile, profile(gate @ (ssm - D) @ silu @ conv), rtol=1e-4, atol=1e-6)
    assert not torch.allclose(found.whole.profile[:, 1], found.without_D.profile[:, 1], rtol=1e-2)
    rates = found.without_D.numbers["kappa"][0]
    torch.testing.assert_close(rates, fit_decay(found.without_D.profile).kappa, rtol=1e-9, atol=0)


def test_factors_that_hold_no_d_have_no_profile_without_it():
    assert layer_decay(build("mamba"), TOKENS, 0, "conv").without_D is None
    assert layer_decay(build("hyena"), TOKENS, 0, ["x2", "x1"]).without_D is None
    assert layer_decay(build("hyena"), TOKENS, 0, ["x2", "filter"]).without_D is not None


@torch.no_grad()
@pytest.mark.parametrize("name", WITH_D)
def test_the_model_itself_keeps_its_d(name):
    model = build(name)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    logits = model(TOKENS)
    assert layer_decay(model, TOKENS, 1).without_D is not None
    assert torch.equal(model(TOKENS), logits)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


@torch.no_grad()
@pytest.mark.parametrize("name", WITH_D)
def test_without_d_means_the_same_weights_with_d_zero(name):
    model, bare = build(name), build(name)
    mixer = bare.layers[1].mixer
    (mixer.ssm.D if hasattr(mixer, "ssm") else mixer.D if hasattr(mixer, "D") else mixer.skip).zero_()
    for factors in ("phi", "composed"):
        expected = profile(cs.phi(bare, TOKENS, 1, factors=factors))
        found = layer_decay(model, TOKENS, 1, factors).without_D.profile
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("factors", ["phi", "composed"])
@pytest.mark.parametrize("name", ["mamba", "mamba2", "s4", "hyena", "deltanet", "attention"])
def test_slices_of_heads_change_nothing(name, factors):
    model = build(name)
    whole = layer_decay(model, TOKENS, 1, factors, chunk=1000)
    for chunk in (1, 3):
        part = layer_decay(model, TOKENS, 1, factors, chunk=chunk)
        for a, b in ((part.whole, whole.whole), (part.without_D, whole.without_D)):
            if b is None:
                assert a is None
                continue
            torch.testing.assert_close(a.profile, b.profile, rtol=1e-6, atol=1e-12)
            for x, y in ((a.numbers, b.numbers), (a.summary, b.summary)):
                torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-6, equal_nan=True)
            torch.testing.assert_close(a.mean_profile, b.mean_profile, rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize(("name", "factors"), [("mamba", "composed"), ("mamba2", "composed"), ("h3", "phi")])
def test_no_more_channels_are_built_at_once_than_asked_for(name, factors, monkeypatch):
    built, build_product = [], Product.build

    def counted(product, units, skip=True):
        built.append(units.stop - units.start)
        return build_product(product, units, skip)

    monkeypatch.setattr(Product, "build", counted)
    found = layer_decay(build(name), TOKENS, 0, factors, chunk=3)
    assert max(built) == 3
    assert sum(built) == 2 * len(found.whole.profile)  # with D and without


@pytest.mark.parametrize("name", ["mamba", "s6"])
def test_the_scan_never_builds_phi_and_is_asked_for_few_channels(name, monkeypatch):
    asked, kernel = [], mamba.selective_scan_phi_profile

    def counted(dt, *rest):
        asked.append(dt.shape[-1])
        return kernel(dt, *rest)

    def refuse(*_):
        raise AssertionError("Φ was built")

    monkeypatch.setattr(mamba, "selective_scan_phi_profile", counted)
    monkeypatch.setattr(mamba, "selective_scan_phi", refuse)
    found = layer_decay(build(name), TOKENS, 0, chunk=3)
    assert max(asked) == 3
    assert sum(asked) == len(found.whole.profile)


def test_left_to_itself_the_memory_of_a_slice_is_bounded(monkeypatch):
    """At 64 MB of Φ, slices stay near 16 MB: 4 bytes times the entries of the largest."""
    largest = 0

    def watched(matrix):
        nonlocal largest
        largest = max(largest, 4 * matrix.numel())
        return profile_by_sequence(matrix)

    monkeypatch.setattr(decay_module, "profile_by_sequence", watched)
    model = cs.model("hyena", d_model=64, n_layers=1, vocab_size=20)
    layer_decay(model, torch.zeros(64, 64, dtype=torch.long), 0)
    assert 4e6 < largest <= 16.1e6


@torch.no_grad()
@pytest.mark.parametrize("name", ["mamba", "attention"])
def test_numbers_are_read_from_each_heads_profile_and_summarized_after(name):
    found = layer_decay(build(name), TOKENS, 1).whole
    expected = fit_decay(found.profile)._asdict() | {
        "half_mass": half_mass(found.profile),
        "mean_distance": mean_distance(found.profile),
        "off_diagonal": off_diagonal_ratio(found.profile),
    }
    assert set(found.numbers) == set(expected)
    for number, value in expected.items():
        torch.testing.assert_close(found.numbers[number][0], value, rtol=1e-9, atol=1e-12)
        for word, q in (("q25", 0.25), ("median", 0.5), ("q75", 0.75)):
            assert found.summary[f"{number}_{word}"][0] == pytest.approx(value.quantile(q).item(), rel=1e-9)
    torch.testing.assert_close(found.mean_profile[0], found.profile.mean(0), rtol=1e-9, atol=0)


@torch.no_grad()
def test_standard_errors_are_those_of_leaving_each_sequence_out():
    model = build("mamba")
    found = layer_decay(model, TOKENS, 0).whole
    rest = [layer_decay(model, torch.cat([TOKENS[:b], TOKENS[b + 1 :]]), 0).whole for b in range(BATCH)]

    def spread(values: torch.Tensor) -> torch.Tensor:
        return values.std(0) * (BATCH - 1) / BATCH**0.5

    for number in ("kappa", "kappa_r2", "power", "mean_distance", "off_diagonal"):
        expected = spread(torch.stack([part.numbers[number][0] for part in rest]))
        torch.testing.assert_close(found.numbers[number][1], expected, rtol=1e-3, atol=1e-7)
        of_median = spread(torch.tensor([part.summary[f"{number}_median"][0] for part in rest]))
        assert found.summary[f"{number}_median"][1] == pytest.approx(of_median.item(), rel=1e-3, abs=1e-7)
    by_sequence = profile_by_sequence(cs.phi(model, TOKENS, 0)).mean(1)
    torch.testing.assert_close(found.mean_profile[1], by_sequence.std(0) / BATCH**0.5, rtol=1e-3, atol=1e-9)
    assert found.numbers["half_mass"][1].isnan().all()


def test_a_mixer_blind_to_its_input_does_not_vary_over_sequences():
    found = layer_decay(build("s4"), TOKENS, 1).whole
    for number in ("kappa", "mean_distance", "off_diagonal"):
        assert (found.numbers[number][1] < 1e-12).all()


def test_a_faster_mamba_has_a_steeper_profile():
    model = build("mamba")
    rates = []
    for shift in (0.0, 2.0, 2.0):
        with torch.no_grad():
            model.layers[0].mixer.ssm.dt_proj.bias.add_(shift)
        rates.append(layer_decay(model, TOKENS, 0).whole.summary["kappa_median"][0])
    assert rates == sorted(rates)
    assert rates[-1] > 2 * rates[0] > 0


@pytest.mark.parametrize("name", ["mamba", "deltanet", "attention", "mamba2"])
@pytest.mark.parametrize("length", [1, 2])
def test_short_sequences_have_masses_and_no_rates(name, length):
    found = layer_decay(build(name), TOKENS[:, :length], 0).whole
    assert found.profile.shape[1] == length
    assert found.numbers["kappa"][0].isnan().all()
    assert found.numbers["off_diagonal"][0].isfinite().all()
    assert all(0 <= value < length for value in found.numbers["half_mass"][0])


def test_one_sequence_has_no_standard_errors():
    found = layer_decay(build("mamba"), TOKENS[:1], 0).whole
    assert found.numbers["kappa"][0].isfinite().all()
    assert found.numbers["kappa"][1].isnan().all()


class Pattern(HookedRootModule):
    """Another's model: one block whose hook_pattern shows a softmax over −|i − j| for the past, 3 heads."""

    def __init__(self):
        super().__init__()
        attn = nn.ModuleDict({"hook_pattern": HookPoint()})
        self.blocks = nn.ModuleList([nn.ModuleDict({"attn": attn})])
        self.setup()

    def forward(self, tokens):
        i = torch.arange(tokens.shape[1])
        scores = -(i[:, None] - i).double() * torch.tensor([0.1, 0.5, 1.0])[:, None, None]
        pattern = scores.masked_fill((i[:, None] < i), -torch.inf).softmax(-1)
        return self.blocks[0]["attn"]["hook_pattern"](pattern.expand(len(tokens), -1, -1, -1))


def test_another_model_is_read_at_its_pattern():
    model = Pattern()
    found = layer_decay(model, TOKENS, 0)
    torch.testing.assert_close(found.whole.profile, profile(model(TOKENS)), rtol=1e-12, atol=0)
    assert found.without_D is None
    kappa = found.whole.numbers["kappa"][0]
    assert (kappa.diff() > 0).all()
    with pytest.raises(UserError, match="unknown factor 'conv'"):
        layer_decay(model, TOKENS, 0, "conv")


def test_a_bare_tensor_of_patterns_has_the_decay_of_its_model():
    model = build("attention")
    with torch.no_grad():
        pattern = cs.phi(model, TOKENS, 1)
    found, expected = reading_decay(pattern_reading(pattern), 1), layer_decay(model, TOKENS, 1)
    assert (found.layer, found.factor, found.length, found.n, found.without_D) == (1, "phi", LENGTH, BATCH, None)
    torch.testing.assert_close(found.whole.profile, expected.whole.profile, rtol=1e-5, atol=1e-9)
    torch.testing.assert_close(found.whole.numbers, expected.whole.numbers, rtol=1e-4, atol=1e-6, equal_nan=True)


def test_bad_requests_are_refused_in_one_line():
    with pytest.raises(UserError, match="unknown factor 'cnov'; did you mean 'conv'"):
        layer_decay(build("mamba"), TOKENS, 0, "cnov")
    with pytest.raises(UserError, match="layer must be from 0 to 1, got 5"):
        layer_decay(build("mamba"), TOKENS, 5)
    with pytest.raises(UserError, match="no mixing matrix"):
        layer_decay(build("lstm"), TOKENS, 0)
