"""Kernels whose gradient cannot be differentiated again: they say so, instead of leaving their part out.

torch's own mark for this, once_differentiable, puts an error at the end of a second backward pass. A call of
torch.autograd.grad never gets there, because that end is none of the tensors it was asked for: it returns without what
the kernel adds. So the mark here refuses the first backward pass if that is asked to build a graph.
"""

from collections.abc import Callable
from functools import wraps
from typing import Concatenate, ParamSpec, TypeVar

import torch

from circuitscope.errors import UserError

Context = TypeVar("Context")
P = ParamSpec("P")
T = TypeVar("T")


def differentiable_once(
    backward: Callable[Concatenate[Context, P], T],
) -> Callable[Concatenate[Context, P], T]:
    """Marks the backward pass of a torch.autograd.Function that itself has no gradient."""

    @wraps(backward)
    def checked(ctx: Context, /, *args: P.args, **kwargs: P.kwargs) -> T:
        if torch.is_grad_enabled():  # in a backward pass, exactly with create_graph=True
            raise UserError(
                "create_graph=True goes through a kernel that can be differentiated only once; for products with the"
                " Hessian use circuitscope.analysis.curvature.hessian_product, which is right for every mixer"
            )
        return backward(ctx, *args, **kwargs)

    return checked
