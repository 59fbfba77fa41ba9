"""The interface of every token mixer: z = Φ(x) · v(x), y = Out(z, x), with Φ [batch, unit, dest, src]."""

import math
from typing import Annotated, Any, ClassVar, Protocol, runtime_checkable

from jaxtyping import Float
from pydantic import Field, field_validator
from torch import Tensor, nn

from circuitscope.errors import UserError
from circuitscope.mixers.reading import Reading
from circuitscope.mixers.state import MixerState
from circuitscope.section import Added, DefaultBy, Section

Stream = Float[Tensor, "batch pos d_model"]


class MixerConfig(Section):
    """A mixer's own options; `name` chooses the mixer.

    By default a stack has learned positions if every mixer is `blind_to_order`, and otherwise none. It starts from
    GPT-2's initialization if every mixer's `default_init` is "gpt2", and otherwise from torch's own.
    """

    blind_to_order: ClassVar[bool] = False
    positions_inside: ClassVar[frozenset[str]] = frozenset()  # positional encodings that the mixer applies itself
    default_init: ClassVar[str] = "native"
    has_mimetic_start: ClassVar[bool] = False  # whether the module has `start_mimetic(max_length)`, for init mimetic
    name: str

    @field_validator("*", mode="after")
    @classmethod
    def _of_a_size_that_can_be_built(cls, value: Any) -> Any:
        if isinstance(value, int) and value > 2**20:
            raise ValueError("expected at most 2^20 = 1,048,576")
        return value

    @property
    def sees_ahead(self) -> int:
        """How many positions after its own an output of the mixer reads; 0 if it is causal."""
        return 0

    @property
    def phi_in_passing(self) -> bool:
        """Whether the reading holds nothing but Φ, and the path through Φ costs about as much as the fused path.

        If so, the mixer also has `reading_from(phi)`, which makes its reading from the Φ that entered `hook_phi`.
        """
        return False


class RotaryConfig(MixerConfig):
    """The option of a mixer that is not blind to order and can still be given rope.

    What it rotates are the two vectors whose product says what a position reads of another: C and B, or q and k. They
    are rotated before the kernel, so Φ and the recurrent state are as exact as without.
    """

    rotary: Annotated[
        bool, Added(3, before=False), DefaultBy("true if positions is rope and no layer is attention, else false")
    ] = Field(
        default=False,
        description="whether rope rotates this layer: C and B of the state-space models, q and k of the delta rules",
    )


@runtime_checkable
class Mixer(Protocol):
    """A mixer has two paths with the same answer: the fused kernel and, when something listens to `hook_phi`, Φ itself.

    A mixer with a Φ has `hook_phi` between `hook_v` and `hook_z`, both [batch, pos, head, d_head], where a "head" is an
    attention head, an SSD head or a channel. `out` is the output projection, the last step of a mixer. `state_size` is
    the number of floats in the recurrent state of a sequence, or None if it grows with the length. A mixer that must
    know its layer or the model's length at the start has `set_depth(layer, n_layers)` or `set_length(max_length)`.
    """

    n_heads: int
    d_head: int
    state_size: int | None
    out: nn.Linear

    def __call__(self, x: Stream) -> Stream: ...

    def start(self, batch: int) -> MixerState:
        """The state before the first position; a mixer that reads later positions has none and says so."""

    def step(self, x: Stream, state: MixerState) -> tuple[Stream, MixerState]:
        """The outputs of one or more positions that follow those of the state, and the state after them.

        It is differentiable in x, in the state and out of the new state. From `start` it gives what the mixer gives.
        """

    def reading(self, x: Stream) -> Reading:
        """The reading of the layer for an input of the mixer, with the hooks that are set now.

        The hooks on the parts of the factors fire, once each: q, k, dt, B, C, beta, decay, gate, conv, the conv's own
        matrix at `hook_phi_conv`, attention's scores and pattern. The hooks around the product do not fire: `hook_v`,
        `hook_phi`, `hook_state`, `hook_z`. So the product of the core factors is what enters `hook_phi`.
        """

    def mixing_flops(self, length: int) -> int:
        """FLOPs of the mixing itself, without the projections: forward, per token."""


@runtime_checkable
class HeadWeights(Protocol):
    """A mixer whose heads are linear maps of the stream with weights of their own, as in attention."""

    n_heads: int
    d_head: int

    @property
    def W_Q(self) -> Float[Tensor, "head d_model d_head"]: ...
    @property
    def W_K(self) -> Float[Tensor, "head d_model d_head"]: ...
    @property
    def W_V(self) -> Float[Tensor, "head d_model d_head"]: ...
    @property
    def W_O(self) -> Float[Tensor, "head d_head d_model"]: ...


def check_divides(name: str, value: int, what: str, whole: int, instead: str = "") -> None:
    """Refuses a size that does not divide another, and names the nearest size that does."""
    if whole % value:
        small = [n for n in range(1, math.isqrt(whole) + 1) if whole % n == 0]
        nearest = min(sorted([*small, *(whole // n for n in small)]), key=lambda n: abs(n - value))
        raise UserError(f"{name} must divide {what}, got {value}; nearest: {nearest}{instead}")
