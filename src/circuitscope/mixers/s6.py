"""S6 alone: Mamba's selective scan as a mixer, without the block around it."""

import math
from typing import Annotated, ClassVar, Literal

from pydantic import Field
from torch import Tensor, nn

from circuitscope.hooks import hook
from circuitscope.mixers.mamba import SelectiveSSM, add_selective_hooks, selective, selective_step
from circuitscope.mixers.mixer import RotaryConfig, Stream
from circuitscope.mixers.reading import Reading, State
from circuitscope.mixers.registry import register
from circuitscope.mixers.scan import mix_channels
from circuitscope.mixers.state import Carry, MixerState
from circuitscope.section import DefaultBy, Unit


class S6Config(RotaryConfig):
    """W_o S6(x): one selective scan for each channel of the stream, then the output projection."""

    has_mimetic_start: ClassVar[bool] = True

    name: Literal["s6"] = "s6"
    d_state: Annotated[int, Unit("states per channel")] = Field(default=16, ge=1, description="size N of the state")
    dt_rank: Annotated[int | None, Unit("channels"), DefaultBy("none: d_model / 16, rounded up")] = Field(
        default=None, ge=1, description="rank of the map that gives the step sizes Δ"
    )


@register(S6Config)
class S6(nn.Module):
    """v = x, Φ as in Mamba, y = W_o z. No conv, no SiLU, no gate: Δ, B and C are read from x. Rope as in Mamba."""

    d_head = 1
    state: State

    def __init__(self, config: S6Config, d_model: int, positions: str):
        super().__init__()
        self.n_heads, self.d_state = d_model, config.d_state
        self.ssm = SelectiveSSM(d_model, config.d_state, config.dt_rank or math.ceil(d_model / 16))
        self.out = nn.Linear(d_model, d_model, bias=False)
        add_selective_hooks(self, config.d_state, config.rotary)
        self.hook_v, self.hook_z = (hook("batch pos channel d_head") for _ in "vz")
        self.hook_phi = hook("batch channel dest src", on_demand=True)
        self.hook_state = hook("batch pos channel state", on_demand=True)
        self.state_size = d_model * config.d_state

    def start_mimetic(self, max_length: int) -> None:
        """Starts as linear attention, as Mamba does."""
        self.ssm.start_mimetic(max_length)

    def forward(self, x: Stream) -> Stream:
        out: Tensor = self.out(mix_channels(self, x, selective(self, x)))
        return out

    def start(self, batch: int) -> MixerState:
        """The state h of the scan."""
        return MixerState(0, {"scan": self.ssm.start(batch)})

    def step(self, x: Stream, state: MixerState) -> tuple[Stream, MixerState]:
        """One position after the other from a state."""
        carry = Carry(self, state)
        v = self.hook_v(x[..., None])[..., 0]
        z = self.hook_z(selective_step(self, v, carry)[..., None])[..., 0]
        return self.out(z), carry.after(x.shape[1])

    def reading(self, x: Stream) -> Reading:
        """The scan's matrix alone."""
        scan = selective(self, x)
        return Reading(x.shape, factors=(scan.factor(self.n_heads),), transition=scan.transition, state=self.state)

    def mixing_flops(self, length: int) -> int:
        """FLOPs of the scan, forward, per token: 9 per state and channel."""
        return 9 * self.n_heads * self.d_state
