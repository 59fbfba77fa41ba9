"""How sharply the loss bends at a model's weights: the largest eigenvalue of its Hessian, plain and as AdamW sees it.

AdamW divides its step by P = √v̂ + ε, where v̂ are its second moments with their bias corrected. In the coordinates
P^{1/2}·weights it is gradient descent with momentum on a loss whose Hessian is P^{-1/2} H P^{-1/2}. Along an
eigenvector of that matrix with the eigenvalue λ, a step with the learning rate η and the memory β1 is

    m ← β1·m + (1 − β1)·λ·x,   x ← x − η·m,   so   x_{t+1} = (1 + β1 − η(1 − β1)λ)·x_t − β1·x_{t−1},

which shrinks x exactly as long as λ is positive and below (2 + 2·β1) / ((1 − β1)·η), that is 38/η for β1 = 0.9. Above
it x grows and changes its sign at every step (Cohen et al., Adaptive gradient methods at the edge of stability, 2022).
The threshold leaves out weight decay, which shifts it by a share of about η·decay, and clipping, which shortens steps.

Products of the Hessian with a vector are central differences of gradients in float64. They cost two gradients, as a
second backward pass does, and they are right for every mixer. A second backward pass is refused by most of them: their
kernels can be differentiated only once.
"""

import copy
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor, nn

from circuitscope.arguments import explained
from circuitscope.errors import UserError
from circuitscope.memory import check_fits

Vector = Float[Tensor, " n"]
Product = Callable[[Vector], Vector]

PRODUCTS, TOLERANCE = 20, 0.05
EPS = 1e-8  # of AdamW, as torch has it by default
_STEP = 1e-7  # length of the step of a central difference, as a share of the length of the weights


@dataclass(frozen=True)
class Eigenvalue:
    """The most positive eigenvalue of a symmetric matrix, as found by products with vectors.

    value     a bound from below, which reaches the eigenvalue as the number of products grows
    residual  an eigenvalue lies at most so far from it
    products  how many products with the matrix it took
    """

    value: float
    residual: float
    products: int


@explained
def sharpness(
    model: nn.Module,
    loss: Callable[[nn.Module], Float[Tensor, ""]],
    *,
    scale: Mapping[str, Tensor] | None = None,
    products: int = PRODUCTS,
    tolerance: float = TOLERANCE,
) -> Eigenvalue:
    """The most positive eigenvalue of the Hessian H of a loss, or of S·H·S with a diagonal matrix S.

    The most positive one decides on stability. A negative eigenvalue, however large, is not what is looked for; where
    the loss bends upwards in no direction, the result is negative. The model is not changed; a copy in float64 and in
    eval mode is used.

    Args:
        loss: gives the loss of a model, for example on fixed batches; it must not draw random numbers.
        scale: the diagonal of S by parameter name, such as `adam_scale` gives; without it S is 1.
        products: at most so many products with the Hessian, each of which costs two gradients.
        tolerance: it stops when the residual is at most this share of the value.
    """
    twin = copy.deepcopy(model).double().eval()
    parameters = dict(twin.named_parameters())
    size = sum(p.numel() for p in parameters.values())
    device = next(iter(parameters.values())).device
    what = f"Lanczos vectors of {size:,} weights"
    check_fits(8 * size * min(products, size), device, what, f"use fewer products than {products}")
    wide = None if scale is None else _flat([scale[name].to(device).expand(p.shape) for name, p in parameters.items()])
    product = hessian_product(list(parameters.values()), lambda: loss(twin))
    start = torch.randn(size, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(device)
    if wide is not None:
        return most_positive_eigenvalue(lambda v: wide * product(wide * v), start, products, tolerance)
    return most_positive_eigenvalue(product, start, products, tolerance)


def adam_scale(
    second: Mapping[str, Tensor], step: int, beta2: float, factors: Mapping[str, float] | None = None
) -> dict[str, Tensor]:
    """S = P^{-1/2} with P = √v̂ + ε from AdamW's second moments after `step` updates, by parameter name.

    With S·H·S the threshold is that of the learning rate. A parameter whose rate is a factor of it has that factor in
    S² too.
    """
    if step < 1:
        raise UserError(f"AdamW has no moments before its first step, got step {step}")
    factors, correction = factors or {}, 1 - beta2**step
    return {
        name: (factors.get(name, 1.0) / ((v.double() / correction).sqrt() + EPS)).sqrt() for name, v in second.items()
    }


def stability_threshold(lr: float, beta1: float) -> float:
    """The eigenvalue of P^{-1/2} H P^{-1/2} above which AdamW's steps grow: (2 + 2·β1) / ((1 − β1)·lr)."""
    return (2 + 2 * beta1) / ((1 - beta1) * lr) if lr > 0 else math.inf


def hessian_product(parameters: list[nn.Parameter], loss: Callable[[], Float[Tensor, ""]]) -> Product:
    """The product of a loss's Hessian at the present parameters with a vector, which is as long as all of them.

    It is (g(w + h·v) − g(w − h·v)) / 2h. In float64, with |h·v| a 10⁻⁷ of |w|, it has about eight right digits.
    """
    at = [p.detach().clone() for p in parameters]
    length = _flat(at).norm().item() or 1.0

    def gradient(move: Vector) -> Vector:
        sizes = [p.numel() for p in parameters]
        with torch.no_grad():
            for p, centre, part in zip(parameters, at, move.split(sizes), strict=True):
                p.copy_(centre + part.view_as(p))
        with torch.enable_grad():
            found = torch.autograd.grad(loss(), parameters, allow_unused=True, materialize_grads=True)
        return _flat(found)

    def product(v: Vector) -> Vector:
        if not (norm := v.norm().item()):
            return torch.zeros_like(v)
        h = _STEP * length / norm
        try:
            found: Vector = (gradient(h * v) - gradient(-h * v)) / (2 * h)
            return found
        finally:
            with torch.no_grad():
                for p, centre in zip(parameters, at, strict=True):
                    p.copy_(centre)

    return product


def most_positive_eigenvalue(
    product: Product, start: Vector, products: int = PRODUCTS, tolerance: float = TOLERANCE
) -> Eigenvalue:
    """Lanczos iteration: the best answer in the space of start, A·start, A²·start …, which power iteration walks along.

    Each vector is made orthogonal to all before it twice, so no eigenvalue is found a second time.
    """
    basis: list[Vector] = []
    diagonal: list[float] = []
    beside: list[float] = []
    found = Eigenvalue(math.nan, math.inf, 0)
    v = start / start.norm()
    for _ in range(min(products, len(start))):
        basis.append(v)
        w = product(v)
        diagonal.append(float(w @ v))
        for _ in range(2):
            for other in basis:
                w -= (w @ other) * other
        left = w.norm().item()
        rows = (torch.tensor(numbers, dtype=torch.float64) for numbers in (diagonal, beside))
        small = sum(torch.diag(row, place) for place, row in enumerate(rows))
        values, vectors = torch.linalg.eigh(small, UPLO="U")
        residual = left * abs(vectors[-1, -1].item())
        found = Eigenvalue(values[-1].item(), residual, len(basis))
        if residual <= tolerance * abs(found.value) or not math.isfinite(found.value):
            break
        beside.append(left)
        v = w / left
    return found


def _flat(tensors: "list[Tensor] | tuple[Tensor, ...]") -> Vector:
    return torch.cat([tensor.reshape(-1).double() for tensor in tensors])
