"""Hyena: its definition, its implicit filter, and the length it belongs to."""

import contract
import pytest
import torch

from circuitscope.mixers.hyena import Hyena, HyenaConfig

CONFIGS = {
    "published": HyenaConfig(),
    "other sizes": HyenaConfig(l_max=40, conv_width=4, filter_bands=3, filter_width=8, filter_layers=0, frequency=5),
}
D_MODEL = 16


@pytest.fixture(params=CONFIGS.values(), ids=CONFIGS.keys())
def config(request):
    return request.param


def build(config, dtype=torch.float32):
    torch.manual_seed(0)
    return contract.shaken(Hyena(config, D_MODEL, "none").to(dtype))


def test_the_factors_compose(config):
    mixer, x = build(config, torch.float64), contract.stream(11, D_MODEL, dtype=torch.float64)
    with torch.no_grad():
        mixer.conv.bias.zero_()
    contract.check_composed(mixer, x, mixer.in_proj(x).chunk(3, dim=-1)[2])


def test_the_mixer_is_its_definition():
    """Short conv by torch's conv1d, the published features and window, the long conv lag by lag; 1e-12 in float64."""
    mixer, x = build(HyenaConfig(l_max=20), torch.float64), contract.stream(12, D_MODEL, dtype=torch.float64)
    u = torch.nn.functional.pad(mixer.in_proj(x).mT, (2, 0))
    x1, x2, v = mixer.conv(u).mT.chunk(3, dim=-1)
    t = torch.linspace(0, 1, 20, dtype=torch.float64)[:, None]
    w = 2 * torch.pi * torch.linspace(0, 19, 20, dtype=torch.float64)[:, None] / 20
    pair = torch.exp(-1j * 1e-4 * w)
    h = torch.cat([t, pair.real, pair.imag], -1)
    for layer in mixer.filter.layers:
        h = torch.sin(mixer.filter.frequency * layer(h))
    deltas = torch.linspace(-torch.log(torch.tensor(0.01)) / 1.5, -torch.log(torch.tensor(0.01)) / 0.3, D_MODEL)
    h = mixer.filter.last(h) * torch.exp(-t * mixer.filter.deltas)
    torch.testing.assert_close(mixer.filter.deltas, deltas.double(), rtol=1e-6, atol=0)
    y = mixer.skip * x1 * v
    for lag in range(12):
        y[:, lag:] += h[lag] * (x1 * v)[:, : 12 - lag]
    contract.assert_close(mixer(x), mixer.out(x2 * y), 1e-12)
    assert len(mixer.filter.layers) == 3  # one from the features, two inner


def test_a_prefix_is_mixed_as_it_is_alone(config):
    """The filter belongs to l_max, not to the length of the input, past l_max too."""
    mixer, x = build(config), contract.stream(100, D_MODEL)
    for length in (1, 39, 64, 80):
        contract.assert_close(mixer(x[:, :length]), mixer(x)[:, :length])


def test_the_model_gives_its_length_where_the_config_leaves_it_open():
    open_, fixed = Hyena(HyenaConfig(), D_MODEL, "none"), Hyena(HyenaConfig(l_max=40), D_MODEL, "none")
    assert (open_.filter.l_max, fixed.filter.l_max) == (64, 40)
    open_.set_length(128)
    fixed.set_length(128)
    assert (open_.filter.l_max, fixed.filter.l_max) == (128, 40)
    # time runs to 1 at the last of l_max lags, where the window has fallen to exp(−|δ|)
    assert Hyena(HyenaConfig(l_max=1), D_MODEL, "none")(contract.stream(3, D_MODEL)).isfinite().all()


def test_the_filter_keeps_its_own_initialization_and_no_weight_decay():
    mixer = Hyena(HyenaConfig(), D_MODEL, "none")
    assert all(layer.own_init for layer in (*mixer.filter.layers, mixer.filter.last))
    assert all(p.no_weight_decay for p in mixer.filter.parameters())
    assert not getattr(mixer.in_proj, "own_init", False)


def test_there_is_no_finite_state():
    mixer = Hyena(HyenaConfig(), D_MODEL, "none")
    assert mixer.state_size is None
    assert not hasattr(mixer, "hook_state")
