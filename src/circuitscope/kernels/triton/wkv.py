"""RWKV-4's WKV in Triton, forward and backward. The equations and the reference are in kernels.wkv.

A program has a block of channels of one sequence. Its sums are kept at the scale e^m of a running maximum m, so that
every exponential has an argument of at most 0. m = high + low, two numbers with twice the digits of one, so that keys
of ±1000 cost no accuracy. Sums over sequences are left to torch, so the same input gives the same bits.
"""

from typing import Any, no_type_check

import torch
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor

from circuitscope.kernels.triton.launch import block_of, blocks_of, launch, plain, wide

NONE = tl.constexpr(-1e30)  # the running maximum before the first position: below any key, and finite


def wkv(
    w: Float[Tensor, " channel"],
    u: Float[Tensor, " channel"],
    k: Float[Tensor, "batch pos channel"],
    v: Float[Tensor, "batch pos channel"],
) -> Float[Tensor, "batch pos channel"]:
    """y = Φ(w, u, k) v without Φ; all float32 or all float64, none empty. Differentiable once, in every argument."""
    y: Tensor = _WKV.apply(w, u, k, v)  # type: ignore[no-untyped-call]
    return y


class _WKV(torch.autograd.Function):
    """Saves the inputs only; backward walks forward once more and then back.

    With q_t the inverse of y_t's denominator and α, β the gradients of numerator and denominator:

    α_{t−1} = e^{−w} α_t + g_t q_t,   β_{t−1} = e^{−w} β_t − g_t q_t y_t,
    ∂v_t = g_t q_t e^{u+k_t} + e^{k_t} α_t,   ∂k_t = g_t q_t e^{u+k_t} (v_t − y_t) + e^{k_t} (α_t v_t + β_t).

    α and β have a running maximum of their own. ∂w is taken on the way forward, by the derivatives of both sums.
    """

    @staticmethod
    def forward(ctx: Any, w: Tensor, u: Tensor, k: Tensor, v: Tensor) -> Tensor:
        inputs = [plain(tensor) for tensor in (w, u, k, v)]
        batch, length, channels = k.shape
        y = torch.empty_like(inputs[2])
        block = block_of(channels)
        launch(_wkv_forward, batch * blocks_of(channels, block), *(*inputs, y, length, channels), CHANNELS=block)
        ctx.save_for_backward(*inputs)
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        inputs = ctx.saved_tensors
        k = inputs[2]
        batch, length, channels = k.shape
        gk, gv = torch.empty_like(k), torch.empty_like(k)
        gw, gu = (k.new_empty(batch, channels) for _ in range(2))
        scratch = k.new_empty(5, *k.shape)
        block = block_of(channels)
        launch(
            _wkv_backward,
            batch * blocks_of(channels, block),
            *(*inputs, plain(grad), scratch, gw, gu, gk, gv, length, channels, batch),
            CHANNELS=block,
        )
        return gw.sum(0), gu.sum(0), gk, gv


@triton.jit
@no_type_check
def _two_sum(a, b):
    """a + b as a rounded sum and what the rounding left out, exactly (Knuth)."""
    total = a + b
    other = total - a
    return total, (a - (total - other)) + (b - other)


@triton.jit
@no_type_check
def _scales(d):
    """With d = new − old: e^{old − max} and e^{new − max} of the larger of both."""
    e = tl.exp(-tl.abs(d))
    return tl.where(d > 0, e, 1.0), tl.where(d > 0, 1.0, e)


@triton.jit
@no_type_check
def _wkv_forward(w, u, k, v, y, length, channels, CHANNELS: tl.constexpr):
    length, channels = wide(length), wide(channels)
    blocks = tl.cdiv(channels, CHANNELS)
    c = tl.program_id(0) % blocks * CHANNELS + tl.arange(0, CHANNELS)
    at = tl.program_id(0) // blocks * length * channels
    decay = -tl.load(w + c, c < channels, 0.0)
    bonus = tl.load(u + c, c < channels, 0.0)
    num, den, low = tl.zeros_like(bonus), tl.zeros_like(bonus), tl.zeros_like(bonus)
    high = tl.full([CHANNELS], NONE, bonus.dtype)
    for t in range(length):
        place = at + t * channels + c
        key = tl.load(k + place, c < channels, 0.0)
        value = tl.load(v + place, c < channels, 0.0)
        current, rest = _two_sum(key, bonus)
        past, now = _scales((current - high) + (rest - low))
        tl.store(y + place, (past * num + now * value) / (past * den + now), c < channels)
        high, rest = _two_sum(high, decay)
        low += rest
        d = (key - high) - low
        past, now = _scales(d)
        num, den = past * num + now * value, past * den + now
        high, low = tl.where(d > 0, key, high), tl.where(d > 0, 0.0, low)


@triton.jit
@no_type_check
def _wkv_backward(w, u, k, v, g, scratch, gw, gu, gk, gv, length, channels, batch, CHANNELS: tl.constexpr):
    length, channels, batch = wide(length), wide(channels), wide(batch)
    blocks = tl.cdiv(channels, CHANNELS)
    b = tl.program_id(0) // blocks
    c = tl.program_id(0) % blocks * CHANNELS + tl.arange(0, CHANNELS)
    at = b * length * channels
    size = batch * length * channels
    outs, weights, owns = scratch, scratch + size, scratch + 2 * size
    highs, lows = scratch + 3 * size, scratch + 4 * size
    decay = -tl.load(w + c, c < channels, 0.0)
    bonus = tl.load(u + c, c < channels, 0.0)
    zero = tl.zeros_like(bonus)
    num, den, dnum, dden, low, sum_w, sum_u = zero, zero, zero, zero, zero, zero, zero
    high = tl.full([CHANNELS], NONE, bonus.dtype)
    for t in range(length):
        place = at + t * channels + c
        key = tl.load(k + place, c < channels, 0.0)
        value = tl.load(v + place, c < channels, 0.0)
        current, rest = _two_sum(key, bonus)
        d = (current - high) + (rest - low)
        past, now = _scales(d)
        q = 1.0 / (past * den + now)
        out = (past * num + now * value) * q
        q *= tl.load(g + place, c < channels, 0.0)
        sum_w -= q * past * (dnum - out * dden)
        sum_u += q * now * (value - out)
        tl.store(outs + place, out, c < channels)
        tl.store(weights + place, q, c < channels)
        tl.store(owns + place, q * now, c < channels)
        tl.store(highs + place, tl.where(d > 0, current, high), c < channels)
        tl.store(lows + place, tl.where(d > 0, rest, low), c < channels)
        high, rest = _two_sum(high, decay)
        low += rest
        d = (key - high) - low
        past, now = _scales(d)
        dnum, dden = past * (dnum + num), past * (dden + den)
        num, den = past * num + now * value, past * den + now
        high, low = tl.where(d > 0, key, high), tl.where(d > 0, 0.0, low)
    tl.store(gw + b * channels + c, sum_w, c < channels)
    tl.store(gu + b * channels + c, sum_u, c < channels)
    tl.debug_barrier()  # the way back reads what other threads of this program wrote
    alpha, beta, low = zero, zero, zero
    high = tl.full([CHANNELS], NONE, bonus.dtype)  # the running maximum of α's and β's scale
    for back in range(length):
        place = at + (length - 1 - back) * channels + c
        key = tl.load(k + place, c < channels, 0.0)
        value = tl.load(v + place, c < channels, 0.0)
        out = tl.load(outs + place, c < channels, 0.0)
        q = tl.load(weights + place, c < channels, 0.0)
        own = tl.load(owns + place, c < channels, 0.0)
        e = tl.exp((key + high) + low)
        tl.store(gv + place, own + e * alpha, c < channels)
        tl.store(gk + place, own * (value - out) + e * (alpha * value + beta), c < channels)
        high, rest = _two_sum(high, decay)
        low += rest
        new_high = -tl.load(highs + place, c < channels, 0.0)
        new_low = -tl.load(lows + place, c < channels, 0.0)
        d = (new_high - high) + (new_low - low)
        past, now = _scales(d)
        alpha, beta = past * alpha + now * q, past * beta - now * q * out
        high, low = tl.where(d > 0, new_high, high), tl.where(d > 0, new_low, low)
