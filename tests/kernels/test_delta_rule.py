"""The delta rules: the chunked form against the recurrence, Φ against both, extremes, gradients, state edits."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from circuitscope.kernels.delta_rule import (
    delta_phi,
    delta_rule,
    delta_rule_reference,
    delta_with_state_edit,
)

TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-10}  # relative to the largest output
LENGTHS = [1, 2, 63, 65, 256, 1000]
KEYS = ["random", "near-equal", "identical"]


def inputs(
    length: int,
    dtype: torch.dtype = torch.float64,
    *,
    gated: bool = True,
    keys: str = "random",
    beta: float | None = None,
    g: float | None = None,
    batch: int = 2,
    heads: int = 2,
    d_key: int = 16,
    d_value: int = 9,
) -> list[Tensor]:
    """q, k, v, beta and, if gated, g. Near-equal and identical keys come with β near and at 2."""
    r = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=r, dtype=torch.float64)

    def uniform() -> Tensor:
        return torch.rand(batch, length, heads, generator=r, dtype=torch.float64)

    q, k = (F.normalize(normal(batch, length, heads, d_key), dim=-1) for _ in "qk")
    strength, decay = 2 * uniform(), -0.1 * uniform()
    if keys == "near-equal":
        k, strength = F.normalize(k[:, :1] + 1e-2 * normal(*k.shape), dim=-1), 2 - 1e-3 * uniform()
    if keys == "identical":
        k, strength = k[:, :1].expand_as(k), torch.full_like(strength, 2)
    if beta is not None:
        strength = torch.full_like(strength, beta)
    if g is not None:
        decay = torch.full_like(decay, g)
    parts = [q, k, normal(batch, length, heads, d_value), strength, *([decay] if gated else [])]
    return [part.to(dtype) for part in parts]


def phi_of(parts: list[Tensor]) -> Tensor:
    return delta_phi(parts[0], parts[1], *parts[3:])


def apply_phi(phi: Tensor, v: Tensor) -> Tensor:
    return torch.einsum("bhij,bjhp->bihp", phi, v)


def error(got: Tensor, want: Tensor) -> float:
    return float(((got - want).abs().max() / want.abs().max()).detach())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("with_initial", [False, True])
def test_chunked_equals_the_recurrence(length: int, gated: bool, dtype: torch.dtype, with_initial: bool) -> None:
    parts = inputs(length, dtype, gated=gated)
    initial = torch.randn(2, 2, 16, 9, dtype=dtype) if with_initial else None
    got = delta_rule(*parts, initial=initial)
    assert got.shape == parts[2].shape
    assert got.dtype == dtype
    assert error(got, delta_rule_reference(*parts, initial=initial)) <= TOLERANCE[dtype]


@pytest.mark.parametrize("keys", KEYS)
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("length", [63, 256, 1000])
def test_float32_is_exact_to_rounding_even_for_equal_keys(length: int, gated: bool, keys: str) -> None:
    """Against the recurrence in float64: 2e-7 of the largest output (the recurrence in float32 loses up to 4e-6)."""
    parts = inputs(length, torch.float32, gated=gated, keys=keys)
    exact = delta_rule_reference(*(part.double() for part in parts))
    assert error(delta_rule(*parts).double(), exact) <= 2e-7


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("keys", KEYS)
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("length", LENGTHS)
def test_phi_times_v_is_the_fused_output(length: int, gated: bool, keys: str, dtype: torch.dtype) -> None:
    parts = inputs(length, dtype, gated=gated, keys=keys, batch=1)
    phi = phi_of(parts)
    assert phi.shape == (1, 2, length, length)
    assert phi.dtype == dtype
    assert torch.equal(phi, phi.tril())
    assert error(apply_phi(phi, parts[2]), delta_rule(*parts)) <= TOLERANCE[dtype]


@pytest.mark.parametrize("chunk", [1, 2, 5, 64, 1000])
@pytest.mark.parametrize("gated", [False, True])
def test_the_chunk_size_does_not_matter(chunk: int, gated: bool) -> None:
    parts = inputs(23, gated=gated)
    assert error(delta_rule(*parts, chunk=chunk), delta_rule_reference(*parts)) <= 1e-12


def test_the_scale_is_one_over_root_d_by_default() -> None:
    parts = inputs(12)
    torch.testing.assert_close(delta_rule(*parts, scale=1.0), 4 * delta_rule(*parts))
    torch.testing.assert_close(delta_rule(*parts, scale=0.3), delta_rule_reference(*parts, scale=0.3))
    torch.testing.assert_close(delta_phi(*parts[:2], *parts[3:], scale=1.0), 4 * phi_of(parts))


def test_a_gate_of_zero_is_no_gate() -> None:
    parts = inputs(70, g=0.0)
    torch.testing.assert_close(delta_rule(*parts), delta_rule(*parts[:4]), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("beta", [0.0, 1.0, 2.0])
@pytest.mark.parametrize("g", [None, 0.0, -1e-6, -50.0])
@pytest.mark.parametrize("keys", ["random", "identical"])
@pytest.mark.parametrize("length", [3, 130])
def test_extremes_are_finite_and_right(
    length: int, keys: str, g: float | None, beta: float, dtype: torch.dtype
) -> None:
    """Gradients: 1e-4 of the largest in float32 (the backward works in float32), 1e-8 in float64."""
    parts = [part.requires_grad_() for part in inputs(length, dtype, gated=g is not None, keys=keys, beta=beta, g=g)]
    exact_parts = [part.detach().double().requires_grad_() for part in parts]
    got, by_phi = delta_rule(*parts), apply_phi(phi_of(parts), parts[2])
    exact = delta_rule_reference(*exact_parts)
    if beta == 0:
        assert not got.any()
        assert not by_phi.any()
    else:
        assert error(got.double(), exact) <= TOLERANCE[dtype]
        assert error(by_phi.double(), exact) <= TOLERANCE[dtype]
    weights = torch.randn(got.shape, generator=torch.Generator().manual_seed(1), dtype=dtype)
    grads = [torch.autograd.grad(out, parts, weights) for out in (got, by_phi)]
    grads.append(torch.autograd.grad(exact, exact_parts, weights.double()))
    bound = 1e-4 if dtype == torch.float32 else 1e-8
    largest = max(float(grad.abs().max()) for grad in grads[-1])
    for fused, through_phi, theirs in zip(*grads, strict=True):
        assert float((fused - theirs).abs().max()) <= bound * largest
        assert float((through_phi - theirs).abs().max()) <= bound * largest


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize(("length", "chunk"), [(1, 2), (2, 2), (5, 2)])
@pytest.mark.parametrize("with_initial", [False, True])
def test_gradients_match_finite_differences(length: int, chunk: int, gated: bool, with_initial: bool) -> None:
    parts = [part.requires_grad_() for part in inputs(length, gated=gated, batch=1, d_key=3, d_value=2)]
    extra = [torch.randn(1, 2, 3, 2, dtype=torch.float64, requires_grad=True)] if with_initial else []

    def fused(*a: Tensor) -> Tensor:
        return delta_rule(*a[: len(parts)], initial=a[-1] if with_initial else None, chunk=chunk)

    assert torch.autograd.gradcheck(fused, (*parts, *extra))
    assert torch.autograd.gradcheck(delta_phi, (*parts[:2], *parts[3:]))


def test_gradients_are_skipped_where_not_asked_for() -> None:
    q, k, v, beta, g = inputs(70)
    (grad,) = torch.autograd.grad(delta_rule(q, k, v.requires_grad_(), beta, g).sum(), v)
    weights = torch.ones_like(v)
    torch.testing.assert_close(grad, torch.einsum("bhij,bihp->bjhp", delta_phi(q, k, beta, g), weights))


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("length", [5, 70])
def test_strides_do_not_matter(length: int, gated: bool) -> None:
    parts = inputs(length, gated=gated)
    odd = []
    for part in parts:
        wide = torch.zeros(*part.shape[:-1], 3 * part.shape[-1], dtype=part.dtype)
        wide[..., ::3] = part
        odd.append(wide[..., ::3])
    flipped = [part.transpose(0, 1).contiguous().transpose(0, 1) for part in parts]
    for views in (odd, flipped):
        views = [view.requires_grad_() for view in views]
        leaves = [part.clone().requires_grad_() for part in parts]
        got, want = delta_rule(*views), delta_rule(*leaves)
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(phi_of(views), phi_of(leaves), rtol=1e-12, atol=1e-12)
        # A gradient with strides 0 comes in, as from .sum().
        for ours, theirs in zip(
            torch.autograd.grad(got.sum(), views), torch.autograd.grad(want.sum(), leaves), strict=True
        ):
            torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("batch", "heads", "d_key", "d_value"), [(1, 1, 1, 1), (3, 5, 7, 13), (1, 2, 3, 1)])
def test_odd_sizes(batch: int, heads: int, d_key: int, d_value: int) -> None:
    parts = inputs(67, batch=batch, heads=heads, d_key=d_key, d_value=d_value)
    assert error(delta_rule(*parts), delta_rule_reference(*parts)) <= 1e-11


def test_half_precision_is_rounded_once() -> None:
    parts = [part.bfloat16() for part in inputs(70, torch.float32)]
    got = delta_rule(*parts)
    assert got.dtype == torch.bfloat16
    assert error(got.float(), delta_rule(*(part.float() for part in parts))) <= 2**-8


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize(("batch", "length"), [(2, 0), (0, 5), (0, 70)])
def test_empty_axes_give_empty_outputs_and_gradients(batch: int, length: int, gated: bool) -> None:
    parts = [part.requires_grad_() for part in inputs(length, batch=batch, gated=gated)]
    out = delta_rule(*parts)
    assert out.shape == (batch, length, 2, 9)
    assert [g.shape for g in torch.autograd.grad(out.sum(), parts)] == [part.shape for part in parts]


def test_an_edit_is_shown_the_states_that_the_transition_matrices_make() -> None:
    """S_t = e^{g_t} (I − β_t k_t k_tᵀ) S_{t−1} + β_t k_t v_tᵀ."""
    q, k, v, beta, g = inputs(33)
    S = initial = torch.randn(2, 2, 16, 9, dtype=torch.float64)
    shown: list[Tensor] = []
    delta_with_state_edit(q, k, v, beta, g, lambda states: shown.append(states) or states, initial=initial)
    assert shown[0].shape == (2, 33, 2, 16, 9)
    write = beta[..., None] * k
    A = g.exp()[..., None, None] * (torch.eye(16) - write[..., None] * k[..., None, :])
    for t in range(33):
        S = A[:, t] @ S + write[:, t, ..., None] * v[:, t, :, None]
        assert error(shown[0][:, t], S) <= 1e-12


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("gated", [False, True])
def test_an_edit_that_changes_nothing_changes_nothing(dtype: torch.dtype, gated: bool) -> None:
    parts = inputs(65, dtype, gated=gated)
    g = parts[4] if gated else None
    assert error(delta_with_state_edit(*parts[:4], g, lambda S: S), delta_rule(*parts)) <= TOLERANCE[dtype]


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("gated", [False, True])
def test_a_state_edit_reaches_later_positions_and_no_earlier_one(gated: bool, in_place: bool) -> None:
    parts, t = inputs(20, gated=gated), 8
    g = parts[4] if gated else None

    def knock_out(S: Tensor) -> Tensor:
        S = S if in_place else S.clone()
        S[:, t] = 0
        return S

    plain = delta_with_state_edit(*parts[:4], g, lambda S: S)
    edited = delta_with_state_edit(*parts[:4], g, knock_out)
    assert torch.equal(edited[:, :t], plain[:, :t])
    assert (edited[:, t:] != plain[:, t:]).flatten(2).any(-1).all()
    # Forgetting everything at t is starting anew after t.
    assert error(edited[:, t + 1 :], delta_rule(*(part[:, t + 1 :] for part in parts))) <= 1e-10
    assert float(edited[:, t].abs().max()) <= 1e-12


def test_gradients_flow_through_a_state_edit() -> None:
    parts = [part.requires_grad_() for part in inputs(4, batch=1, d_key=3, d_value=2)]
    push = torch.randn(1, 4, 2, 3, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(
        lambda push, *a: delta_with_state_edit(*a, lambda S: S * (1 + push)), (push, *parts)
    )


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("length", [1, 64, 100])
def test_on_a_gpu_half_precision_agrees_with_float32(length: int, gated: bool) -> None:
    """bfloat16 inputs, tolerance 2e-2 of the largest output and gradient."""
    parts = inputs(length, torch.float32, gated=gated, d_key=64, d_value=64)
    parts = [part.cuda().bfloat16() for part in parts]
    fast = [part.clone().requires_grad_() for part in parts]
    slow = [part.float().requires_grad_() for part in parts]
    got, want = delta_rule(*fast), delta_rule_reference(*slow)
    assert error(got.float(), want) <= 2e-2
    weights = torch.randn_like(want)
    for ours, theirs in zip(
        torch.autograd.grad(got, fast, weights.bfloat16()), torch.autograd.grad(want, slow, weights), strict=True
    ):
        assert error(ours.float(), theirs) <= 2e-2
