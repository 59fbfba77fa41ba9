"""Rope on C and B of the state-space models and on q and k of the delta rules: Φ is what the formula says."""

import contract
import pytest
import torch
from torch import Tensor

from circuitscope.kernels.delta_rule import delta_rule_reference
from circuitscope.mixers import build_mixer, mixer_config

D_MODEL, LENGTH = 16, 12
CASES = {
    "mamba": {"d_state": 6},
    "s6": {"d_state": 6},
    "mamba2": {"headdim": 8, "n_groups": 2, "d_state": 6},
    "deltanet": {"n_heads": 2, "d_key": 6},
    "gated_deltanet": {"n_heads": 2, "d_key": 6},
}


def build(name: str, rotary: bool = True, dtype: torch.dtype = torch.float64):
    torch.manual_seed(0)
    config = mixer_config({"name": name, "rotary": rotary, **CASES[name]})
    return contract.shaken(build_mixer(config, D_MODEL, "rope" if rotary else "none").to(dtype))


def rotation(d: int, angle_of: int) -> Tensor:
    """The matrix that turns each pair (n, n + d/2) by angle_of · 10000^(−n / (d/2))."""
    out = torch.zeros(d, d, dtype=torch.float64)
    for n in range(d // 2):
        angle = torch.tensor(angle_of * 10000.0 ** (-n / (d // 2)), dtype=torch.float64)
        pair = torch.tensor([n, n + d // 2])
        out[pair[:, None], pair] = torch.stack([angle.cos(), -angle.sin(), angle.sin(), angle.cos()]).view(2, 2)
    return out


@pytest.fixture
def x():
    return contract.stream(LENGTH, D_MODEL, dtype=torch.float64)


def seen(mixer, x, *names):
    return [contract.seen_at(mixer, x, f"hook_{name}") for name in names]


@pytest.mark.parametrize("name", CASES)
def test_a_model_with_rope_has_the_same_parameters_and_another_phi(name, x):
    plain, rotary = build(name, rotary=False), build(name)
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), rotary.parameters(), strict=True))
    one, other = (contract.seen_at(mixer, x, "hook_phi") for mixer in (plain, rotary))
    contract.assert_close(other.diagonal(dim1=-2, dim2=-1), one.diagonal(dim1=-2, dim2=-1), 1e-6)
    assert (one - other).tril(-1).abs().max() > 0.01 * one.tril(-1).abs().max()


def test_phi_of_mamba2_reads_c_turned_by_the_distance(x):
    """Φ_ij = C_i · R(j − i) B_j · exp(A Σ Δ) Δ_j + D δ_ij: positions enter as i − j alone."""
    mixer = build("mamba2")
    B, C, dt, phi = seen(mixer, x, "B", "C", "dt", "phi")
    want = torch.zeros_like(phi)
    for h in range(mixer.n_heads):
        group = h * 2 // mixer.n_heads
        for i in range(LENGTH):
            for j in range(i + 1):
                read = torch.einsum("bm,mn,bn->b", C[:, i, group], rotation(6, j - i), B[:, j, group])
                decay = (mixer.A[h] * dt[:, j + 1 : i + 1, h].sum(1)).exp()
                want[:, h, i, j] = read * decay * dt[:, j, h] + (mixer.D[h] if i == j else 0)
    contract.assert_close(phi, want.detach(), 1e-6)


@pytest.mark.parametrize("name", ["mamba", "s6"])
def test_phi_of_mamba_reads_c_and_b_turned_by_their_positions(name, x):
    mixer = build(name)
    B, C, dt, phi = seen(mixer, x, "B", "C", "dt", "phi")
    turned_B, turned_C = (torch.stack([u[:, t] @ rotation(6, t).T for t in range(LENGTH)], dim=1) for u in (B, C))
    S, A = dt.cumsum(1), mixer.ssm.A.detach()
    decay = ((S[:, :, None] - S[:, None])[..., None] * A).exp()  # batch dest src channel state
    want = torch.einsum("bin,bijen,bje,bjn->beij", turned_C, decay, dt, turned_B).tril()
    want = want + mixer.ssm.D.detach()[:, None, None] * torch.eye(LENGTH, dtype=torch.float64)
    contract.assert_close(phi, want, 1e-6)


@pytest.mark.parametrize("name", ["deltanet", "gated_deltanet"])
def test_the_delta_rules_write_and_read_turned_keys(name, x):
    mixer = build(name)
    q, k, v, beta, z = seen(mixer, x, "q", "k", "v", "beta", "z")
    g = contract.seen_at(mixer, x, "hook_decay") if name == "gated_deltanet" else None
    q, k = (torch.stack([u[:, t] @ rotation(6, t).T for t in range(LENGTH)], dim=1) for u in (q, k))
    contract.assert_close(z, delta_rule_reference(q, k, v, beta, g), 1e-6)


@pytest.mark.parametrize("name", ["mamba2", "deltanet", "gated_deltanet"])
def test_phi_of_constant_inputs_depends_on_the_distance_alone(name):
    """Beyond the conv's reach, and for the delta rules only if nothing was written before: there Φ is a Toeplitz."""
    mixer = build(name)
    names = {"mamba2": "BC"}.get(name, "qk")
    constant = {f"hook_{n}": lambda u: u[:, -1:].expand_as(u).clone() for n in (*names, "beta", "decay", "dt")}
    constant = {n: edit for n, edit in constant.items() if hasattr(mixer, n)}
    x = contract.stream(1, D_MODEL, dtype=torch.float64).expand(-1, LENGTH, -1)
    kept = []
    with torch.no_grad():
        contract.run(mixer, x, **constant, hook_phi=lambda phi: kept.append(phi.clone()))
    for lag in range(1, LENGTH):
        along = kept[0].diagonal(-lag, dim1=-2, dim2=-1)
        contract.assert_close(along, along[..., -1:].expand_as(along), 1e-5)
