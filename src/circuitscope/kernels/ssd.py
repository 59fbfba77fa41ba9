"""SSD, the state-space duality of Mamba2: the stepwise reference, the chunked form, Φ, the states.

Layouts are [batch, pos, head, …]; the state of a head is [state, d_head] with `state` the axis that B
and C share. Heads share B and C in groups: head h reads group h // (heads / groups). The caller
discretizes (Δ > 0) and gives A its sign (A < 0).
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from circuitscope.devices import widened
from circuitscope.kernels.backends import FLA_SSD
from circuitscope.kernels.linear_scan import linear_scan
from circuitscope.kernels.running_sum import running_sum


def ssd_reference(
    x: Float[Tensor, "batch pos head d_head"],
    dt: Float[Tensor, "batch pos head"],
    A: Float[Tensor, " head"],
    B: Float[Tensor, "batch pos group state"],
    C: Float[Tensor, "batch pos group state"],
    D: Float[Tensor, " head"] | None = None,
    initial: Float[Tensor, "batch head state d_head"] | None = None,
) -> Float[Tensor, "batch pos head d_head"]:
    """The recurrence as it is written, one position after another:

    S_t = e^{Δ_t A} S_{t−1} + Δ_t B_t x_tᵀ,    y_t = C_t S_t + D x_t.
    """
    return ssd_steps(x, dt, A, B, C, D, initial)[0]


def ssd_steps(
    x: Float[Tensor, "batch pos head d_head"],
    dt: Float[Tensor, "batch pos head"],
    A: Float[Tensor, " head"],
    B: Float[Tensor, "batch pos group state"],
    C: Float[Tensor, "batch pos group state"],
    D: Float[Tensor, " head"] | None = None,
    initial: Float[Tensor, "batch head state d_head"] | None = None,
) -> tuple[Float[Tensor, "batch pos head d_head"], Float[Tensor, "batch head state d_head"]]:
    """The reference's y, and S after the last position."""
    heads = x.shape[2]
    B, C = _per_head(B, heads), _per_head(C, heads)
    S = x.new_zeros(x.shape[0], heads, B.shape[-1], x.shape[-1]) if initial is None else initial
    y = []
    for t in range(x.shape[1]):
        write = B[:, t, :, :, None] * (dt[:, t, :, None] * x[:, t])[:, :, None]
        S = (dt[:, t] * A).exp()[..., None, None] * S + write
        y.append((C[:, t, :, :, None] * S).sum(2))
    out = torch.stack(y, 1) if y else torch.zeros_like(x)
    return out if D is None else out + D[:, None] * x, S


def ssd(
    x: Float[Tensor, "batch pos head d_head"],
    dt: Float[Tensor, "batch pos head"],
    A: Float[Tensor, " head"],
    B: Float[Tensor, "batch pos group state"],
    C: Float[Tensor, "batch pos group state"],
    D: Float[Tensor, " head"] | None = None,
    initial: Float[Tensor, "batch head state d_head"] | None = None,
    chunk: int = 64,
) -> Float[Tensor, "batch pos head d_head"]:
    """S_t = e^{Δ_t A} S_{t−1} + Δ_t B_t x_tᵀ, y_t = C_t S_t + D x_t, without the states of every position.

    Inside a chunk y = (C Bᵀ ⊙ Γ) diag(Δ) x; from chunk to chunk one state is handed on. Any length; the
    last chunk is padded with Δ = 0. Half precision is computed in float32 and rounded at the end. On a
    GPU in half precision this is fla's chunk_simple_gla, where it serves.
    """
    if FLA_SSD.serves(x, d_head=x.shape[-1], state=B.shape[-1]):
        return _ssd_by_fla(FLA_SSD, x, dt, A, B, C, D, initial)
    return _ssd_chunked(x, dt, A, B, C, D, initial, chunk)


def ssd_phi(
    dt: Float[Tensor, "batch pos head"],
    A: Float[Tensor, " head"],
    B: Float[Tensor, "batch pos group state"],
    C: Float[Tensor, "batch pos group state"],
    D: Float[Tensor, " head"] | None = None,
) -> Float[Tensor, "batch head dest src"]:
    """Φ = (C Bᵀ ⊙ Γ) diag(Δ) + D δ with Γ_ij = exp(Σ_{k=j+1..i} Δ_k A), so that y = Φ x (zero initial state)."""
    heads = dt.shape[-1]
    dtype = torch.promote_types(B.dtype, torch.float32)
    dt = dt.to(dtype)
    scores = C.to(dtype).transpose(1, 2) @ B.to(dtype).permute(0, 2, 3, 1)
    by_head = dt.transpose(1, 2)
    decay = segment_decay(by_head * A.to(dtype)[:, None])
    phi: Tensor = scores.repeat_interleave(heads // B.shape[2], 1) * decay * by_head[:, :, None]
    if D is not None:
        phi = phi + torch.diag_embed(D.to(dtype)[:, None].expand(heads, dt.shape[1]))
    return phi.to(B.dtype)


def ssd_with_state_edit(
    x: Float[Tensor, "batch pos head d_head"],
    dt: Float[Tensor, "batch pos head"],
    A: Float[Tensor, " head"],
    B: Float[Tensor, "batch pos group state"],
    C: Float[Tensor, "batch pos group state"],
    D: Float[Tensor, " head"] | None,
    edit: Callable[[Tensor], Tensor],
    initial: Float[Tensor, "batch head state d_head"] | None = None,
) -> Float[Tensor, "batch pos head d_head"]:
    """y when the states pass through `edit`, and what it changes is carried on to later positions.

    All states S of the unedited run are computed, `edit(S)` is called once and gives S'. Its change
    δ_t = S'_t − S_t enters the recurrence at t, and y is read from the states S″ that result:

    S″_t = e^{Δ_t A} S″_{t−1} + Δ_t B_t x_tᵀ + δ_t,    y_t = C_t S″_t + D x_t.

    So an edit at one position t gives S″_t = S'_t and decays from there; positions before t keep their
    values bit for bit. Edits at several positions add up: S″_t is S'_t *plus* what the earlier ones left,
    and is therefore not S'_t. `edit` gets a copy and may write into it.
    """
    decay, writes = (dt * A).exp()[..., None, None], _writes(x, dt, B)
    S = linear_scan(decay, writes, initial)
    S = linear_scan(decay, writes + (edit(S.clone()) - S), initial)
    y: Tensor = (_per_head(C, x.shape[2])[..., None, :] @ S)[..., 0, :]
    return y if D is None else y + D[:, None] * x


def segment_decay(log_a: Float[Tensor, "... pos"]) -> Float[Tensor, "... dest src"]:
    """Γ_ij = exp(Σ_{k=j+1..i} log_a_k) for i ≥ j, zero above the diagonal; log_a ≤ 0.

    The sums are differences of a cumulative sum taken in float64: in float32 one large step in front
    would cost every later entry its digits. The upper half, which could overflow, never meets exp.
    """
    decay: Tensor = _SegmentDecay.apply(log_a)  # type: ignore[no-untyped-call]
    return decay


class _SegmentDecay(torch.autograd.Function):
    """Backward: with E = grad ⊙ Γ below the diagonal, d log_a_k = Σ_{i≥k>j} E_ij. Differentiable again and again."""

    @staticmethod
    def forward(ctx: Any, log_a: Tensor) -> Tensor:
        total = running_sum(widened(log_a))
        future = torch.ones(2 * total.shape[-1:], dtype=torch.bool, device=total.device).triu_(1)
        decay = torch.sub(total[..., :, None], total[..., None, :]).to(log_a.dtype)
        decay.masked_fill_(future, float("-inf")).exp_()
        ctx.save_for_backward(decay)
        return decay

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        (decay,) = ctx.saved_tensors
        E = grad * decay
        E.diagonal(dim1=-2, dim2=-1).zero_()  # Γ_ii is 1 whatever log_a is
        return running_sum((E.sum(-1) - E.sum(-2)).flip(-1)).flip(-1)


def split_chunks(length: int, chunk: int) -> tuple[int, int]:
    """(number of chunks, their size) of equal chunks of at most `chunk` that cover `length` with the least padding."""
    if chunk < 1:
        raise ValueError(f"chunk must be at least 1, got {chunk}")
    count = max(1, -(-length // chunk))
    return count, max(1, -(-length // count))


def _ssd_chunked(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None, initial: Tensor | None, chunk: int
) -> Tensor:
    batch, length, heads, d_head = x.shape
    groups, state = B.shape[2:]
    if heads % groups:
        raise ValueError(f"{heads} heads cannot share {groups} groups of B and C evenly")
    out_dtype = x.dtype
    dtype = torch.promote_types(x.dtype, torch.float32)
    x, dt, A, B, C = (part.to(dtype) for part in (x, dt, A, B, C))
    count, size = split_chunks(length, chunk)
    u, log_a, B, C = (_cut(part, count, size) for part in (dt[..., None] * x, dt * A, B, C))

    # Below: n chunk, g group, k head of the group, i and j positions in the chunk, s state, p d_head.
    each = heads // groups
    log_a = log_a.movedim(2, -1)  # b n h i
    B, C = B.transpose(2, 3), C.transpose(2, 3)  # b n g i s
    scores = (C @ B.transpose(-1, -2))[:, :, :, None]  # b n g 1 i j
    decay = segment_decay(log_a).unflatten(2, (groups, each))  # b n g k i j
    by_head = u.transpose(2, 3)
    y = ((scores * decay).flatten(2, 3) @ by_head).transpose(2, 3)  # b n i h p

    if count > 1 or initial is not None:
        total = running_sum(log_a)
        # What each chunk adds to the state by its end; heads of a group side by side, one product.
        to_end = decay[..., -1, :].movedim(-1, 2).reshape(batch, count, size, heads, 1)
        side_by_side = (to_end * u).unflatten(3, (groups, each)).transpose(2, 3).flatten(4)  # b n g j kp
        added = B.transpose(-1, -2) @ side_by_side  # b n g s kp
        whole = total[..., -1].exp().unflatten(2, (groups, each))[..., None, :, None]  # b n g 1 k 1
        S = (
            added.new_zeros(batch, groups, state, each * d_head)
            if initial is None
            else _by_group(initial.to(dtype), groups)
        )
        before = [S]
        for c in range(count - 1):
            S = (whole[:, c] * S.unflatten(-1, (each, d_head))).flatten(-2) + added[:, c]
            before.append(S)
        carried = C @ torch.stack(before, 1)  # b n g i kp
        carried = carried.unflatten(-1, (each, d_head)).transpose(2, 3).flatten(3, 4)  # b n i h p
        y = y + total.exp().transpose(2, 3)[..., None] * carried

    y = y.flatten(1, 2)[:, :length]
    return (y if D is None else torch.addcmul(y, D.to(dtype)[:, None], x)).to(out_dtype)


def _cut(part: Tensor, count: int, size: int) -> Tensor:
    """[batch, pos, …] to [batch, chunk, size, …], with zeros after the end."""
    missing = count * size - part.shape[1]
    if missing:
        part = F.pad(part, (0, 0) * (part.ndim - 2) + (0, missing))
    chunks: Tensor = part.unflatten(1, (count, size))
    return chunks


def _by_group(S: Tensor, groups: int) -> Tensor:
    """[batch, head, state, d_head] to [batch, group, state, heads of the group side by side]."""
    grouped: Tensor = S.unflatten(1, (groups, -1)).transpose(2, 3).flatten(3)
    return grouped


def _per_head(part: Tensor, heads: int) -> Tensor:
    """B or C with one copy for each head of its group."""
    if heads % part.shape[2]:
        raise ValueError(f"{heads} heads cannot share {part.shape[2]} groups of B and C evenly")
    return part.repeat_interleave(heads // part.shape[2], 2)


def _writes(x: Tensor, dt: Tensor, B: Tensor) -> Tensor:
    """Δ_t B_t x_tᵀ for every position and head."""
    return _per_head(B, x.shape[2])[..., None] * (dt[..., None] * x)[..., None, :]


def _ssd_by_fla(
    kernel: Any, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None, initial: Tensor | None
) -> Tensor:
    """SSD is gated linear attention with q = C, k = B, v = Δ x, log decay Δ A and scale 1."""
    heads = x.shape[2]
    dt = dt.to(torch.promote_types(dt.dtype, torch.float32))
    y, _ = kernel(
        q=_per_head(C, heads).to(x.dtype),
        k=_per_head(B, heads).to(x.dtype),
        v=(dt[..., None] * x).to(x.dtype),
        g=dt * A,
        scale=1.0,
        initial_state=None if initial is None else initial.to(dt.dtype),
        output_final_state=False,
    )
    out: Tensor = y if D is None else y + (D[:, None] * x).to(x.dtype)
    return out
