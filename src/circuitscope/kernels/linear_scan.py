"""The states of a linear recurrence at every position, for models whose states are read or edited.

    s_t = a_t ⊙ s_{t−1} + x_t

a and x are real or complex. The reference is the loop over positions; on a GPU Triton computes. Both are differentiable
any number of times. Kernels that need the outputs alone do not come here: they never have all states in memory.
"""

import torch
from jaxtyping import Complex, Float
from torch import Tensor

from circuitscope.kernels.backends import TRITON_LINEAR_STATES
from circuitscope.kernels.opaque import opaque

States = Float[Tensor, "batch pos *axes"] | Complex[Tensor, "batch pos *axes"]
State = Float[Tensor, "batch *axes"] | Complex[Tensor, "batch *axes"]


def linear_scan_reference(a: Tensor, x: States, initial: State | None = None) -> States:
    """The equation above, one position after the other."""
    states, s = [], x.new_zeros(x.shape[:1] + x.shape[2:]) if initial is None else initial
    for a_t, x_t in zip(a.unbind(1), x.unbind(1), strict=True):
        s = torch.addcmul(x_t, a_t, s)
        states.append(s)
    return torch.stack(states, dim=1) if states else torch.zeros_like(x)


@opaque
def linear_scan(a: Tensor, x: States, initial: State | None = None) -> States:
    """Every s_t = a_t ⊙ s_{t−1} + x_t; a has as many axes as x, and one that is 1 stands for all entries of x's.

    Its position axis is as long as that of x. initial is the state before the first position, 0 by default. Half
    precision on a GPU is computed in float32 and returned in its own dtype.
    """
    if not TRITON_LINEAR_STATES.serves(x):
        return linear_scan_reference(a, x, initial)
    wide = torch.promote_types(torch.promote_types(a.dtype, x.dtype), torch.float32)
    a_, x_ = a.to(wide).expand_as(x), x.to(wide)
    if initial is not None:  # a first position that is left out of the result
        a_, x_ = torch.cat([a_[:, :1], a_], 1), torch.cat([initial.to(wide)[:, None], x_], 1)
    s: Tensor = TRITON_LINEAR_STATES(a_.flatten(2), x_.flatten(2)).view(x_.shape)
    return (s if initial is None else s[:, 1:]).to(x.dtype)
