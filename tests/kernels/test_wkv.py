"""RWKV-4's WKV: the Numba kernel, the torch recurrence and Φ say the same."""

from inspect import unwrap

import pytest
import torch

from circuitscope.kernels.wkv import wkv, wkv_phi, wkv_reference, wkv_start, wkv_steps, wkv_with_state_edit

SHAPES = [(1, 1, 1), (2, 2, 3), (3, 37, 13), (1, 256, 70), (5, 9, 8)]


def tensors(batch, length, channels, dtype=torch.float32, scale=1.0):
    torch.manual_seed(0)
    w, u = (2 * torch.randn(channels)).exp(), torch.randn(channels)
    k, v = (scale * torch.randn(batch, length, channels)).clamp(-1000, 1000), torch.randn(batch, length, channels)
    return [a.to(dtype).requires_grad_() for a in (w, u, k, v)]


def exactly(inputs):
    return [a.detach().double().requires_grad_() for a in inputs]


def close(ours, theirs, tolerance, floor=1e-3):
    assert ours.shape == theirs.shape
    assert (ours - theirs).abs().max() <= tolerance * theirs.abs().max().clamp(min=floor)


def by_the_definition(w, u, k, v):
    """Row by row, in float64: exponents, minus their maximum, normalized."""
    y = torch.empty_like(v)
    for i in range(k.shape[1]):
        logits = torch.stack([u + k[:, i] if j == i else k[:, j] - (i - 1 - j) * w for j in range(i + 1)], 1)
        y[:, i] = (logits.softmax(1) * v[:, : i + 1]).sum(1)
    return y


@pytest.mark.parametrize("scale", [1.0, 30.0, 1000.0])
def test_the_recurrence_is_the_definition(scale):
    inputs = [a.detach() for a in tensors(2, 20, 5, torch.float64, scale)]
    close(wkv_reference(*inputs), by_the_definition(*inputs), 1e-10)


@pytest.mark.parametrize("scale", [1.0, 30.0, 1000.0])
@pytest.mark.parametrize("shape", SHAPES)
def test_kernel_against_the_float64_recurrence(shape, scale):
    """Output within 1e-6, gradients within 2e-5 of their largest entry, keys up to ±1000."""
    inputs = tensors(*shape, scale=scale)
    exact = exactly(inputs)
    y, expected = wkv(*inputs), wkv_reference(*exact)
    assert y.dtype == torch.float32
    close(y, expected, 1e-6)
    grad = torch.randn_like(y)
    theirs = torch.autograd.grad(expected, exact, grad.double())
    for a, b in zip(torch.autograd.grad(y, inputs, grad), theirs, strict=True):
        close(a, b, 2e-5)


@pytest.mark.parametrize("scale", [1.0, 1000.0])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-10)])
def test_phi_times_v_is_the_output(shape, scale, dtype, tolerance):
    w, u, k, v = tensors(*shape, dtype, scale)
    phi = wkv_phi(w, u, k)
    assert phi.dtype == dtype
    assert phi.equal(phi.tril())
    close(phi.sum(-1), torch.ones_like(phi.sum(-1)), 1e-6)
    close(torch.einsum("bcij,bjc->bic", phi, v), wkv(w, u, k, v), tolerance)


@pytest.mark.parametrize("length", [1, 2, 6])
def test_gradients_in_float64(length):
    w, u, k, v = tensors(2, length, 3, torch.float64)
    assert torch.autograd.gradcheck(wkv, (w, u, k, v))
    assert torch.autograd.gradcheck(wkv_phi, (w, u, k))


@pytest.mark.parametrize(
    ("w", "u", "k"),
    [
        (1e-8, 0.0, [0.0, 0.0, 0.0]),  # no decay: a plain average
        (1e4, 0.0, [0.0, 0.0, 0.0]),  # all forgotten but the last two
        (1.0, -500.0, [0.0, 1000.0, -1000.0]),
        (1.0, 500.0, [1000.0, -1000.0, 1000.0]),
        (400.0, 0.0, [1000.0, -1000.0, 100.0]),  # decayed by 400 per step, and still the largest
    ],
)
def test_extremes_are_finite_and_right(w, u, k):
    inputs = [
        torch.tensor([w], requires_grad=True),
        torch.tensor([u], requires_grad=True),
        torch.tensor(k).reshape(1, -1, 1).requires_grad_(),
        torch.tensor([1.0, -2.0, 3.0]).reshape(1, -1, 1).requires_grad_(),
    ]
    exact = exactly(inputs)
    y = wkv(*inputs)
    close(y, by_the_definition(*[a.detach() for a in exact]), 1e-6)
    close(wkv_phi(*inputs[:3])[:, 0] @ inputs[3], y, 1e-6)
    theirs = torch.autograd.grad(wkv_reference(*exact).sum(), exact)
    for a, b in zip(torch.autograd.grad(y.sum(), inputs), theirs, strict=True):
        close(a, b, 1e-5)


def test_a_nan_stays_one():
    w, u, k, v = (a.detach() for a in tensors(1, 4, 3))
    k[0, 1, 2] = float("nan")
    y = wkv(w, u, k, v)
    assert y[0, 1:, 2].isnan().all()
    assert y[..., :2].isfinite().all()


def test_non_contiguous_inputs():
    w, u, k, v = (a.detach() for a in tensors(4, 10, 6))
    k, v, w = k.transpose(0, 1)[..., ::2], v.transpose(0, 1)[..., 1::2], w[::2]
    close(wkv(w, u[:3], k, v), wkv_reference(w.double(), u[:3].double(), k.double(), v.double()), 1e-6)


def test_half_precision_is_computed_in_float32():
    w, u, k, v = (a.detach().bfloat16() for a in tensors(2, 5, 3))
    y = wkv(w, u, k, v)
    assert y.dtype == torch.bfloat16
    assert y.equal(wkv(w.float(), u.float(), k.float(), v.float()).bfloat16())


def test_an_edit_is_shown_the_scaled_sums():
    inputs = w, _, k, v = [a.detach() for a in tensors(2, 7, 3, torch.float64)]
    shown = []
    wkv_with_state_edit(*inputs, lambda states: shown.append(states) or states)
    num, den, maximum = shown[0].unbind(-1)
    for t in range(7):
        weights = torch.exp(k[:, : t + 1] - torch.arange(t, -1, -1)[:, None] * w)
        close(num[:, t] * maximum[:, t].exp(), (weights * v[:, : t + 1]).sum(1), 1e-10)
        close(den[:, t] * maximum[:, t].exp(), weights.sum(1), 1e-10)
    assert den.min() >= 1 - 1e-12


def test_an_identity_edit_changes_nothing():
    inputs = tensors(2, 9, 3, torch.float64)
    assert wkv_with_state_edit(*inputs, lambda states: states).equal(wkv_reference(*inputs))


def test_erasing_the_state_at_t_is_starting_anew_after_t():
    w, u, k, v = tensors(2, 9, 3, torch.float64)

    def erase(states):
        states = states.clone()
        states[:, 4] = 0
        return states

    y = wkv_with_state_edit(w, u, k, v, erase)
    close(y[:, :5], wkv(w, u, k, v)[:, :5], 1e-10)
    close(y[:, 5:], wkv(w, u, k[:, 5:], v[:, 5:]), 1e-10)


def test_gradients_flow_through_an_edit():
    gain = torch.tensor(0.7, dtype=torch.float64, requires_grad=True)

    def run(gain, w, u, k, v):
        return wkv_with_state_edit(w, u, k, v, lambda s: torch.cat([s[:, :1], s[:, 1:2] * gain, s[:, 2:]], 1))

    assert torch.autograd.gradcheck(run, (gain, *tensors(1, 4, 2, torch.float64)))


def test_an_edit_may_write_in_place_and_gives_the_plain_output_back_for_nothing():
    inputs = [a.detach() for a in tensors(2, 9, 3)]

    def erase(states):
        states[:, 4] = 0
        return states

    copied = wkv_with_state_edit(*inputs, lambda states: erase(states.clone()))
    assert wkv_with_state_edit(*inputs, erase).equal(copied)
    assert not copied.equal(wkv_reference(*inputs))


@pytest.mark.parametrize("above", [-500.0, 0.0, 500.0])
def test_the_state_of_a_sequence_far_above_or_below_can_be_written_as_it_is(above):
    """Keys before t differ by e^±500, which no float32 holds; after t both sequences are the same."""
    w, u, k, v = (a.detach() for a in tensors(2, 12, 3))
    w = w / 100
    other_k, other_v = k.clone(), v.clone()
    other_k[:, :5] = above - k[:, :5]
    other_v[:, :5] = 1 - v[:, :5]
    donor = []
    wkv_with_state_edit(w, u, other_k, other_v, lambda states: donor.append(states) or states)

    def write(states):
        states[:, 4] = donor[0][:, 4]
        return states

    y = wkv_with_state_edit(w, u, k, v, write)
    close(y[:, :5], wkv(w, u, k, v)[:, :5], 1e-6)
    close(y[:, 5:], wkv(w, u, other_k, other_v)[:, 5:], 1e-4)  # max itself is shown to 3e-5 at 500


@pytest.mark.parametrize("shapes", [((2,), (3,)), ((3,), (2,)), ((3, 1), (3,))])
def test_wrong_shapes_are_refused_before_any_memory_is_read(shapes):
    # Without the wrapper of the shape checker, which tests can turn on and which would speak first.
    unchecked, k = unwrap(wkv), torch.zeros(2, 4, 3)
    with pytest.raises(ValueError, match=r"w and u \[channel\]"):
        unchecked(torch.ones(shapes[0]), torch.ones(shapes[1]), k, k)
    with pytest.raises(ValueError, match="k and v are"):
        unchecked(torch.ones(3), torch.ones(3), k, k[:, :3])


@pytest.mark.parametrize("shape", [(0, 4, 3), (2, 0, 3), (2, 4, 0)])
def test_empty_axes_give_empty_outputs(shape):
    inputs = tensors(*shape)
    y = wkv(*inputs)
    assert y.shape == shape
    assert [g.shape for g in torch.autograd.grad(y.sum(), inputs)] == [a.shape for a in inputs]


@pytest.mark.parametrize("scale", [1.0, 30.0, 1000.0])
def test_steps_in_parts_are_the_recurrence(scale):
    """With the same digits: within 1e-6 in float32, keys up to ±1000."""
    inputs = [a.detach() for a in tensors(2, 20, 5, scale=scale)]
    w, u, k, v = inputs
    state, y = wkv_start(2, 5, v), []
    for part in (slice(0, 1), slice(1, 8), slice(8, 20)):
        of_part, state = wkv_steps(w, u, k[:, part], v[:, part], *state)
        y.append(of_part)
    close(torch.cat(y, 1).double(), wkv_reference(*exactly(inputs)), 1e-6)
