"""What every token mixer is: z = Φ(x) · v(x), y = Out(z, x), with Φ [batch, head, dest, src]."""

from typing import ClassVar, Protocol, runtime_checkable

from jaxtyping import Float
from torch import Tensor, nn

from circuitscope.hooks import HookPoint
from circuitscope.mixers.phi import Factor
from circuitscope.section import Section


class MixerConfig(Section):
    """A mixer's own options; `name` chooses the mixer.

    A mixer that is blind to order `needs_positions`; a stack of only such mixers gets learned positions
    and GPT-2's initialization unless told otherwise, any other stack none and torch's.
    """

    needs_positions: ClassVar[bool] = False
    name: str


@runtime_checkable
class Mixer(Protocol):
    """Two paths with one answer: fused, or through Φ when `hook_phi` is listened to.

    `hook_v` and `hook_z` are [batch, pos, head, d_head]; `hook_phi` stands between them; a "head" is an
    attention head, an SSD head or a channel. `out` is the output projection, the last thing a mixer does.

    on_demand    hooks too large to cache unasked: per-channel Φ, recurrent states
    factor_names factors from left to right, the outermost first
    core         those whose product is the matrix at `hook_phi`
    no_composed  why the factors cannot all be multiplied, or ""
    no_phi       why there is no Φ at all, or ""
    state_size   floats of recurrent state a sequence carries, or None where it grows with the length
    """

    n_heads: int
    d_head: int
    on_demand: ClassVar[tuple[str, ...]]
    factor_names: tuple[str, ...]
    core: tuple[str, ...]
    no_composed: str
    no_phi: str
    state_size: int | None
    out: nn.Linear
    hook_v: HookPoint
    hook_phi: HookPoint
    hook_z: HookPoint

    def __call__(self, x: Float[Tensor, "batch pos d_model"]) -> Float[Tensor, "batch pos d_model"]: ...

    def mixing_flops(self, length: int) -> int:
        """FLOPs of the mixing itself, without the projections, forward, a token."""
        ...

    def factors(self, x: Float[Tensor, "batch pos d_model"]) -> list[Factor]:
        """The factors for an input of the mixer, in the order of `factor_names`, as the hooked mixer uses them.

        Hooks on what factors are made of act, once each: q, k, dt, B, C, beta, decay, gate, conv, the conv's own
        matrix at `hook_phi_conv`, attention's scores and pattern. The hooks around the product do not fire:
        `hook_v`, `hook_phi`, `hook_state`, `hook_z`. So the product of the core is what enters `hook_phi`.
        """
        ...
