"""A second backward pass through every mixer: right, or refused in one line; never silently incomplete."""

import re

import pytest
import torch

import circuitscope as cs
from circuitscope.analysis.curvature import hessian_product
from circuitscope.errors import UserError
from circuitscope.models.hooked_lm import HookedLM

TOKENS = torch.randint(32, (2, 12), generator=torch.Generator().manual_seed(0))


def built(preset: str) -> HookedLM:
    torch.manual_seed(1)
    model = cs.model(preset, d_model=64 if "mamba2" in preset else 8, n_layers=1, vocab_size=32, max_length=12)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return model


def loss(model: HookedLM) -> torch.Tensor:
    return model(TOKENS).logsumexp(-1).mean()


def twice(model: HookedLM, v: torch.Tensor) -> torch.Tensor | str:
    """The Hessian times v by a second backward pass, or the line that refuses it."""
    parameters, options = list(model.parameters()), {"allow_unused": True, "materialize_grads": True}
    try:
        gradient = torch.autograd.grad(loss(model), parameters, create_graph=True, **options)
    except UserError as error:
        return str(error)
    parts = v.split([p.numel() for p in parameters])
    along = sum((g.flatten() * part).sum() for g, part in zip(gradient, parts, strict=True))
    try:
        return torch.cat([f.flatten() for f in torch.autograd.grad(along, parameters, **options)])
    except RuntimeError as error:  # torch's own fused attention says so by itself
        return str(error)


@pytest.mark.parametrize("preset", cs.models.names())
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_second_backward_pass_is_right_or_refused(preset, dtype):
    model, twin = built(preset).to(dtype), built(preset).double()
    size = sum(p.numel() for p in model.parameters())
    v = torch.randn(size, generator=torch.Generator().manual_seed(2)).to(dtype)
    found = twice(model, v)
    if isinstance(found, str):
        assert re.search("create_graph=True goes through a kernel|derivative for aten::.* is not implemented", found)
        return
    expected = hessian_product(list(twin.parameters()), lambda: loss(twin))(v.double())
    assert (found - expected).norm() <= 1e-3 * expected.norm()


def test_the_kernel_is_refused_and_torch_in_float64_is_right():
    model = built("mamba")
    v = torch.ones(sum(p.numel() for p in model.parameters()))
    assert isinstance(twice(model, v), str)
    assert isinstance(twice(model.double(), v.double()), torch.Tensor)
