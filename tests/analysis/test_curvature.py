"""The largest eigenvalue of a Hessian agrees with the exact one, and AdamW's threshold is where its steps grow."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from circuitscope.analysis.curvature import (
    EPS,
    adam_scale,
    hessian_product,
    most_positive_eigenvalue,
    sharpness,
    stability_threshold,
)
from circuitscope.config import RunConfig
from circuitscope.errors import UserError
from circuitscope.models.hooked_lm import HookedLM


class Point(nn.Module):
    """A model whose only parameter is a vector."""

    def __init__(self, w):
        super().__init__()
        self.w = nn.Parameter(w)


def quadratic(spectrum, size=40):
    """½ wᵀAw with A = QΛQᵀ of a known spectrum, padded with zeros."""
    torch.manual_seed(0)
    q, _ = torch.linalg.qr(torch.randn(size, size, dtype=torch.float64))
    values = torch.zeros(size, dtype=torch.float64)
    values[: len(spectrum)] = torch.tensor(spectrum, dtype=torch.float64)
    matrix = q @ torch.diag(values) @ q.T
    return matrix, lambda model: 0.5 * model.w @ matrix @ model.w


@pytest.mark.parametrize(("spectrum", "most"), [([5, 3, 1], 5), ([5, -50, 2], 5), ([-1] * 39 + [-7], -1)])
def test_on_a_quadratic_it_is_the_most_positive_eigenvalue_even_if_a_negative_one_is_larger(spectrum, most):
    _, loss = quadratic(spectrum)
    found = sharpness(Point(torch.randn(40)), loss, tolerance=1e-8)
    assert found.value == pytest.approx(most, rel=1e-6)
    assert found.products <= 5


def test_preconditioned_on_a_quadratic_it_is_that_of_the_scaled_matrix():
    matrix, loss = quadratic([5, -50, 2, 1])
    second = torch.rand(40) ** 4
    scale = adam_scale({"w": second}, step=30, beta2=0.99)
    p = (second.double() / (1 - 0.99**30)).sqrt() + EPS
    exact = torch.linalg.eigvalsh(matrix / p[:, None].sqrt() / p[None, :].sqrt())[-1].item()
    found = sharpness(Point(torch.randn(40)), loss, scale=scale, tolerance=1e-8, products=40)
    assert found.value == pytest.approx(exact, rel=1e-6)


def test_the_value_is_a_bound_from_below_and_the_residual_bounds_its_error():
    torch.manual_seed(3)
    matrix = torch.randn(300, 300, dtype=torch.float64)
    matrix = matrix + matrix.T
    every = torch.linalg.eigvalsh(matrix)
    before = -math.inf
    for products in (3, 6, 12, 60):
        found = most_positive_eigenvalue(lambda v: matrix @ v, torch.ones(300).double(), products, tolerance=1e-9)
        assert before < found.value <= every[-1].item() * (1 + 1e-9)
        assert (every - found.value).abs().min().item() <= found.residual * (1 + 1e-6)
        before = found.value
    assert before == pytest.approx(every[-1].item(), rel=1e-3)


def small(preset, **options):
    """A tiny model away from its start, so that no direction is flat by symmetry, and a batch."""
    sizes = {"length": 12, "pairs": 2, "vocab_size": 32, "d_model": 64 if "mamba2" in preset else 8, **options}
    config = RunConfig.build(preset, "mqar", **sizes)
    model = HookedLM(config.model, seed=0)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return model, config.task, config.task.batch(0, size=4)


def double_backward(model, batch, v):
    """Hessian times v by a second backward pass, through Φ built in plain torch, which can be differentiated twice."""
    for name, point in model.hook_dict.items():
        if name.rpartition(".")[2] in ("hook_phi", "hook_phi_conv"):
            point.add_hook(lambda value, hook: value)
    parameters = list(model.parameters())
    options = {"allow_unused": True, "materialize_grads": True}
    loss = F.cross_entropy(model(batch.tokens).flatten(0, 1), batch.labels.flatten(), ignore_index=-100)
    gradient = torch.autograd.grad(loss, parameters, create_graph=True, **options)
    along = sum((g * part.view_as(g)).sum() for g, part in zip(gradient, parts(v, parameters), strict=True))
    found = torch.autograd.grad(along, parameters, retain_graph=True, **options)
    model.reset_hooks()
    return torch.cat([f.reshape(-1) for f in found])


def parts(v, parameters):
    return v.split([p.numel() for p in parameters])


# Attention, convs, feature maps, FFTs, scans, the delta rule, WKV, complex state spaces, a recurrence without Φ.
FAMILIES = ["attention_conv_qkv", "based", "hyena", "mamba", "gated_deltanet", "rwkv", "s4", "lstm"]


@pytest.mark.parametrize("preset", FAMILIES)
def test_hessian_products_agree_with_a_second_backward_pass_through_phi(preset):
    model, task, batch = small(preset, n_layers=1)
    model = model.double()
    parameters = list(model.parameters())
    v = torch.randn(sum(p.numel() for p in parameters), dtype=torch.float64)
    before = [p.detach().clone() for p in parameters]
    ours = hessian_product(parameters, lambda: task.loss(model, batch)[0])(v)
    assert all(torch.equal(p, b) for p, b in zip(parameters, before, strict=True))
    reference = double_backward(model, batch, v)
    assert (ours - reference).norm() <= 1e-6 * reference.norm()


@pytest.mark.parametrize("preset", ["h3", "mamba2"])
def test_the_curvature_along_a_direction_agrees_with_second_differences_of_the_loss(preset):
    """For H3, whose shift stays outside Φ, and in general a reference that needs no gradient."""
    model, task, batch = small(preset, n_layers=1)
    model = model.double()
    parameters = list(model.parameters())
    v = torch.randn(sum(p.numel() for p in parameters), dtype=torch.float64)
    along = float(v @ hessian_product(parameters, lambda: task.loss(model, batch)[0])(v))

    @torch.no_grad()
    def loss(h):
        for p, part in zip(parameters, parts(v, parameters), strict=True):
            p.add_(h * part.view_as(p))
        value = float(task.loss(model, batch)[0])
        for p, part in zip(parameters, parts(v, parameters), strict=True):
            p.sub_(h * part.view_as(p))
        return value

    h = 1e-5
    assert along == pytest.approx((loss(h) - 2 * loss(0) + loss(-h)) / h**2, rel=1e-3)


def test_it_agrees_with_the_exact_hessian_of_a_tiny_model_plain_and_preconditioned():
    model, task, batch = small("attention", d_model=2, vocab_size=8, n_layers=1, n_heads=1, mlp_ratio=1)
    twin = HookedLM(model.config).double()
    twin.load_state_dict(model.double().state_dict())
    size = sum(p.numel() for p in model.parameters())
    assert size < 120
    exact = torch.stack([double_backward(twin, batch, row) for row in torch.eye(size, dtype=torch.float64)])
    assert (exact - exact.T).abs().max() < 1e-10
    loss = lambda m: task.loss(m, batch)[0]  # noqa: E731
    found = sharpness(model, loss, tolerance=1e-6, products=size)
    assert found.value == pytest.approx(torch.linalg.eigvalsh(exact)[-1].item(), rel=1e-5)
    second = {name: torch.rand_like(p) ** 2 + 1e-4 for name, p in model.named_parameters()}
    scale = adam_scale(second, step=10, beta2=0.999)
    s = torch.cat([scale[name].reshape(-1) for name, _ in model.named_parameters()])
    scaled = sharpness(model, loss, scale=scale, tolerance=1e-6, products=size)
    assert scaled.value == pytest.approx(torch.linalg.eigvalsh(s[:, None] * exact * s)[-1].item(), rel=1e-5)


def test_the_model_is_not_changed():
    model, task, batch = small("mamba", n_layers=1)
    model.train()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    sharpness(model, lambda m: task.loss(m, batch)[0], products=2)
    assert model.training
    assert all(torch.equal(before[n], t) and t.dtype == torch.float32 for n, t in model.state_dict().items())


@pytest.mark.parametrize("beta1", [0.0, 0.5, 0.9])
def test_adamw_grows_exactly_above_the_threshold(beta1):
    """½hx² under real AdamW whose second moments are held still, a little below and above the threshold."""
    lr, held, start = 0.01, 4.0, 1e-6

    def grows(curvature):
        x = nn.Parameter(torch.tensor([start], dtype=torch.float64))
        optimizer = torch.optim.AdamW([x], lr=lr, betas=(beta1, 0.999), weight_decay=0.0, eps=EPS)
        late = torch.tensor(1e5)  # so that the bias of the moments is gone
        optimizer.state[x] = {"step": late, "exp_avg": torch.zeros_like(x), "exp_avg_sq": torch.zeros_like(x)}
        for _ in range(200):
            x.grad = curvature * x.detach()
            optimizer.state[x]["exp_avg_sq"].copy_((held - 0.001 * x.grad**2) / 0.999)  # `held` after the update
            optimizer.step()
            if abs(x.item()) > 20 * start:
                return True
        assert abs(x.item()) < start
        return False

    edge = stability_threshold(lr, beta1) * (math.sqrt(held) + EPS)  # of h: P^{-1/2} h P^{-1/2} is h/P
    assert not grows(0.97 * edge)
    assert grows(1.03 * edge)
    assert stability_threshold(lr, 0.9) == pytest.approx(38 / lr)


def test_a_factor_of_the_learning_rate_is_a_factor_of_the_scale_squared_and_moments_need_a_step():
    second = {"a": torch.tensor([4.0]), "b": torch.tensor([4.0])}
    scale = adam_scale(second, 1, 0.0, {"a": 0.25})
    assert scale["a"].item() == pytest.approx(0.5 * scale["b"].item())
    assert scale["b"].item() == pytest.approx(math.sqrt(1 / 2))
    with pytest.raises(UserError, match="no moments before its first step, got step 0"):
        adam_scale(second, 0, 0.999)
