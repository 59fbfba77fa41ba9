"""Running sums that have the same bits each time, also on a GPU.

torch.cumsum adds in no fixed order on CUDA, and raises an error where only deterministic kernels may serve. There the
sum is made by doubling: after a step with the shift s, each entry holds the sum of the last 2 s entries up to it. That
takes log₂ of the length many steps, and each of them adds in a fixed order.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from circuitscope.kernels.backends import only_deterministic


def running_sum(x: Float[Tensor, "... pos"]) -> Float[Tensor, "... pos"]:
    """Σ_{k≤i} x_k for every i."""
    return running_sum_by_doubling(x) if x.device.type != "cpu" and only_deterministic() else x.cumsum(-1)


def running_sum_by_doubling(x: Float[Tensor, "... pos"]) -> Float[Tensor, "... pos"]:
    """The same, with a fixed order of all additions. Differentiable any number of times."""
    x, shift = x.clone(), 1
    while shift < x.shape[-1]:
        x = torch.cat([x[..., :shift], x[..., shift:] + x[..., :-shift]], -1)
        shift *= 2
    return x
