"""State-space models with one matrix per channel: what a mixer must know of such a model to take either path.

The parameters of a particular model are not here; they are in the file of its mixer.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from jaxtyping import Float
from torch import Tensor

from circuitscope.mixers.reading import Build, Factor, GatedTransition, Matrix, OnEdges, Profile
from circuitscope.mixers.two_paths import Channels, mix

States = Float[Tensor, "batch pos channel state"]


@dataclass(frozen=True)
class ChannelScan:
    """Three ways to compute z = Φ v for one input of the mixer, all with the same answer, and the state transition.

    phi(part) and bare_phi(part) give Φ of a slice of the channels with and without the skip term D; the batch axis is
    1 if Φ does not depend on the input. `profile` and `on_edges` are those of a `Factor`, if it has them.
    fused(v) is the kernel. with_states(v, edit) is the recurrence with its states passed through `edit`.
    """

    phi: Callable[[slice], Matrix]
    bare_phi: Build
    fused: Callable[[Channels], Channels]
    with_states: Callable[[Channels, Callable[[States], States]], Channels]
    transition: GatedTransition
    profile: Callable[[slice], tuple[Profile, Profile]] | None = None
    on_edges: OnEdges | None = None

    def factor(self, channels: int) -> Factor:
        """Its matrix as the core factor "ssm"."""
        return Factor(
            "ssm",
            "channel",
            channels,
            self.phi,
            core=True,
            without_skip=self.bare_phi,
            profile=self.profile,
            on_edges=self.on_edges,
        )


def mix_channels(mixer: Any, v: Channels, scan: ChannelScan) -> Channels:
    """Computes z from v by the path that the mixer's hooks ask for, in a mixer whose heads are channels."""
    batch, length, channels = v.shape
    return mix(
        mixer,
        v[..., None],
        # a hook may write into Φ, so sequences must not share memory
        phi=lambda: scan.phi(slice(0, channels)).expand(batch, channels, length, length).contiguous(),
        fused=lambda v: scan.fused(v[..., 0])[..., None],
        state=lambda v, edit: scan.with_states(v[..., 0], edit)[..., None],
    )[..., 0]
