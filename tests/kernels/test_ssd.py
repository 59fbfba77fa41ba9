"""SSD: the chunked form against the recurrence, Φ against both, extremes, gradients, state edits."""

import pytest
import torch
from torch import Tensor

from circuitscope.kernels.ssd import (
    segment_decay,
    ssd,
    ssd_phi,
    ssd_reference,
    ssd_with_state_edit,
)

TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-10}  # relative to the largest output
LENGTHS = [1, 2, 63, 65, 256, 1000]


def inputs(
    length: int,
    dtype: torch.dtype = torch.float64,
    *,
    batch: int = 2,
    heads: int = 4,
    groups: int = 2,
    d_head: int = 5,
    state: int = 7,
    dt: float | None = None,
    A: float | None = None,
    seed: int = 0,
) -> tuple[Tensor, ...]:
    """x, dt, A, B, C, D; Δ and A as Mamba2 draws them by default."""
    r = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=r, dtype=torch.float64).to(dtype)

    def uniform(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=r, dtype=torch.float64).to(dtype)

    steps = 1e-3 * 100 ** uniform(batch, length, heads)
    if dt is not None:
        steps = dt * (1 + 0.1 * uniform(batch, length, heads))
    rates = -(1 + 15 * uniform(heads)) if A is None else torch.full((heads,), A, dtype=dtype)
    x, B, C = normal(batch, length, heads, d_head), *(normal(batch, length, groups, state) for _ in "BC")
    return x, steps, rates, B, C, normal(heads)


def error(got: Tensor, want: Tensor) -> float:
    return float(((got - want).abs().max() / want.abs().max()).detach())


def apply_phi(phi: Tensor, v: Tensor) -> Tensor:
    return torch.einsum("bhij,bjhp->bihp", phi, v)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("with_initial", [False, True])
def test_chunked_equals_the_recurrence(length: int, dtype: torch.dtype, with_initial: bool) -> None:
    x, dt, A, B, C, D = inputs(length, dtype)
    initial = torch.randn(2, 4, 7, 5, dtype=dtype) if with_initial else None
    got = ssd(x, dt, A, B, C, D, initial)
    assert got.shape == x.shape
    assert got.dtype == dtype
    assert error(got, ssd_reference(x, dt, A, B, C, D, initial)) <= TOLERANCE[dtype]


@pytest.mark.parametrize("chunk", [1, 2, 5, 64, 1000])
def test_the_chunk_size_does_not_matter(chunk: int) -> None:
    x, dt, A, B, C, D = inputs(23)
    assert error(ssd(x, dt, A, B, C, D, chunk=chunk), ssd_reference(x, dt, A, B, C, D)) <= 1e-12


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("batch", [1, 3])
def test_phi_times_x_is_the_fused_output(length: int, dtype: torch.dtype, batch: int) -> None:
    x, dt, A, B, C, D = inputs(length, dtype, batch=batch)
    phi = ssd_phi(dt, A, B, C, D)
    assert phi.shape == (batch, 4, length, length)
    assert torch.equal(phi, phi.tril())
    assert error(apply_phi(phi, x), ssd(x, dt, A, B, C, D)) <= TOLERANCE[dtype]


def test_without_D_the_skip_is_absent() -> None:
    x, dt, A, B, C, D = inputs(9)
    bare = ssd(x, dt, A, B, C)
    torch.testing.assert_close(bare + D[:, None] * x, ssd(x, dt, A, B, C, D))
    torch.testing.assert_close(bare, apply_phi(ssd_phi(dt, A, B, C), x))
    torch.testing.assert_close(bare, ssd_reference(x, dt, A, B, C))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("A", [-16.0, -1e-8])
@pytest.mark.parametrize("dt", [50.0, 1e-8])
@pytest.mark.parametrize("length", [3, 130])
def test_extremes_are_finite_and_right(length: int, dt: float, A: float, dtype: torch.dtype) -> None:
    parts = [part.requires_grad_() for part in inputs(length, dtype, dt=dt, A=A)]
    got, want = ssd(*parts), ssd_reference(*parts)
    assert error(got, want) <= TOLERANCE[dtype]
    weights = torch.randn(got.shape, generator=torch.Generator().manual_seed(1), dtype=dtype)
    phi_out = apply_phi(ssd_phi(*parts[1:]), parts[0])
    assert error(phi_out, got) <= TOLERANCE[dtype]
    grads = [torch.autograd.grad(out, parts, weights) for out in (got, phi_out, want)]
    for ours, by_phi, theirs in zip(*grads, strict=True):
        assert ours.isfinite().all()
        scale = max(float(theirs.abs().max()), 1e-30)
        # A's gradient sums the whole batch and cancels: 1e-3 of its largest in float32.
        bound = 1e-3 if dtype == torch.float32 else 1e-8
        if scale > 1e-20:
            assert float((ours - theirs).abs().max()) <= bound * scale
            assert float((by_phi - theirs).abs().max()) <= bound * scale


def test_one_huge_step_does_not_cost_later_ones_their_digits() -> None:
    """After Δ A = −8e4 a float32 cumulative sum has a last digit of 0.008; Γ must still be right to 1e-6."""
    log_a = torch.full((60,), -1e-3)
    log_a[0] = -8e4
    exact = torch.exp(-1e-3 * (torch.arange(60.0, dtype=torch.float64)[:, None] - torch.arange(60.0)).double()).tril()
    exact[1:, 0] = exact[1:, 1] * torch.exp(torch.tensor(-1e-3, dtype=torch.float64))
    assert error(segment_decay(log_a).double(), exact) <= 1e-6


def test_segment_decay_is_twice_differentiable() -> None:
    log_a = -torch.rand(2, 5, dtype=torch.float64)
    assert torch.autograd.gradcheck(segment_decay, (log_a.requires_grad_(),))
    assert torch.autograd.gradgradcheck(segment_decay, (log_a,))


@pytest.mark.parametrize(("length", "chunk"), [(1, 4), (4, 4), (7, 3)])
def test_gradients_match_finite_differences(length: int, chunk: int) -> None:
    parts = [part.requires_grad_() for part in inputs(length, d_head=2, state=3, batch=1)]
    initial = torch.randn(1, 4, 3, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda *a: ssd(*a, chunk=chunk), (*parts, initial))
    assert torch.autograd.gradcheck(ssd_phi, parts[1:])


def test_gradients_in_float32_match_those_of_the_recurrence_in_float64() -> None:
    """Relative to each gradient's largest entry: 1e-5."""
    parts = inputs(256, torch.float32)
    grads = []
    for function, dtype in ((ssd, torch.float32), (ssd_reference, torch.float64)):
        leaves = [part.to(dtype).detach().requires_grad_() for part in parts]
        grads.append(torch.autograd.grad(function(*leaves).square().sum(), leaves))
    for ours, exact in zip(*grads, strict=True):
        assert error(ours.double(), exact) <= 1e-5


@pytest.mark.parametrize("length", [5, 70])
def test_strides_do_not_matter(length: int) -> None:
    parts = inputs(length)
    odd = []
    for part in parts:
        wide = torch.zeros(*part.shape[:-1], 3 * part.shape[-1], dtype=part.dtype)
        wide[..., ::3] = part
        odd.append(wide[..., ::3])
    flipped = [part.transpose(0, 1).contiguous().transpose(0, 1) if part.ndim > 1 else part for part in parts]
    want = ssd(*parts)
    for views in (odd, flipped):
        torch.testing.assert_close(ssd(*views), want, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(ssd_phi(*views[1:]), ssd_phi(*parts[1:]), rtol=1e-12, atol=1e-12)
    shared = parts[0][:, :1].expand_as(parts[0])
    torch.testing.assert_close(ssd(shared, *parts[1:]), ssd_reference(shared, *parts[1:]))


@pytest.mark.parametrize(
    ("batch", "heads", "groups", "d_head", "state"), [(1, 1, 1, 1, 1), (3, 6, 3, 7, 13), (1, 5, 5, 3, 2)]
)
def test_odd_sizes(batch: int, heads: int, groups: int, d_head: int, state: int) -> None:
    parts = inputs(67, batch=batch, heads=heads, groups=groups, d_head=d_head, state=state)
    assert error(ssd(*parts), ssd_reference(*parts)) <= 1e-12


def test_half_precision_is_computed_in_float32() -> None:
    parts = [part.bfloat16() for part in inputs(70, torch.float32)]
    got = ssd(*parts)
    assert got.dtype == torch.bfloat16
    assert error(got.float(), ssd(*(part.float() for part in parts))) <= 2**-8


@pytest.mark.parametrize(("batch", "length"), [(2, 0), (0, 5), (0, 70)])
def test_empty_axes_give_empty_outputs_and_gradients(batch: int, length: int) -> None:
    parts = [part.requires_grad_() for part in inputs(length, batch=batch)]
    out = ssd(*parts)
    assert out.shape == (batch, length, 4, 5)
    assert [g.shape for g in torch.autograd.grad(out.sum(), parts)] == [part.shape for part in parts]


def test_bad_sizes_are_refused() -> None:
    x, dt, A, B, C, D = inputs(4, heads=3, groups=1)
    with pytest.raises(ValueError, match="3 heads cannot share 2 groups"):
        ssd(x, dt, A, B.repeat(1, 1, 2, 1), C.repeat(1, 1, 2, 1), D)
    with pytest.raises(ValueError, match="chunk must be at least 1, got 0"):
        ssd(x, dt, A, B, C, D, chunk=0)


def test_an_edit_is_shown_the_states_of_the_recurrence() -> None:
    x, dt, A, B, C, D = inputs(33)
    S = initial = torch.randn(2, 4, 7, 5, dtype=torch.float64)
    shown: list[Tensor] = []
    ssd_with_state_edit(x, dt, A, B, C, D, lambda states: shown.append(states) or states, initial)
    assert shown[0].shape == (2, 33, 4, 7, 5)
    for t in range(33):
        write = torch.einsum("bhn,bhp->bhnp", B[:, t].repeat_interleave(2, 1), dt[:, t, :, None] * x[:, t])
        S = (dt[:, t] * A).exp()[..., None, None] * S + write
        assert error(shown[0][:, t], S) <= 1e-12


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_an_edit_that_changes_nothing_changes_nothing(dtype: torch.dtype) -> None:
    parts = inputs(65, dtype)
    assert error(ssd_with_state_edit(*parts, lambda S: S), ssd(*parts)) <= TOLERANCE[dtype]


@pytest.mark.parametrize("in_place", [False, True])
def test_a_state_edit_reaches_later_positions_and_no_earlier_one(in_place: bool) -> None:
    x, dt, A, B, C, D = inputs(20)
    t = 8

    def knock_out(S: Tensor) -> Tensor:
        S = S if in_place else S.clone()
        S[:, t] = 0
        return S

    plain = ssd_with_state_edit(x, dt, A, B, C, D, lambda S: S)
    edited = ssd_with_state_edit(x, dt, A, B, C, D, knock_out)
    assert torch.equal(edited[:, :t], plain[:, :t])
    assert (edited[:, t:] != plain[:, t:]).flatten(2).any(-1).all()
    # Forgetting everything at t is starting anew after t.
    assert (
        error(edited[:, t + 1 :], ssd(*(part[:, t + 1 :] for part in (x, dt)), A, B[:, t + 1 :], C[:, t + 1 :], D))
        <= 1e-10
    )
    torch.testing.assert_close(edited[:, t], D[:, None] * x[:, t], rtol=1e-10, atol=1e-10)


def test_gradients_flow_through_a_state_edit() -> None:
    parts = [part.requires_grad_() for part in inputs(4, batch=1, d_head=2, state=2)]
    push = torch.randn(1, 4, 4, 2, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda push, *a: ssd_with_state_edit(*a, lambda S: S * (1 + push)), (push, *parts))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("length", [1, 64, 100])
def test_on_a_gpu_half_precision_agrees_with_float32(length: int) -> None:
    """bfloat16 inputs, tolerance 2e-2 of the largest output and gradient."""
    parts = [part.cuda().bfloat16() for part in inputs(length, torch.float32, d_head=64, state=64)]
    fast = [part.clone().requires_grad_() for part in parts]
    slow = [part.float().requires_grad_() for part in parts]
    got, want = ssd(*fast), ssd_reference(*slow)
    assert error(got.float(), want) <= 2e-2
    weights = torch.randn_like(want)
    for ours, theirs in zip(
        torch.autograd.grad(got, fast, weights.bfloat16()), torch.autograd.grad(want, slow, weights), strict=True
    ):
        assert error(ours.float(), theirs) <= 2e-2
