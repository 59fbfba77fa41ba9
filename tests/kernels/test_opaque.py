"""torch.compile runs kernels as they are: compiled models give the same logits and gradients."""

import subprocess
import sys

import pytest
import torch
from numba import prange

import circuitscope as cs
from circuitscope.kernels.numba_simd import kernel


@pytest.fixture
def fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def test_a_kernel_that_never_ran_before_can_be_called_in_a_compiled_function(fresh_dynamo):
    """Its first call compiles it, and Dynamo fails on that part of Numba if it looks."""

    @kernel
    def _double(x, y):  # type: ignore[no-untyped-def]
        for i in prange(len(x)):
            y[i] = 2 * x[i]

    def double_and_add(x: torch.Tensor) -> torch.Tensor:
        y = torch.empty_like(x)
        _double(x.numpy(), y.numpy())
        return y + 1

    x = torch.arange(4.0)
    assert torch.equal(torch.compile(double_and_add, backend="aot_eager")(x), 2 * x + 1)


@pytest.mark.slow
@pytest.mark.parametrize("preset", ["mamba", "rwkv", "hyena", "mamba2", "gated_deltanet", "based"])
def test_a_compiled_model_gives_the_same_logits_and_gradients(fresh_dynamo, without_type_checks, preset):
    """Scan and short convolution, WKV, long convolution; and autograd functions of our own in torch."""
    model = cs.model(preset, d_model=32, n_layers=1, vocab_size=32, max_length=8)
    tokens = torch.randint(32, (2, 8), generator=torch.Generator().manual_seed(0))

    def run(forward):  # type: ignore[no-untyped-def]
        model.zero_grad()
        logits = forward(tokens)
        logits.square().mean().backward()
        return logits.detach().clone(), [p.grad.clone() for p in model.parameters() if p.grad is not None]

    logits, gradients = run(torch.compile(model, backend="aot_eager"))
    plain_logits, plain_gradients = run(model)
    torch.testing.assert_close(logits, plain_logits)
    torch.testing.assert_close(gradients, plain_gradients)


@pytest.mark.slow
def test_who_compiles_nothing_does_not_import_dynamo():
    script = "import sys, torch, circuitscope as cs; cs.model('mamba')(torch.zeros(1, 4, dtype=torch.long)); "
    script += "print('torch._dynamo' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert done.stdout.split() == ["False"], done.stderr
