"""Gated short conv: the layer that alternates with linear attention in the Based stack for MQAR."""

from typing import Annotated, Literal

from pydantic import Field
from torch import Tensor, nn

from circuitscope.hooks import hook
from circuitscope.kernels.short_conv import short_conv, short_conv_phi
from circuitscope.mixers.mixer import MixerConfig, Stream
from circuitscope.mixers.reading import Factor, Reading
from circuitscope.mixers.registry import register
from circuitscope.mixers.state import Carry, MixerState
from circuitscope.mixers.two_paths import Channels, mix
from circuitscope.section import Unit


class GatedConvConfig(MixerConfig):
    """W_o(gate ⊙ conv(v)), gate and v linear in x."""

    name: Literal["gated_conv"] = "gated_conv"
    conv_width: Annotated[int, Unit("taps")] = Field(default=3, ge=1, description="length of the conv")


@register(GatedConvConfig)
class GatedConv(nn.Module):
    """Φ is the conv's banded matrix, one per channel, the same for every input. The gate is part of Out.

    Two forms are published. Zoology's BaseConv for MQAR is (W x + b) ⊙ conv3(x), with a skip of its own, but
    without projections of v and of the output. Based's language models use W_o(gate ⊙ SiLU(conv3(v))) on
    2 d_model channels. This mixer has kernel 3, d_model channels and both projections (with biases), but no
    SiLU, as in the first form. Its conv has no bias, so that z = Φ v is exact.
    """

    d_head = 1

    def __init__(self, config: GatedConvConfig, d_model: int, positions: str):
        super().__init__()
        self.config, self.n_heads = config, d_model
        self.in_proj = nn.Linear(d_model, 2 * d_model)
        self.conv = nn.Conv1d(d_model, d_model, config.conv_width, groups=d_model, bias=False)
        self.out = nn.Linear(d_model, d_model)
        self.hook_gate = hook("batch pos channel")
        self.hook_v, self.hook_z = (hook("batch pos channel d_head") for _ in "vz")
        self.hook_phi = hook("batch channel dest src", on_demand=True)
        self.state_size = d_model * (config.conv_width - 1)

    def forward(self, x: Stream) -> Stream:
        gate, v = self._into(x)
        weight = self.conv.weight[:, 0]
        z = mix(
            self,
            v[..., None],
            phi=lambda: short_conv_phi(weight, x.shape[1]).repeat(x.shape[0], 1, 1, 1),
            fused=lambda v: short_conv(v[..., 0], weight)[..., None],
        )
        out: Tensor = self.out(gate * z[..., 0])
        return out

    def start(self, batch: int) -> MixerState:
        """The last inputs of the conv."""
        return MixerState(0, {"conv": self.conv.weight.new_zeros(batch, self.config.conv_width - 1, self.n_heads)})

    def step(self, x: Stream, state: MixerState) -> tuple[Stream, MixerState]:
        """The conv goes on from its last inputs."""
        carry = Carry(self, state)
        gate, v = self._into(x)
        z = carry.convolved(self.hook_v(v[..., None])[..., 0], self.conv.weight[:, 0])
        return self.out(gate * self.hook_z(z[..., None])[..., 0]), carry.after(x.shape[1])

    def reading(self, x: Stream) -> Reading:
        """diag(gate) · Φ_conv."""
        gate, _ = self._into(x)
        weight, length = self.conv.weight[:, 0], x.shape[1]
        n = self.n_heads
        return Reading(
            x.shape,
            factors=(
                Factor("gate", "channel", n, lambda c: gate[..., c].mT, diagonal=True),
                Factor(
                    "conv",
                    "channel",
                    n,
                    lambda c: short_conv_phi(weight[c], length)[None],
                    core=True,
                    reach=self.config.conv_width,
                ),
            ),
            transition="a short conv has no recurrent state: it reads its taps and nothing before them",
        )

    def mixing_flops(self, length: int) -> int:
        """FLOPs of the conv and the gate, forward, per token: for each channel 2 per tap, and 1."""
        return self.n_heads * (2 * self.config.conv_width + 1)

    def _into(self, x: Stream) -> tuple[Channels, Channels]:
        """The gate and the values."""
        gate, v = self.in_proj(x).chunk(2, dim=-1)
        return self.hook_gate(gate), v
