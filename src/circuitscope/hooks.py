"""Hook points: named places where an activation can be read and edited, each with the names of its axes.

TransformerLens loads when the first point is made, and not with this module, so that a config can be checked without
it. Code that needs TransformerLens itself is in `lens`.
"""

from typing import TYPE_CHECKING

from torch import nn

if TYPE_CHECKING:
    from circuitscope.lens import HookPoint


def hook(axes: str, *, on_demand: bool = False) -> "HookPoint":
    """A hook point for activations with these axes, for example "batch pos head d_head".

    Args:
        on_demand: the activation is large (a Φ per channel, a state) and is made only if someone asks for it by name.
    """
    from circuitscope.lens import HookPoint

    point = HookPoint()
    point.axes, point.on_demand = tuple(axes.split()), on_demand  # type: ignore[assignment]
    return point


def wanted(*points: nn.Module) -> bool:
    """Whether anything listens at one of these points: a hook, a cache, or torch's own hooks."""
    return any(p._forward_hooks or p._forward_pre_hooks or p._backward_hooks or p._backward_pre_hooks for p in points)
