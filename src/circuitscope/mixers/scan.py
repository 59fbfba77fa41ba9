"""State-space models with one matrix a channel: what a mixer needs of one to take either path.

Not here: the parameters of any particular one; they are with the mixer that is named for it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from jaxtyping import Float
from torch import Tensor

from circuitscope.mixers.phi import Heads, Matrix, mix

Channels = Float[Tensor, "batch pos channel"]
States = Float[Tensor, "batch pos channel state"]


@dataclass(frozen=True)
class Scan:
    """z = Φ v for one input of the mixer, three times the same answer.

    phi(part) gives Φ of a slice of the channels, with a batch axis of 1 where it does not depend on the
    input; fused(v) is the kernel; with_states(v, edit) the recurrence with its states passed through `edit`.
    """

    phi: Callable[[slice], Matrix]
    fused: Callable[[Channels], Channels]
    with_states: Callable[[Channels, Callable[[States], States]], Channels]


def mix_channels(mixer: Any, v: Channels, scan: Scan) -> Channels:
    """z from v by the path the mixer's hooks ask for; its heads are channels."""
    batch, length, channels = v.shape

    def phi() -> Matrix:
        # a hook may write into it, so sequences must not share memory
        return scan.phi(slice(0, channels)).expand(batch, channels, length, length).contiguous()

    def fused(v: Heads) -> Heads:
        return scan.fused(v[..., 0])[..., None]

    def with_states(v: Heads, edit: Callable[[Tensor], Tensor]) -> Heads:
        return scan.with_states(v[..., 0], edit)[..., None]

    return mix(mixer, v[..., None], phi=phi, fused=fused, state=with_states)[..., 0]
