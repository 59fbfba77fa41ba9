"""Which token's key a query matched, where attention has a short conv on its keys.

A key of such a layer mixes several tokens, and softmax is not linear in it, so the conv on K cannot be multiplied into
the pattern. What can be said is a reading of both, in shares:

    N_it = Σ_j pattern_ij · s_ijt,    s_ijt = |q_i · k_jt| / Σ_t' |q_i · k_jt'|,

where k_jt is what token t adds to the key k_j through the conv. Row i of N says whose content query i looked for and
found, whereas the pattern says where. Biases belong to no token and are left out.
"""

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from circuitscope.mixers.positions import rotate
from circuitscope.mixers.reading import SLICE_BYTES, Build, slices_of

MATCHED = "matched"  # the name of N in a layer's reading
Heads = Float[Tensor, "batch pos head d_head"]
Stream = Float[Tensor, "batch pos d_model"]
Pattern = Float[Tensor, "batch head dest src"]


def matched_token(pattern: Pattern, q: Heads, parts: dict[int, Heads]) -> Pattern:
    """N of the module's first lines.

    Args:
        parts: by lag, what the token at j − lag adds to the key at j, zero where there is no such token.
    """
    sizes = {lag: torch.einsum("bihd,bjhd->bhij", q, part).abs() for lag, part in parts.items()}
    total = torch.stack(list(sizes.values())).sum(dim=0)
    some = total > 0
    each = pattern / torch.where(some, total, torch.ones_like(total))
    out = torch.where(some, torch.zeros_like(pattern), pattern)  # a key that no token adds to stands for its position
    length = pattern.shape[-1]
    for lag, size in sizes.items():
        weight = each * size
        if lag >= 0:
            out[..., : length - lag] += weight[..., lag:]
        else:
            out[..., -lag:] += weight[..., : length + lag]
    return out


def key_parts(
    x: Stream,
    conv: Build,
    lags: range,
    W_K: Float[Tensor, "head d_model d_head"],
    gate: Stream | None,
    rope: bool,
) -> dict[int, Heads]:
    """By lag, what each token adds to the key so many positions after it: W_K (gate_j ⊙ conv_{j,j−lag} ⊙ x_{j−lag}).

    Args:
        conv: builds the matrices of the conv for slices of its channels; only entries at these lags count.
        gate: σ of the conv's output, where a SiLU follows it; SiLU(pre) = σ(pre) · pre.
        rope: whether keys are rotated.
    """
    batch, length, channels = x.shape
    near = [lag for lag in lags if abs(lag) < length]
    out = {lag: x.new_zeros(batch, length, W_K.shape[0], W_K.shape[2]) for lag in near}
    at_once = max(1, int(SLICE_BYTES // (4 * batch * length**2)))
    for part in slices_of(channels, at_once):
        matrix = conv(part)
        for lag in near:
            tap = matrix.diagonal(-lag, -2, -1).mT  # [one or batch, pos, channel], without the ends that lack a token
            read = x[..., part][:, : length - lag] if lag >= 0 else x[..., part][:, -lag:]
            padded = F.pad(tap * read, (0, 0, max(lag, 0), max(-lag, 0)))
            if gate is not None:
                padded = padded * gate[..., part]
            out[lag] = out[lag] + torch.einsum("bjc,hcd->bjhd", padded, W_K[:, part])
    return {lag: rotate(one) for lag, one in out.items()} if rope else out
