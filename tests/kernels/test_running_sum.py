"""Running sums in a fixed order: their values, their gradients, and that strict determinism never meets cumsum."""

from contextlib import contextmanager

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import circuitscope as cs
from circuitscope.kernels.running_sum import running_sum, running_sum_by_doubling
from second_device import second_device


@pytest.mark.parametrize("length", [0, 1, 2, 3, 7, 8, 9, 64, 100])
def test_doubling_gives_the_values_of_cumsum(length):
    x = torch.randn(3, 2, length, dtype=torch.float64)
    torch.testing.assert_close(running_sum_by_doubling(x), x.cumsum(-1), rtol=0, atol=1e-13)


def test_doubling_of_whole_numbers_is_exact_also_in_float32():
    x = torch.randint(-1000, 1000, (4, 200)).float()
    assert torch.equal(running_sum_by_doubling(x), x.cumsum(-1))


def test_an_infinite_step_leaves_what_came_before_it():
    x = torch.tensor([1.0, 2.0, -torch.inf, 3.0])
    assert running_sum_by_doubling(x).tolist() == [1.0, 3.0, -torch.inf, -torch.inf]


def test_doubling_is_differentiable_again():
    x = torch.randn(2, 5, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(running_sum_by_doubling, x)
    assert torch.autograd.gradgradcheck(lambda x: running_sum_by_doubling(x).square(), x)


class Called(TorchDispatchMode):
    """Remembers the names of all operations."""

    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.add(str(func.overloadpacket))
        return func(*args, **(kwargs or {}))


@contextmanager
def strict():
    before = torch.get_deterministic_debug_mode()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(before)


# torch raises an error at these on CUDA if only deterministic kernels may serve
RAISE = {"aten.cumsum", "aten.put_", "aten.kthvalue", "aten.histc", "aten.median", "aten.nll_loss2d_forward"}


@pytest.mark.parametrize("preset", cs.models.names())
def test_a_strictly_deterministic_step_on_a_device_calls_nothing_that_torch_refuses_on_cuda(preset):
    """The same loss as on the CPU; 70 positions are more than one chunk."""
    task = cs.task("mqar", length=70, pairs=2, vocab_size=32)
    here, there = (cs.model(preset, d_model=32, vocab_size=32, max_length=70) for _ in range(2))
    batch = task.batch(0, size=1)
    expected = task.loss(here, batch)[0].item()
    with second_device(), strict():
        there, batch = there.to("second"), batch.to("second")
        with Called() as called:
            loss = task.loss(there, batch)[0]
            loss.backward()
        assert not called.names & RAISE
        assert loss.item() == pytest.approx(expected, rel=1e-4)


def test_without_strict_determinism_a_device_adds_by_cumsum():
    with second_device(), Called() as called:
        running_sum(torch.ones(3, device="second"))
    assert "aten.cumsum" in called.names
