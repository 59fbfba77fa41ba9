"""RWKV-4's weighted average over the past: torch reference, kernels in Numba and Triton, matrix Φ, states.

    y_i = Σ_{j≤i} Φ_ij v_j,   Φ_ij ∝ e^{k_j − (i−1−j) w} for j < i,   Φ_ii ∝ e^{u + k_i},   rows sum to 1.

As a recurrence, with the state after position t kept at the scale e^{m_t}, m_t = max(m_{t−1} − w, k_t):

    num_t = e^{m_{t−1} − w − m_t} num_{t−1} + e^{k_t − m_t} v_t,        den_t likewise with 1 in place of v_t,
    y_t = (e^{m_{t−1}} num_{t−1} + e^{u + k_t} v_t) / (e^{m_{t−1}} den_{t−1} + e^{u + k_t}).

Every exponential taken has an argument ≤ 0, so nothing overflows, and exponents are subtracted with more digits than
float32 has, so k of ±1000 costs no accuracy. w = e^{time_decay} > 0 is given as it stands here; the mixer
does the token shift before and applies the factor σ(r) after. The fast path is differentiable once, wkv_phi and the
torch path any number of times.
"""

from collections.abc import Callable
from typing import Any

import llvmlite.ir as ir  # type: ignore[import-untyped]
import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float
from numba import prange
from torch import Tensor

from circuitscope.devices import widened, widest
from circuitscope.kernels.backends import NUMBA, TRITON_WKV, at_least_float32, first_that_serves
from circuitscope.kernels.linear_scan import linear_scan
from circuitscope.kernels.numba_simd import (
    LANES,
    exp2,
    instructions,
    kernel,
    load,
    magnitude,
    pad_last,
    splat,
    store,
    task,
    vector,
)
from circuitscope.kernels.once import differentiable_once
from circuitscope.kernels.opaque import opaque

_LOG2_E = np.float32(1.4426950408889634)
_NONE = -1e30  # the running maximum before the first position: below any k, and finite
_BLOCK = 64  # channels per task

# -- reference ------------------------------------------------------------------------------------------


def wkv_reference(
    w: Float[Tensor, " channel"],
    u: Float[Tensor, " channel"],
    k: Float[Tensor, "batch pos channel"],
    v: Float[Tensor, "batch pos channel"],
) -> Float[Tensor, "batch pos channel"]:
    """The equations above, in torch, one position after the other."""
    scale = _running_maximum(w, k).detach()
    return _read_out(_states(w, k, v, scale), scale, u, k, v)


def wkv_start(batch: int, channels: int, like: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(num, den, max) before the first position, each [batch, channel]; max is in float64 where the device has it."""
    empty = like.new_zeros(batch, channels)
    return empty, empty, torch.full_like(empty, _NONE, dtype=widened(like).dtype)


def wkv_steps(
    w: Float[Tensor, " channel"],
    u: Float[Tensor, " channel"],
    k: Float[Tensor, "batch pos channel"],
    v: Float[Tensor, "batch pos channel"],
    num: Float[Tensor, "batch channel"],
    den: Float[Tensor, "batch channel"],
    top: Float[Tensor, "batch channel"],
) -> tuple[Float[Tensor, "batch pos channel"], tuple[Tensor, Tensor, Tensor]]:
    """The recurrence above, one position after the other: y, and (num, den, max) after the last position.

    The state that is given stands for the numerator num · e^top and the denominator den · e^top.
    """
    y, w, u = [], widened(w), widened(u)
    for k_t, v_t in zip(widened(k).unbind(1), v.unbind(1), strict=True):
        scale = torch.maximum(top, u + k_t)
        past, now = (top - scale).exp().to(v.dtype), (u + k_t - scale).exp().to(v.dtype)
        y.append((past * num + now * v_t) / (past * den + now))
        before, top = top, torch.maximum(top - w, k_t)
        keep, add = (before - w - top).exp().to(v.dtype), (k_t - top).exp().to(v.dtype)
        num, den = keep * num + add * v_t, keep * den + add
    return torch.stack(y, 1) if y else torch.zeros_like(v), (num, den, top)


def wkv_with_state_edit(
    w: Float[Tensor, " channel"],
    u: Float[Tensor, " channel"],
    k: Float[Tensor, "batch pos channel"],
    v: Float[Tensor, "batch pos channel"],
    edit: Callable[[Float[Tensor, "batch pos channel 3"]], Float[Tensor, "batch pos channel 3"]],
) -> Float[Tensor, "batch pos channel"]:
    """y after `edit` was called once with a copy of all states as triples (num, den, max).

    A triple stands for the numerator num · e^max and the denominator den · e^max; another sequence's triple can be
    written as it is. What an edit changes in them at t, δ_t, is added to the state at t and carried on:
    s'_t = e^{−w} s'_{t−1} + (new input) + δ_t. y_t reads the state before t, so an edit at t shows from t + 1 on. Edits
    at several positions add up, since `edit` saw the unedited states. den ≥ 1 in every unedited state (the largest
    weight counts 1); an edit that makes den zero or negative gets the quotient it asked for. To erase the past up to
    t, write zeros.
    """
    maximum = _running_maximum(w, k)
    states = _states(w, k, v, maximum.detach())
    one = (maximum.detach() - maximum).exp().to(k.dtype)[..., None]  # has the gradient of the states' scale
    shown = torch.cat([states * one, maximum.to(k.dtype)[..., None]], dim=-1)
    edited = edit(shown.clone())
    written = maximum + widened((edited - shown)[..., 2])  # not edited[..., 2]: max has digits that are not shown
    scale = torch.maximum(maximum, _running_maximum(w, written.where(written > maximum, _NONE))).detach()
    new, old = ((m - scale).exp().to(k.dtype)[..., None] for m in (written, maximum))
    delta = new * edited[..., :2] - old * shown[..., :2]
    return _read_out(_states(w, k, v, scale, delta), scale, u, k, v)


def _states(
    w: Float[Tensor, " channel"],
    k: Float[Tensor, "batch pos channel"],
    v: Float[Tensor, "batch pos channel"],
    scale: Float[Tensor, "batch pos channel"],
    added: Float[Tensor, "batch pos channel 2"] | None = None,
) -> Float[Tensor, "batch pos channel 2"]:
    """(num_t, den_t) after every position, at the scale m_t (float64, without gradient), with `added` entering at t."""
    keep, add = _scales(w, k, scale)
    x = torch.stack([add * v, add], dim=-1)
    return linear_scan(keep[..., None], x if added is None else x + added)


def _read_out(
    states: Float[Tensor, "batch pos channel 2"],
    scale: Float[Tensor, "batch pos channel"],
    u: Float[Tensor, " channel"],
    k: Float[Tensor, "batch pos channel"],
    v: Float[Tensor, "batch pos channel"],
) -> Float[Tensor, "batch pos channel"]:
    """y_t from the state before t and the current position's own k and v."""
    m = F.pad(scale, (0, 0, 1, 0), value=_NONE)[:, :-1]
    current = widened(u) + widened(k)
    top = torch.maximum(m, current).detach()
    past, now = (m - top).exp().to(k.dtype), (current - top).exp().to(k.dtype)
    num, den = F.pad(states, (0, 0, 0, 0, 1, 0))[:, :-1].unbind(-1)
    return (past * num + now * v) / (past * den + now)


def _running_maximum(w: Tensor, k: Tensor) -> Tensor:
    """m_t = max(m_{t−1} − w, k_t) in float64: m_t + t w is the running maximum of k_j + j w."""
    age = torch.arange(k.shape[1], dtype=widest(k.device), device=k.device)[:, None] * widened(w)
    return (widened(k) + age).cummax(1).values - age


def _scales(w: Tensor, k: Tensor, m: Tensor) -> tuple[Tensor, Tensor]:
    """e^{m_{t−1} − w − m_t} and e^{k_t − m_t}. The exponents are formed in float64."""
    before = F.pad(m, (0, 0, 1, 0), value=_NONE)[:, :-1]
    # rounding may leave a difference just above 0; its exponential is still 1 to all digits kept
    return (before - widened(w) - m).exp().to(k.dtype), (widened(k) - m).exp().to(k.dtype)


def wkv_phi(
    w: Float[Tensor, " channel"], u: Float[Tensor, " channel"], k: Float[Tensor, "batch pos channel"]
) -> Float[Tensor, "batch channel dest src"]:
    """Φ, one lower-triangular matrix of row-normalized weights per channel; differentiable in w, u and k.

    With p_j = k_j + j w the factor e^{(1−i) w} leaves every row i: its weights are the softmax of p_0, ..., p_{i−1} and
    p_i + u − w. p grows with the length, so it is split into a float of the working precision and the rest; each
    difference to the row's maximum is then right to the last digit that matters.
    """
    length = k.shape[1]
    age = torch.arange(length, dtype=widest(k.device), device=k.device)[:, None]
    past = (widened(k) + age * widened(w)).transpose(1, 2)
    own = past + (widened(u) - widened(w))[:, None]
    before = F.pad(past, (1, 0), value=_NONE)[..., :-1].detach().cummax(-1).values
    top = torch.maximum(before, own.detach())
    future = torch.ones(length, length, dtype=torch.bool, device=k.device).triu()
    high, low = _split(past, k.dtype)
    top_high, top_low = _split(top, k.dtype)
    logits = (high[..., None, :] - top_high[..., :, None]) + (low[..., None, :] - top_low[..., :, None])
    weights = logits.masked_fill(future, float("-inf")).exp() + (own - top).exp().to(k.dtype).diag_embed()
    return weights / weights.sum(-1, keepdim=True)


def _split(x: Float[Tensor, "*shape"], dtype: torch.dtype) -> tuple[Float[Tensor, "*shape"], Float[Tensor, "*shape"]]:
    """x = high + low, both of `dtype`; the gradient goes through low."""
    high = x.detach().to(dtype)
    return high, (x - high).to(dtype)


# -- the fast path --------------------------------------------------------------------------------------


@opaque
def wkv(
    w: Float[Tensor, " channel"],
    u: Float[Tensor, " channel"],
    k: Float[Tensor, "batch pos channel"],
    v: Float[Tensor, "batch pos channel"],
) -> Float[Tensor, "batch pos channel"]:
    """y = Φ(w, u, k) v without Φ: Numba on a CPU up to float32, Triton on a GPU, the torch recurrence elsewhere."""
    channels = k.shape[-1:]
    if k.ndim != 3 or v.shape != k.shape or w.shape != channels or u.shape != channels:
        raise ValueError(
            "k and v are [batch, pos, channel], w and u [channel], not"
            f" {list(k.shape)}, {list(v.shape)}, {list(w.shape)}, {list(u.shape)}"
        )
    backend = first_that_serves((NUMBA, TRITON_WKV), k)
    if backend is None:
        return wkv_reference(w, u, k, v)
    kernel: Callable[..., Any] = _WKV.apply if backend is NUMBA else backend
    keys, values, rates, bonus = at_least_float32(k, v, w, u)
    y: Tensor = kernel(rates, bonus, keys, values)
    return y.to(k.dtype)


class _WKV(torch.autograd.Function):
    """Saves the inputs only; backward steps forward once more. Differentiable once."""

    @staticmethod
    def forward(ctx: Any, w: Tensor, u: Tensor, k: Tensor, v: Tensor) -> Tensor:
        arrays = [pad_last(a) for a in (w, u, k, v)]
        y = torch.empty_like(arrays[2])
        _wkv_forward(*(a.numpy() for a in (*arrays, y)))
        ctx.save_for_backward(*arrays)
        return y[..., : k.shape[-1]]

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # type: ignore[override]
        w, u, k, v = ctx.saved_tensors
        channels = grad.shape[-1]
        gk, gv = torch.empty_like(k), torch.empty_like(v)
        gw, gu = (k.new_empty(k.shape[0], k.shape[2]) for _ in range(2))
        arrays = (w, u, k, v, pad_last(grad), gw, gu, gk, gv)
        _wkv_backward(*(a.numpy() for a in arrays))
        return gw.sum(0)[:channels], gu.sum(0)[:channels], gk[..., :channels], gv[..., :channels]


@instructions
def _quotient(typing_context, a, b):  # type: ignore[no-untyped-def]
    """a / b, lane by lane."""

    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return builder.fdiv(*args)

    return vector(vector, vector), emit


@instructions
def _choose(typing_context, d, a, b):  # type: ignore[no-untyped-def]
    """a where d > 0, else b, lane by lane."""

    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        zero = ir.Constant(args[0].type, [ir.Constant(ir.FloatType(), 0.0)] * LANES)
        return builder.select(builder.fcmp_ordered(">", args[0], zero), args[1], args[2])

    return vector(vector, vector, vector), emit


@task
def _two_sum(a, b):  # type: ignore[no-untyped-def]
    """a + b as a rounded sum and what the rounding left out, exactly (Knuth)."""
    total = a + b
    other = total - a
    return total, (a - (total - other)) + (b - other)


@task
def _forward_channels(b, first, last, w, u, k, v, y):  # type: ignore[no-untyped-def]
    length = k.shape[1]
    zero, one = splat(0.0), splat(1.0)
    for c in range(first, last, LANES):
        decay = zero - load(w, (c,))
        bonus = load(u, (c,))
        num, den = zero, zero
        high, low = splat(_NONE), zero  # the running maximum m = high + low
        for t in range(length):
            key, value = load(k, (b, t, c)), load(v, (b, t, c))
            current, rest = _two_sum(key, bonus)
            d = (current - high) + (rest - low)
            e = exp2(magnitude(d) * -_LOG2_E)
            past, now = _choose(d, e, one), _choose(d, one, e)
            store(y, (b, t, c), _quotient(past * num + now * value, past * den + now))
            high, rest = _two_sum(high, decay)
            low = low + rest
            d = (key - high) - low
            e = exp2(magnitude(d) * -_LOG2_E)
            past, now = _choose(d, e, one), _choose(d, one, e)
            num, den = past * num + now * value, past * den + now
            high, low = _choose(d, key, high), _choose(d, zero, low)


@kernel
def _wkv_forward(w, u, k, v, y):  # type: ignore[no-untyped-def]
    batch, _, channels = k.shape
    blocks = (channels + _BLOCK - 1) // _BLOCK
    for item in prange(batch * blocks):
        first = item % blocks * _BLOCK
        _forward_channels(item // blocks, first, min(first + _BLOCK, channels), w, u, k, v, y)


@task
def _backward_channels(b, first, last, w, u, k, v, g, gw, gu, gk, gv):  # type: ignore[no-untyped-def]
    """Adjoint of the recurrence. With q_t the inverse of y_t's denominator and α, β the gradients of num and den:

    α_{t−1} = e^{−w} α_t + g_t q_t,   β_{t−1} = e^{−w} β_t − g_t q_t y_t,
    ∂v_t = g_t q_t e^{u+k_t} + e^{k_t} α_t,   ∂k_t = g_t q_t e^{u+k_t} (v_t − y_t) + e^{k_t} (α_t v_t + β_t).

    q_t comes at the scale e^{−(y_t's maximum)}, so α and β have a running maximum of their own, and again no argument
    of an exponential is above 0. ∂w is taken forward, by the derivatives of num and den.
    """
    length = k.shape[1]
    zero, one = splat(0.0), splat(1.0)
    ys = np.empty((length, LANES), np.float32)
    gq = np.empty((length, LANES), np.float32)  # g_t q_t
    own = np.empty((length, LANES), np.float32)  # g_t times the weight of t in row t
    top_high = np.empty((length, LANES), np.float32)
    top_low = np.empty((length, LANES), np.float32)
    for c in range(first, last, LANES):
        decay = zero - load(w, (c,))
        bonus = load(u, (c,))
        num, den, dnum, dden = zero, zero, zero, zero
        high, low = splat(_NONE), zero
        sum_w, sum_u = zero, zero
        for t in range(length):
            key, value = load(k, (b, t, c)), load(v, (b, t, c))
            current, rest = _two_sum(key, bonus)
            d = (current - high) + (rest - low)
            e = exp2(magnitude(d) * -_LOG2_E)
            past, now = _choose(d, e, one), _choose(d, one, e)
            q = _quotient(one, past * den + now)
            out = (past * num + now * value) * q
            q = q * load(g, (b, t, c))
            sum_w = sum_w - q * past * (dnum - out * dden)
            sum_u = sum_u + q * now * (value - out)
            store(ys, (t, 0), out)
            store(gq, (t, 0), q)
            store(own, (t, 0), q * now)
            store(top_high, (t, 0), _choose(d, current, high))
            store(top_low, (t, 0), _choose(d, rest, low))
            high, rest = _two_sum(high, decay)
            low = low + rest
            d = (key - high) - low
            e = exp2(magnitude(d) * -_LOG2_E)
            past, now = _choose(d, e, one), _choose(d, one, e)
            dnum, dden = past * (dnum + num), past * (dden + den)
            num, den = past * num + now * value, past * den + now
            high, low = _choose(d, key, high), _choose(d, zero, low)
        store(gw, (b, c), sum_w)
        store(gu, (b, c), sum_u)
        alpha, beta = zero, zero
        high, low = splat(_NONE), zero  # the running maximum of α and β's scale
        for t in range(length - 1, -1, -1):
            key, value, out = load(k, (b, t, c)), load(v, (b, t, c)), load(ys, (t, 0))
            q, direct = load(gq, (t, 0)), load(own, (t, 0))
            e = exp2(((key + high) + low) * _LOG2_E)
            store(gv, (b, t, c), direct + e * alpha)
            store(gk, (b, t, c), direct * (value - out) + e * (alpha * value + beta))
            high, rest = _two_sum(high, decay)
            low = low + rest
            new_high, new_low = zero - load(top_high, (t, 0)), zero - load(top_low, (t, 0))
            d = (new_high - high) + (new_low - low)
            e = exp2(magnitude(d) * -_LOG2_E)
            past, now = _choose(d, e, one), _choose(d, one, e)
            alpha, beta = past * alpha + now * q, past * beta - now * q * out
            high, low = _choose(d, new_high, high), _choose(d, new_low, low)


@kernel
def _wkv_backward(w, u, k, v, g, gw, gu, gk, gv):  # type: ignore[no-untyped-def]
    batch, _, channels = k.shape
    blocks = (channels + _BLOCK - 1) // _BLOCK
    for item in prange(batch * blocks):
        first = item % blocks * _BLOCK
        _backward_channels(item // blocks, first, min(first + _BLOCK, channels), w, u, k, v, g, gw, gu, gk, gv)
