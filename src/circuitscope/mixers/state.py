"""The recurrent state of a mixer: what it keeps of the positions before, so that a sequence can go on from there."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor, nn

from circuitscope.errors import UserError
from circuitscope.hooks import wanted
from circuitscope.kernels.short_conv import short_conv_steps


@dataclass(frozen=True)
class MixerState:
    """How many positions a mixer has read, and, by name, the tensors [batch, …] that stand for them.

    A finite state has as many numbers as the mixer's `state_size` says, a complex one counting twice. Where there is no
    finite state, parts grow with the positions: attention's keys and values, the history of Hyena's inputs.
    """

    position: int
    parts: Mapping[str, Tensor]

    def map(self, function: Callable[[Tensor], Tensor]) -> "MixerState":
        """The state with a function applied to every part, for example `torch.Tensor.detach`."""
        return MixerState(self.position, {name: function(part) for name, part in self.parts.items()})


class Carry:
    """A state on its way through a step: `carry[name]` reads the old part, an assignment sets the new one.

    Args:
        mixer: the mixer that takes the step. Its hooks on matrices over positions and on the states of all positions
            cannot act on a step, which has neither, so a listener there is refused.
    """

    def __init__(self, mixer: nn.Module, state: MixerState):
        for name, point in mixer.named_children():
            axes = getattr(point, "axes", ())
            if ("src" in axes or getattr(point, "on_demand", False)) and wanted(point):
                raise UserError(
                    f"{name} cannot act on a recurrent step, which builds no matrix over positions and no list of"
                    " states; remove the hook, or run the whole sequence without a state"
                )
        self.position = state.position
        self._old, self._new = state.parts, dict[str, Tensor]()

    def __getitem__(self, name: str) -> Tensor:
        return self._old[name]

    def __setitem__(self, name: str, part: Tensor) -> None:
        self._new[name] = part

    def convolved(
        self,
        u: Float[Tensor, "batch pos channel"],
        weight: Float[Tensor, "channel tap"],
        bias: Float[Tensor, " channel"] | None = None,
    ) -> Float[Tensor, "batch pos channel"]:
        """The causal short conv of what goes on; the part "conv" keeps the inputs that later positions read."""
        y, self["conv"] = short_conv_steps(u, weight, bias, self["conv"])
        return y

    def after(self, positions: int) -> MixerState:
        """The state after so many more positions."""
        return MixerState(self.position + positions, self._new)


def first_position(carry: Carry | None) -> int:
    """The position at which an input begins: 0 without a state."""
    return 0 if carry is None else carry.position
