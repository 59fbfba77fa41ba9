"""Hook points: named places where an activation is read and edited, each with the names of its axes.

This module loads without TransformerLens, which comes in when the first point is made: a config can be checked
without it. What needs TransformerLens itself is in `lens`.
"""

from typing import TYPE_CHECKING

from torch import nn

if TYPE_CHECKING:
    from circuitscope.lens import HookPoint


def hook(axes: str, *, on_demand: bool = False) -> "HookPoint":
    """A hook point for activations with these axes, for example "batch pos head d_head".

    Args:
        on_demand: the activation is large and is made only where it is asked for by name: a Φ per channel, a state.
    """
    from circuitscope.lens import HookPoint

    point = HookPoint()
    point.axes, point.on_demand = tuple(axes.split()), on_demand  # type: ignore[assignment]
    return point


def wanted(*points: nn.Module) -> bool:
    """Whether anything listens at one of these points: a hook, a cache, or torch's own hooks."""
    return any(p._forward_hooks or p._forward_pre_hooks or p._backward_hooks or p._backward_pre_hooks for p in points)
