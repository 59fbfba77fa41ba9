"""H3 with heads of one channel and of two: its definition, its state, its start."""

import contract
import pytest
import torch

from circuitscope.errors import UserError
from circuitscope.kernels.s4d import s4d_kernel_reference
from circuitscope.mixers.h3 import H3, H3Config

CONFIGS = {
    "published": H3Config(),
    "short shift": H3Config(d_state=4),
    "heads of two": H3Config(d_state=4, head_dim=2),
}
D_MODEL = 16


@pytest.fixture(params=CONFIGS.values(), ids=CONFIGS.keys())
def config(request):
    return request.param


def build(config, dtype=torch.float32):
    torch.manual_seed(0)
    return contract.shaken(H3(config, D_MODEL, "none").to(dtype))


@pytest.mark.parametrize("head_dim", [1, 2])
def test_states_are_complex_one_for_each_product_of_key_and_value(head_dim):
    mixer = build(H3Config(d_state=4, head_dim=head_dim))
    states = contract.seen_at(mixer, contract.stream(16, D_MODEL), "hook_state")
    assert states.is_complex()
    assert states.shape == (2, 16, D_MODEL * head_dim, 2)


def test_the_factors_compose():
    mixer, x = build(H3Config(), torch.float64), contract.stream(11, D_MODEL, dtype=torch.float64)
    contract.check_composed(mixer, x, mixer.qkv(x).chunk(3, dim=-1)[2])


def test_the_mixer_is_its_definition(config):
    """Shift and convolution summed lag by lag, the kernel by its recurrence; 1e-12 in float64."""
    mixer, x = build(config, torch.float64), contract.stream(12, D_MODEL, dtype=torch.float64)
    q, k, v = mixer.qkv(x).chunk(3, dim=-1)
    shifted = mixer.shift_D * k
    for lag in range(min(12, config.d_state)):
        shifted[:, lag:] += mixer.shift[:, lag] * k[:, : 12 - lag]
    heads = (mixer.n_heads, config.head_dim)
    q, k, v = (part.unflatten(-1, heads) for part in (q, shifted, v))
    kv = torch.einsum("blha,blhc->blhac", k, v)
    kernel = s4d_kernel_reference(mixer._ssm()[0], 12)
    y = mixer.D[:, None, None] * kv
    for lag in range(12):
        y[:, lag:] += kernel[:, lag, None, None] * kv[:, : 12 - lag]
    z = torch.einsum("blha,blhac->blhc", q, y)
    contract.assert_close(mixer(x), mixer.out(z.flatten(2)), 1e-12)


def test_state_size_by_hand():
    """N − 1 keys of every channel for the shift; N/2 complex numbers a product k̃_a v_b."""
    assert H3(H3Config(d_state=8), 16, "none").state_size == 16 * 7 + 16 * 4 * 2
    assert H3(H3Config(d_state=8, head_dim=2), 16, "none").state_size == 16 * 7 + 8 * 4 * 4 * 2


def test_the_ssm_starts_as_published():
    """A_n = −½ + iπn, steps in [1e-3, 1e-1]; A, dt and D are not weight-decayed."""
    torch.manual_seed(0)
    mixer = H3(H3Config(), 64, "none")
    torch.testing.assert_close(mixer.log_A_real.exp(), torch.full((64, 32), 0.5))
    torch.testing.assert_close(mixer.A_imag[5].detach(), torch.pi * torch.arange(32))
    dt = mixer.log_dt.exp()
    assert dt.min() * 1.0001 >= 1e-3
    assert dt.max() <= 0.1 * 1.0001
    assert dt.max() > 10 * dt.min()
    assert mixer.shift.abs().max() <= 1 / 8
    exempt = {name for name, p in mixer.named_parameters() if getattr(p, "no_weight_decay", False)}
    assert exempt == {"log_A_real", "A_imag", "log_dt", "D", "shift_D"}


def test_heads_that_do_not_divide_the_model_are_refused():
    with pytest.raises(UserError, match="head_dim must divide d_model = 16, got 3"):
        H3(H3Config(head_dim=3), 16, "none")
