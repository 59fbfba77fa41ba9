"""States of linear recurrences at every position, in Triton, for models whose states are read or edited.

    linear scan:  s_t = a_t ⊙ s_{t−1} + x_t                            a real or complex, or one a for all positions
    delta scan:   S_t = e_t (S_{t−1} − β_t k_t (k_tᵀ S_{t−1})) + X_t

Both transitions are equal to their transpose, so the gradient of x is the same scan of the gradient, from the end and
with the transitions of the next position; the other gradients follow from it in torch. Hence they are differentiable
any number of times. A program has some columns of one sequence; nothing is summed across programs, so the same input
gives the same bits.
"""

from typing import Any, no_type_check

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from jaxtyping import Complex, Float
from torch import Tensor

from circuitscope.kernels.triton.launch import block_of, blocks_of, launch, plain, power_of_two, wide

States = Float[Tensor, "batch pos column"] | Complex[Tensor, "batch pos column"]


def linear_scan(a: States, x: States) -> States:
    """Every s_t = a_t ⊙ s_{t−1} + x_t, s_{−1} = 0; both of one dtype, none empty."""
    s: Tensor = _LinearScan.apply(a, x, False)  # type: ignore[no-untyped-call]
    return s


def delta_scan(
    k: Float[Tensor, "batch pos head d_key"],
    beta: Float[Tensor, "batch pos head"],
    decay: Float[Tensor, "batch pos head"],
    X: Float[Tensor, "batch pos head d_key d_value"],
) -> Float[Tensor, "batch pos head d_key d_value"]:
    """Every S_t = e_t (S_{t−1} − β_t k_t (k_tᵀ S_{t−1})) + X_t, S_{−1} = 0; all of one dtype, none empty."""
    S: Tensor = _DeltaScan.apply(k, beta, decay, X, False)  # type: ignore[no-untyped-call]
    return S


class _LinearScan(torch.autograd.Function):
    """`reverse`: from the last position to the first."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, x: Tensor, reverse: bool) -> Tensor:
        batch, length, columns = x.shape
        rates, entering = _as_real(a), _as_real(x)
        out = torch.empty_like(entering)
        block = block_of(columns)
        launch(
            _scan_columns,
            batch * blocks_of(columns, block),
            *(rates, entering, out, length, columns),
            REVERSE=reverse,
            COMPLEX=x.is_complex(),
            COLUMNS=block,
        )
        s = torch.view_as_complex(out) if x.is_complex() else out
        ctx.save_for_backward(a, s)
        ctx.reverse = reverse
        return s

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor, None]:  # type: ignore[override]
        a, s = ctx.saved_tensors
        g: Tensor = _LinearScan.apply(_later(a, ctx.reverse).conj(), grad, not ctx.reverse)  # type: ignore[no-untyped-call]
        return g * _earlier(s, ctx.reverse).conj() if ctx.needs_input_grad[0] else None, g, None


class _DeltaScan(torch.autograd.Function):
    """`reverse`: from the last position to the first."""

    @staticmethod
    def forward(ctx: Any, k: Tensor, beta: Tensor, decay: Tensor, X: Tensor, reverse: bool) -> Tensor:
        batch, length, heads, d_key, d_value = X.shape
        out = torch.empty_like(X, memory_format=torch.contiguous_format)
        block = block_of(d_value, d_key)
        launch(
            _scan_delta,
            batch * heads * blocks_of(d_value, block),
            *(plain(k), plain(beta), plain(decay), plain(X), out, length, heads, d_key, d_value),
            REVERSE=reverse,
            KEYS=power_of_two(d_key),
            VALUES=block,
        )
        ctx.save_for_backward(k, beta, decay, out)
        ctx.reverse = reverse
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        k, beta, decay, S = ctx.saved_tensors
        moved = [_later(part, ctx.reverse) for part in (k, beta, decay)]
        G: Tensor = _DeltaScan.apply(*moved, grad, not ctx.reverse)  # type: ignore[no-untyped-call]
        if not any(ctx.needs_input_grad[:3]):
            return None, None, None, G, None
        before = _earlier(S, ctx.reverse)
        seen, pulled = ((k[..., None] * part).sum(-2) for part in (before, G))  # kᵀS and kᵀG
        overlap = (seen * pulled).sum(-1)
        d_decay = (before * G).sum((-1, -2)) - beta * overlap
        across = (before * pulled[..., None, :]).sum(-1) + (G * seen[..., None, :]).sum(-1)
        return -(decay * beta)[..., None] * across, -decay * overlap, d_decay, G, None


def _as_real(part: Tensor) -> Tensor:
    """A complex tensor as pairs of real numbers."""
    part = part.detach().resolve_conj()
    return (torch.view_as_real(part) if part.is_complex() else part).contiguous()


def _earlier(part: Tensor, reverse: bool) -> Tensor:
    """The value of the step before, zero at the first step."""
    padding = (0, 0) * (part.ndim - 2)
    return F.pad(part, (*padding, 0, 1))[:, 1:] if reverse else F.pad(part, (*padding, 1, 0))[:, :-1]


def _later(part: Tensor, reverse: bool) -> Tensor:
    """The value of the step after, zero at the last step."""
    return _earlier(part, not reverse)


@triton.jit
@no_type_check
def _scan_columns(
    a,
    x,
    out,
    length,
    columns,
    REVERSE: tl.constexpr,
    COMPLEX: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    length, columns = wide(length), wide(columns)
    blocks = tl.cdiv(columns, COLUMNS)
    c = tl.program_id(0) % blocks * COLUMNS + tl.arange(0, COLUMNS)
    at = tl.program_id(0) // blocks * length * columns + c
    re = tl.zeros([COLUMNS], x.dtype.element_ty)
    im = tl.zeros([COLUMNS], x.dtype.element_ty)
    for step in range(length):
        place = at + (length - 1 - step if REVERSE else step) * columns
        if COMPLEX:
            place *= 2
            a_re, a_im = tl.load(a + place, c < columns, 0.0), tl.load(a + place + 1, c < columns, 0.0)
            x_re, x_im = tl.load(x + place, c < columns, 0.0), tl.load(x + place + 1, c < columns, 0.0)
            re, im = a_re * re - a_im * im + x_re, a_re * im + a_im * re + x_im
            tl.store(out + place, re, c < columns)
            tl.store(out + place + 1, im, c < columns)
        else:
            re = tl.load(a + place, c < columns, 0.0) * re + tl.load(x + place, c < columns, 0.0)
            tl.store(out + place, re, c < columns)


@triton.jit
@no_type_check
def _scan_delta(
    k,
    beta,
    decay,
    X,
    out,
    length,
    heads,
    d_key,
    d_value,
    REVERSE: tl.constexpr,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
):
    length, heads, d_key, d_value = wide(length), wide(heads), wide(d_key), wide(d_value)
    blocks = tl.cdiv(d_value, VALUES)
    item = tl.program_id(0) // blocks  # sequence and head
    e = tl.program_id(0) % blocks * VALUES + tl.arange(0, VALUES)
    d = tl.arange(0, KEYS)
    real = (d < d_key)[:, None] & (e < d_value)[None, :]
    entry = d[:, None] * d_value + e[None, :]
    at = (item // heads) * length * heads + item % heads
    S = tl.zeros([KEYS, VALUES], X.dtype.element_ty)
    for step in range(length):
        row = at + (length - 1 - step if REVERSE else step) * heads
        key = tl.load(k + row * d_key + d, d < d_key, 0.0)
        seen = tl.sum(key[:, None] * S, 0)
        S = S - (tl.load(beta + row) * key)[:, None] * seen[None, :]
        place = row * d_key * d_value + entry
        S = tl.load(decay + row) * S + tl.load(X + place, real, 0.0)
        tl.store(out + place, S, real)
