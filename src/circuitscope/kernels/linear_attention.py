"""Based: causal linear attention whose kernel is the second-order Taylor polynomial of the exponential.

    weight_ij = φ(q_i)·φ(k_j) = 1 + s + s²/2,   s = q_i·k_j/√d,   j ≤ i,   divided by the row's sum.

The weight is ((1 + s)² + 1)/2 ≥ ½, so a row's sum is never near 0. The reference is based_reference, with φ and
cumulative sums. The fast path is quadratic and works in blocks of queries. Up to a length of about 1,000 this costs
less than the 1 + d + d² features, and both passes keep one [block, pos] strip of weights instead of the whole matrix.
"""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from circuitscope.kernels.once import differentiable_once

BLOCK = 64


def taylor_features(x: Float[Tensor, "*shape d"]) -> Float[Tensor, "*shape feature"]:
    """φ(x) = [1, x/d^¼, vec(xxᵀ)/√(2d)], of size 1 + d + d²."""
    d = x.shape[-1]
    square = (x[..., :, None] * x[..., None, :]).flatten(-2) * (2 * d) ** -0.5
    return torch.cat([torch.ones_like(x[..., :1]), x * d**-0.25, square], dim=-1)


def based_reference(
    q: Float[Tensor, "batch pos head d"],
    k: Float[Tensor, "batch pos head d"],
    v: Float[Tensor, "batch pos head d_v"],
    eps: float = 1e-12,
) -> Float[Tensor, "batch pos head d_v"]:
    """y_t = φ(q_t)·Σ_{j≤t} φ(k_j) v_jᵀ / (φ(q_t)·Σ_{j≤t} φ(k_j) + eps), in the recurrent form."""
    reads, writes = taylor_features(q), taylor_features(k)
    numerator = torch.einsum("bthf,bthfe->bthe", reads, (writes[..., :, None] * v[..., None, :]).cumsum(1))
    denominator = torch.einsum("bthf,bthf->bth", reads, writes.cumsum(1))
    return numerator / (denominator + eps)[..., None]


def based_phi(
    q: Float[Tensor, "batch dest head d"],
    k: Float[Tensor, "batch src head d"],
    eps: float = 1e-12,
    window: int | None = None,
) -> Float[Tensor, "batch head dest src"]:
    """Φ_ij = (1 + s + s²/2)/(row sum + eps) for j ≤ i and, if a window is given, i − j < window.

    Where there are fewer queries than keys, the queries are those of the last positions.
    """
    _check_window(window)
    weight = _mask(_weights(q, k), k.shape[1] - q.shape[1], 0, window)
    return weight / (weight.sum(-1, keepdim=True) + eps)


def based_steps(
    q: Float[Tensor, "batch pos head d"],
    k: Float[Tensor, "batch pos head d"],
    v: Float[Tensor, "batch pos head d_v"],
    sums: Float[Tensor, "batch head feature d_v"],
    counts: Float[Tensor, "batch head feature"],
    eps: float = 1e-12,
) -> tuple[Float[Tensor, "batch pos head d_v"], Tensor, Tensor]:
    """y of a sequence that goes on from the sums Σ φ(k_j) v_jᵀ and Σ φ(k_j) over its past, and both sums after it.

    In blocks: the past is read by φ(q), and inside a block the weights are as in based_phi.
    """
    y = []
    for q_b, k_b, v_b in zip(*(part.split(BLOCK, dim=1) for part in (q, k, v)), strict=True):
        weight, reads, writes = _weights(q_b, k_b).tril(), taylor_features(q_b), taylor_features(k_b)
        numerator = torch.einsum("bhij,bjhe->bihe", weight, v_b) + torch.einsum("bihf,bhfe->bihe", reads, sums)
        denominator = weight.sum(-1).mT + torch.einsum("bihf,bhf->bih", reads, counts)
        y.append(numerator / (denominator + eps)[..., None])
        sums, counts = sums + torch.einsum("bjhf,bjhe->bhfe", writes, v_b), counts + writes.sum(1)
    return torch.cat(y, dim=1), sums, counts


def _weights(
    q: Float[Tensor, "batch dest head d"], k: Float[Tensor, "batch src head d"]
) -> Float[Tensor, "batch head dest src"]:
    """1 + s + s²/2 of every pair."""
    s: Tensor = torch.einsum("bihd,bjhd->bhij", q, k) * q.shape[-1] ** -0.5
    return 1 + s * (1 + s / 2)


def based_attention(
    q: Float[Tensor, "batch pos head d"],
    k: Float[Tensor, "batch pos head d"],
    v: Float[Tensor, "batch pos head d_v"],
    eps: float = 1e-12,
    window: int | None = None,
) -> Float[Tensor, "batch pos head d_v"]:
    """based_phi(q, k)·v without building Φ: O(pos · BLOCK) memory forward and backward. Differentiable once."""
    _check_window(window)
    z: Tensor = _Based.apply(  # type: ignore[no-untyped-call]
        q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), eps, window
    )
    return z.transpose(1, 2)


def _check_window(window: int | None) -> None:
    if window is not None and window < 1:
        raise ValueError(f"window must be at least 1, got {window}")


def _mask(weight: Float[Tensor, "*batch dest src"], dest: int, src: int, window: int | None) -> Tensor:
    """Sets to zero what lies in the future or outside the window.

    `dest` and `src` are the positions of the strip's first row and column.
    """
    weight = weight.tril(dest - src)
    return weight if window is None else weight.triu(dest - src - window + 1)


class _Based(torch.autograd.Function):
    """Works on strips of BLOCK query rows and all the keys that they see; backward recomputes each strip."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, eps: float, window: int | None) -> Tensor:
        ctx.scale, ctx.window = q.shape[-1] ** -0.5, window
        q, k, v = (q * ctx.scale).contiguous(), k.contiguous(), v.contiguous()
        out = torch.empty_like(v)
        total = torch.empty_like(v[..., :1])
        for rows, cols in _strips(q.shape[2], window):
            s = q[:, :, rows] @ k[:, :, cols].transpose(2, 3)
            weight = _mask(torch.addcmul(1 + s, s, s, value=0.5), rows.start, cols.start, window)
            total[:, :, rows] = weight.sum(-1, keepdim=True) + eps
            out[:, :, rows] = (weight @ v[:, :, cols]) / total[:, :, rows]
        ctx.save_for_backward(q, k, v, out, total)
        return out

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:  # type: ignore[override]
        q, k, v, out, total = ctx.saved_tensors
        grad = grad / total
        mean = (grad * out).sum(-1, keepdim=True)
        grad_q, grad_k, grad_v = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
        for rows, cols in _strips(q.shape[2], ctx.window):
            q_i, k_j, v_j, grad_i = q[:, :, rows], k[:, :, cols], v[:, :, cols], grad[:, :, rows]
            s = q_i @ k_j.transpose(2, 3)
            slope = 1 + s
            weight = _mask(torch.addcmul(slope, s, s, value=0.5), rows.start, cols.start, ctx.window)
            grad_v[:, :, cols] += weight.transpose(2, 3) @ grad_i
            grad_s = (grad_i @ v_j.transpose(2, 3)).sub_(mean[:, :, rows]).mul_(slope)
            grad_s = _mask(grad_s, rows.start, cols.start, ctx.window)
            grad_q[:, :, rows] = grad_s @ k_j
            grad_k[:, :, cols] += grad_s.transpose(2, 3) @ q_i
        return grad_q.mul_(ctx.scale), grad_k, grad_v, None, None


def _strips(length: int, window: int | None) -> list[tuple[slice, slice]]:
    """Pairs of query rows and the key columns that they may see, block by block."""
    strips = []
    for start in range(0, length, BLOCK):
        stop = min(start + BLOCK, length)
        first = 0 if window is None else max(0, start - window + 1)
        strips.append((slice(start, stop), slice(first, stop)))
    return strips
