"""What every token mixer is: z = Φ(x) · v(x), y = Out(z, x), with Φ [batch, unit, dest, src]."""

from typing import ClassVar, Protocol, runtime_checkable

from jaxtyping import Float
from torch import Tensor, nn

from circuitscope.errors import UserError
from circuitscope.mixers.reading import Reading
from circuitscope.section import Section


class MixerConfig(Section):
    """A mixer's own options; `name` chooses the mixer.

    By default a stack gets learned positions where every mixer is `blind_to_order`, else none; and GPT-2's
    initialization where every mixer's `default_init` is "gpt2", else torch's own.
    """

    blind_to_order: ClassVar[bool] = False
    default_init: ClassVar[str] = "native"
    name: str

    @property
    def phi_in_passing(self) -> bool:
        """Whether Φ is all there is to read, and running through it costs about what the fused path costs.

        Then the mixer also has `reading_from(phi)`, its reading from the Φ that entered `hook_phi`.
        """
        return False

    @property
    def releases_lock(self) -> bool:
        """Whether the mixer spends its time in torch, which lets other Python threads run; Numba's kernels do not."""
        return False


@runtime_checkable
class Mixer(Protocol):
    """Two paths with one answer: fused, or through Φ when `hook_phi` is listened to.

    Where there is a Φ, `hook_phi` stands between `hook_v` and `hook_z`, both [batch, pos, head, d_head]; a "head" is an
    attention head, an SSD head or a channel. `out` is the output projection, the last thing a mixer does; `state_size`
    the floats of recurrent state per sequence, or None where they grow with the length. A mixer whose start depends on
    its place in the stack may have `set_depth(layer, n_layers)` and `set_length(max_length)`.
    """

    n_heads: int
    d_head: int
    state_size: int | None
    out: nn.Linear

    def __call__(self, x: Float[Tensor, "batch pos d_model"]) -> Float[Tensor, "batch pos d_model"]: ...

    def reading(self, x: Float[Tensor, "batch pos d_model"]) -> Reading:
        """What the layer offers for an input of the mixer, as the hooked mixer uses it.

        Hooks on what factors are made of act, once each: q, k, dt, B, C, beta, decay, gate, conv, the conv's own
        matrix at `hook_phi_conv`, attention's scores and pattern. The hooks around the product do not fire: `hook_v`,
        `hook_phi`, `hook_state`, `hook_z`. So the product of the core is what enters `hook_phi`.
        """
        ...

    def mixing_flops(self, length: int) -> int:
        """FLOPs of the mixing itself, without the projections: forward, per token."""
        ...


def check_divides(name: str, value: int, what: str, whole: int, instead: str = "") -> None:
    """Refuses a size that does not divide another, and names the nearest that does."""
    if whole % value:
        nearest = min((n for n in range(1, whole + 1) if whole % n == 0), key=lambda n: abs(n - value))
        raise UserError(f"{name} must divide {what}, got {value}; nearest: {nearest}{instead}")
