"""linear_cross_entropy against torch's own."""

import pytest
import torch
import torch.nn.functional as F

from circuitscope.kernels.cross_entropy import linear_cross_entropy


def inputs(labels: int, vocab: int = 11, width: int = 5, scale: float = 1.0, dtype=torch.float64):
    g = torch.Generator().manual_seed(labels)
    x = (scale * torch.randn(labels, width, generator=g, dtype=dtype)).requires_grad_()
    weight = torch.randn(vocab, width, generator=g, dtype=dtype).requires_grad_()
    return x, weight, torch.randint(vocab, (labels,), generator=g)


def both(x, weight, target, factor: float = 1.0):
    """(value, gradients) of ours and of torch's."""
    out = []
    for loss in (linear_cross_entropy(x, weight, target), F.cross_entropy(F.linear(x, weight), target)):
        out.append((loss.detach(), torch.autograd.grad(factor * loss, (x, weight))))
    return out


@pytest.mark.parametrize("labels", [1, 2, 7, 64])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-12)])
def test_value_and_gradients_are_those_of_torch(labels, dtype, tolerance):
    (ours, our_grads), (theirs, their_grads) = both(*inputs(labels, dtype=dtype), factor=3.0)
    torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)
    for mine, their in zip(our_grads, their_grads, strict=True):
        torch.testing.assert_close(mine, their, rtol=tolerance, atol=tolerance)


def test_gradient_agrees_with_finite_differences():
    x, weight, target = inputs(6)
    assert torch.autograd.gradcheck(lambda a, b: linear_cross_entropy(a, b, target), (x, weight))


@pytest.mark.parametrize("scale", [1e3, 1e6])
def test_large_logits_overflow_nothing(scale):
    (ours, our_grads), (theirs, their_grads) = both(*inputs(9, scale=scale, dtype=torch.float32))
    assert ours.isfinite()
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    for mine, their in zip(our_grads, their_grads, strict=True):
        torch.testing.assert_close(mine, their, rtol=1e-4, atol=1e-5 * float(their.abs().max()))


def test_a_target_that_is_certain_costs_nothing_and_an_impossible_one_costs_its_distance():
    x, weight = torch.tensor([[1.0]]), torch.tensor([[0.0], [200.0]])
    assert linear_cross_entropy(x, weight, torch.tensor([1])) == 0
    assert linear_cross_entropy(x, weight, torch.tensor([0])) == 200


def test_inputs_are_left_as_they_were():
    x, weight, target = inputs(4)
    copies = [t.detach().clone() for t in (x, weight, target)]
    linear_cross_entropy(x, weight, target).backward()
    assert all(torch.equal(a, b) for a, b in zip((x, weight, target), copies, strict=True))


def test_bfloat16_autocast_keeps_the_loss_and_gives_gradients():
    x, weight, target = inputs(32, vocab=50, width=16, dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        ours = linear_cross_entropy(x, weight, target)
        theirs = F.cross_entropy(F.linear(x, weight), target)
    assert ours.dtype == torch.float32
    torch.testing.assert_close(ours, theirs, rtol=1e-2, atol=1e-2)
    ours.backward()
    assert x.grad.dtype == weight.grad.dtype == torch.float32
    exact = torch.autograd.grad(F.cross_entropy(F.linear(x, weight), target), weight)[0]
    torch.testing.assert_close(weight.grad, exact, rtol=0.1, atol=0.02 * float(exact.abs().max()))
