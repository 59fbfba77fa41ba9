"""The delta rule and the gated delta rule: the stepwise reference, the chunked WY form, Φ, the states.

Layouts are [batch, pos, head, …]. The papers write the state as values × keys, S_t q_t; here, as in SSD
and in fla, it is stored transposed, S: [d_key, d_value], so that a read is qᵀS and a write is k uᵀ.
The caller normalizes the keys and brings β and the gate into their range; β may reach 2.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from circuitscope.devices import widest
from circuitscope.kernels.backends import FLA_DELTA, FLA_GATED_DELTA, TRITON_DELTA_STATES
from circuitscope.kernels.once import differentiable_once
from circuitscope.kernels.running_sum import running_sum
from circuitscope.kernels.ssd import segment_decay, split_chunks


def delta_rule_reference(
    q: Float[Tensor, "batch pos head d_key"],
    k: Float[Tensor, "batch pos head d_key"],
    v: Float[Tensor, "batch pos head d_value"],
    beta: Float[Tensor, "batch pos head"],
    g: Float[Tensor, "batch pos head"] | None = None,
    scale: float | None = None,
    initial: Float[Tensor, "batch head d_key d_value"] | None = None,
) -> Float[Tensor, "batch pos head d_value"]:
    """The recurrence as it is written, one position after another:

    S ← e^{g_t} S_{t−1},    S_t = (I − β_t k_t k_tᵀ) S + β_t k_t v_tᵀ,    o_t = scale · q_tᵀ S_t.
    """
    return delta_rule_steps(q, k, v, beta, g, scale, initial)[0]


def delta_rule_steps(
    q: Float[Tensor, "batch pos head d_key"],
    k: Float[Tensor, "batch pos head d_key"],
    v: Float[Tensor, "batch pos head d_value"],
    beta: Float[Tensor, "batch pos head"],
    g: Float[Tensor, "batch pos head"] | None = None,
    scale: float | None = None,
    initial: Float[Tensor, "batch head d_key d_value"] | None = None,
) -> tuple[Float[Tensor, "batch pos head d_value"], Float[Tensor, "batch head d_key d_value"]]:
    """The reference's o, and S after the last position."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    S = _no_state(k, v) if initial is None else initial
    out = []
    for t in range(q.shape[1]):
        if g is not None:
            S = g[:, t].exp()[..., None, None] * S
        seen = (k[:, t, :, :, None] * S).sum(2)
        change = beta[:, t, :, None] * (v[:, t] - seen)
        S = S + k[:, t, :, :, None] * change[:, :, None]
        out.append(scale * (q[:, t, :, :, None] * S).sum(2))
    return torch.stack(out, 1) if out else torch.zeros_like(v), S


def delta_rule(
    q: Float[Tensor, "batch pos head d_key"],
    k: Float[Tensor, "batch pos head d_key"],
    v: Float[Tensor, "batch pos head d_value"],
    beta: Float[Tensor, "batch pos head"],
    g: Float[Tensor, "batch pos head"] | None = None,
    scale: float | None = None,
    initial: Float[Tensor, "batch head d_key d_value"] | None = None,
    chunk: int = 64,
) -> Float[Tensor, "batch pos head d_value"]:
    """S ← e^{g_t} S; S_t = (I − β_t k_t k_tᵀ) S + β_t k_t v_tᵀ; o_t = scale · q_tᵀ S_t, scale d_key^−½ by default.

    g is a log decay, at most 0; without it this is the plain delta rule. Chunked: with γ_i the decay
    since the chunk began and S₀ the state it began with, what each position really writes is U,

    (I + diag β (Γ ⊙ tril(KKᵀ, −1))) U = diag β (V − diag γ K S₀),
    O = scale · (diag γ Q S₀ + (Γ ⊙ tril(QKᵀ)) U),

    one unit-triangular solve per chunk, in float64 inside: near-equal keys with β near 2 make it lose
    2 to 4e-5 in float32. Any length; the last chunk is padded with β = 0. On a GPU in half precision this
    is fla's chunk_delta_rule or chunk_gated_delta_rule, where it serves.
    """
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    fla = FLA_DELTA if g is None else FLA_GATED_DELTA
    if fla.serves(q, d_key=q.shape[-1]):
        return _delta_by_fla(fla, q, k, v, beta, g, scale, initial)
    return _delta_chunked(q, k, v, beta, g, scale, initial, chunk)


def delta_phi(
    q: Float[Tensor, "batch pos head d_key"],
    k: Float[Tensor, "batch pos head d_key"],
    beta: Float[Tensor, "batch pos head"],
    g: Float[Tensor, "batch pos head"] | None = None,
    scale: float | None = None,
) -> Float[Tensor, "batch head dest src"]:
    """Φ = scale · (Γ ⊙ tril(QKᵀ)) · (I + diag β (Γ ⊙ tril(KKᵀ, −1)))⁻¹ · diag β, so that o = Φ v (zero initial state).

    One unit-triangular solve from the right. All of it in float64: Φ is the exact one, rounded once.
    """
    out_dtype = q.dtype
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    wide = widest(q.device)
    q, k = q.transpose(1, 2).to(wide), k.transpose(1, 2).to(wide)
    beta = beta.transpose(1, 2).to(wide)
    keys = k.transpose(-1, -2)
    if g is None:
        reads, overlap = (scale * q @ keys).tril(), (k @ keys).tril(-1)
    else:
        decay = segment_decay(g.transpose(1, 2).to(wide))
        reads, overlap = scale * q @ keys * decay, (k @ keys * decay).tril(-1)
    phi = torch.linalg.solve_triangular(beta[..., None] * overlap, reads, upper=False, left=False, unitriangular=True)
    exact: Tensor = (phi * beta[..., None, :]).tril()
    return exact.to(out_dtype)


def delta_with_state_edit(
    q: Float[Tensor, "batch pos head d_key"],
    k: Float[Tensor, "batch pos head d_key"],
    v: Float[Tensor, "batch pos head d_value"],
    beta: Float[Tensor, "batch pos head"],
    g: Float[Tensor, "batch pos head"] | None,
    edit: Callable[[Tensor], Tensor],
    scale: float | None = None,
    initial: Float[Tensor, "batch head d_key d_value"] | None = None,
) -> Float[Tensor, "batch pos head d_value"]:
    """o when the states pass through `edit`, and what it changes is carried on to later positions.

    All states S of the unedited run are computed, `edit(S)` is called once and gives S'. Its change
    δ_t = S'_t − S_t enters the recurrence at t, and o is read from the states S″ that result:

    S″_t = (I − β_t k_t k_tᵀ) e^{g_t} S″_{t−1} + β_t k_t v_tᵀ + δ_t,    o_t = scale · q_tᵀ S″_t.

    So an edit at one position t gives S″_t = S'_t and is carried on by the transition matrices from there;
    positions before t keep their values bit for bit. Edits at several positions add up: S″_t is S'_t
    *plus* what the earlier ones left, and is therefore not S'_t. `edit` gets a copy and may write into it.
    """
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    S = _scan(k, v, beta, g, initial, None)
    S = _scan(k, v, beta, g, initial, edit(S.clone()) - S)
    out: Tensor = scale * (q[..., None, :] @ S)[..., 0, :]
    return out


def _delta_chunked(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    g: Tensor | None,
    scale: float,
    initial: Tensor | None,
    chunk: int,
) -> Tensor:
    length, out_dtype = q.shape[1], q.dtype
    dtype = torch.promote_types(q.dtype, torch.float32)
    count, size = split_chunks(length, chunk)
    missing = count * size - length
    q, k, v, beta = (part.to(dtype) for part in (q, k, v, beta))
    if missing:
        q, k, v = (F.pad(part, (0, 0, 0, 0, 0, missing)) for part in (q, k, v))
        beta = F.pad(beta, (0, 0, 0, missing))
    if g is not None:
        g = F.pad(g.to(dtype), (0, 0, 0, missing))
    out, S = [], None if initial is None else initial.to(widest(q.device))
    for c in range(count):
        q_c, k_c, v_c, beta_c = (part[:, c * size : (c + 1) * size] for part in (q, k, v, beta))
        g_c = None if g is None else g[:, c * size : (c + 1) * size]
        o, S = _Chunk.apply(q_c, k_c, v_c, beta_c, g_c, S, scale, c + 1 < count)  # type: ignore[no-untyped-call]
        out.append(o)
    return (out[0] if count == 1 else torch.cat(out, 1))[:, :length].to(out_dtype)


class _Chunk(torch.autograd.Function):
    """One chunk: (q, k, v, β, g, S₀) to (O, S₁), where S₁ is computed only on request. Differentiable once.

    With e_i the decay since the chunk began, w_j the decay until it ends (1 without g), P and N the
    decayed overlaps, all per head:

    P = scale · Γ ⊙ tril(QKᵀ),   N = Γ ⊙ tril(KKᵀ, −1),   R = V − e ⊙ K S₀,
    (I + diag β N) U = β ⊙ R,    O = P U + scale · e ⊙ Q S₀,    S₁ = e_last S₀ + (w ⊙ K)ᵀ U.

    The forward is in float64 (products of float32 are cheap beside the passes over memory, and P U
    cancels as badly as the solve does); the backward is in the dtype of q but for its solve.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        beta: Tensor,
        g: Tensor | None,
        S0: Tensor | None,
        scale: float,
        want_state: bool,
    ) -> tuple[Tensor, Tensor | None]:
        batch, size, heads, _ = q.shape
        dtype, wide = q.dtype, widest(q.device)
        V, beta_ = _heads_first(v, wide), _heads_first(beta[..., None], wide)
        QK = torch.cat([_heads_first(q, wide).mul_(scale), _heads_first(k, wide)], 1)  # scale · q above k
        K = QK[:, size:]
        overlaps = QK @ K.transpose(1, 2)
        P, N = overlaps[:, :size], overlaps[:, size:]
        decay = e = w = None
        if g is None:
            P.tril_()
        else:
            log_a = _heads_first(g[..., None], wide)[..., 0]
            decay = segment_decay(log_a)
            e, w = running_sum(log_a).exp_()[..., None], decay[:, -1, :, None]
            P *= decay
            N *= decay
        N.tril_(-1)
        R, seen = V, None
        if S0 is not None:
            S0 = S0.flatten(0, 1)
            seen = QK @ S0
            R = V - (seen[:, size:] if e is None else e * seen[:, size:])
        system = beta_ * N
        U = torch.linalg.solve_triangular(system, beta_ * R, upper=False, unitriangular=True)
        out = P @ U
        if seen is not None:
            out += seen[:, :size] if e is None else e * seen[:, :size]
        S1 = None
        if want_state:
            S1 = (K if w is None else w * K).transpose(1, 2) @ U
            if S0 is not None:
                S1 += S0 if e is None else e[:, -1:] * S0
        kept = (QK, overlaps, beta_, R, U, S0, None if g is None else seen, decay, e, w)
        ctx.save_for_backward(system, *(None if part is None else part.to(dtype) for part in kept))
        ctx.scale = scale
        return _heads_back(out, heads).to(dtype), None if S1 is None else S1.unflatten(0, (batch, heads))

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, d_out: Tensor, d_state: Tensor | None) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        system, QK, overlaps, beta, R, U, S0, seen, decay, e, w = ctx.saved_tensors
        dtype, wide, size, heads = QK.dtype, system.dtype, d_out.shape[1], d_out.shape[2]
        K = QK[:, size:]
        dO = _heads_first(d_out, dtype)
        dS1 = None if d_state is None else d_state.flatten(0, 1).to(dtype)
        dU = overlaps[:, :size].transpose(1, 2) @ dO
        if dS1 is not None:
            dU += (K if w is None else w * K) @ dS1
        X = torch.linalg.solve_triangular(system.transpose(1, 2), dU.to(wide), upper=True, unitriangular=True).to(dtype)
        # Above: gradient of P; below: of N, first without its factor β.
        d_overlaps = torch.cat([dO, -X], 1) @ U.transpose(1, 2)
        dP, dN = d_overlaps[:, :size], d_overlaps[:, size:]
        d_beta = (X * R).sum(-1) + (dN * overlaps[:, size:]).sum(-1)
        dN *= beta
        dR = beta * X
        d_total = None  # gradient of the cumulative sum of g
        if decay is None:
            dP.tril_()
        else:
            E = d_overlaps * overlaps
            E = E[:, :size].tril_(-1) + E[:, size:]
            d_total = E.sum(-1) - E.sum(-2)
            dP *= decay
            dN *= decay
        dN.tril_(-1)
        dQK = d_overlaps @ K
        dQ, dK = dQK[:, :size], dQK[:, size:]
        dK += d_overlaps.transpose(1, 2) @ QK
        dS0 = None
        if S0 is not None:
            d_seen = torch.cat([dO, -dR], 1)
            if d_total is not None:
                by_row = (d_seen * seen).sum(-1).unflatten(1, (2, size)).sum(1)
                d_total += e[..., 0] * by_row
                d_seen *= torch.cat([e, e], 1)
            dQK += d_seen @ S0.transpose(1, 2)
            dS0 = QK.transpose(1, 2) @ d_seen
        if dS1 is not None:
            d_left = U @ dS1.transpose(1, 2)
            if d_total is not None:
                d_left *= w
                by_row = (d_left * K).sum(-1)
                d_total -= by_row
                d_total[:, -1] += by_row.sum(-1)
                if S0 is not None:
                    d_total[:, -1] += e[:, -1, 0] * (S0 * dS1).sum((-1, -2))
            dK += d_left
            if dS0 is not None:
                dS0 += dS1 if e is None else e[:, -1:] * dS1
        d_g = None
        if d_total is not None:
            d_g = _heads_back(running_sum(d_total.flip(-1)).flip(-1)[..., None], heads)[..., 0]
        return (
            _heads_back(dQ, heads) * ctx.scale,
            _heads_back(dK, heads),
            _heads_back(dR, heads),
            _heads_back(d_beta[..., None], heads)[..., 0],
            d_g,
            None if dS0 is None else dS0.to(wide).unflatten(0, (-1, heads)),
            None,
            None,
        )


def _heads_first(part: Tensor, dtype: torch.dtype) -> Tensor:
    """[batch, pos, head, d] to a fresh [batch · head, pos, d]."""
    moved = part.transpose(1, 2)
    return torch.empty(moved.shape, dtype=dtype, device=part.device).copy_(moved).flatten(0, 1)


def _heads_back(part: Tensor, heads: int) -> Tensor:
    """[batch · head, pos, d] to [batch, pos, head, d]."""
    moved: Tensor = part.unflatten(0, (-1, heads)).transpose(1, 2)
    return moved


def _no_state(k: Tensor, v: Tensor) -> Tensor:
    return v.new_zeros(k.shape[0], k.shape[-2], k.shape[-1], v.shape[-1])


def _scan(k: Tensor, v: Tensor, beta: Tensor, g: Tensor | None, initial: Tensor | None, extra: Tensor | None) -> Tensor:
    """S_t = (I − β_t k_t k_tᵀ) e^{g_t} S_{t−1} + β_t k_t v_tᵀ + extra_t at every position, on a GPU by Triton."""
    if TRITON_DELTA_STATES.serves(v, state=k.shape[-1]):
        return _scan_by_triton(k, v, beta, g, initial, extra)
    S = _no_state(k, v) if initial is None else initial
    states = []
    for t in range(k.shape[1]):
        if g is not None:
            S = g[:, t].exp()[..., None, None] * S
        k_t = k[:, t, :, None]
        S = S + k_t.transpose(-1, -2) @ (beta[:, t, :, None, None] * (v[:, t, :, None] - k_t @ S))
        if extra is not None:
            S = S + extra[:, t]
        states.append(S)
    return torch.stack(states, 1) if states else _no_state(k, v)[:, None][:, :0]


def _scan_by_triton(
    k: Tensor, v: Tensor, beta: Tensor, g: Tensor | None, initial: Tensor | None, extra: Tensor | None
) -> Tensor:
    """The kernel takes what enters the state as one array; an initial state enters at a position of its own."""
    wide = torch.promote_types(v.dtype, torch.float32)
    k, beta = k.to(wide), beta.to(wide)
    decay = torch.ones_like(beta) if g is None else g.to(wide).exp()
    X = (beta[..., None] * k)[..., None] * v.to(wide)[..., None, :]
    X = X if extra is None else X + extra.to(wide)
    if initial is not None:
        X = torch.cat([initial.to(wide)[:, None], X], 1)
        k, beta, decay = (torch.cat([torch.zeros_like(part[:, :1]), part], 1) for part in (k, beta, decay))
    S: Tensor = TRITON_DELTA_STATES(k, beta, decay, X)
    return (S if initial is None else S[:, 1:]).to(v.dtype)


def _delta_by_fla(
    kernel: Any,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    g: Tensor | None,
    scale: float,
    initial: Tensor | None,
) -> Tensor:
    """fla has the same layout. Arguments go by keyword, because its functions order g and beta differently."""
    k, v, beta = k.to(q.dtype), v.to(q.dtype), beta.to(q.dtype)
    gate = {} if g is None else {"g": g.to(torch.promote_types(g.dtype, torch.float32))}
    state = None if initial is None else initial.to(torch.promote_types(initial.dtype, torch.float32))
    out, _ = kernel(q=q, k=k, v=v, beta=beta, scale=scale, initial_state=state, output_final_state=False, **gate)
    result: Tensor = out
    return result
