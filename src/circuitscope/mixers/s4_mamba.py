"""S4-Mamba: Mamba's block with S4D in place of the selective scan."""

from typing import Annotated, Literal

from pydantic import Field

from circuitscope.mixers.mamba import GatedBlock, GatedBlockConfig
from circuitscope.mixers.registry import register
from circuitscope.mixers.s4 import S4D, s4d_flops
from circuitscope.mixers.scan import ChannelScan
from circuitscope.mixers.state import Carry
from circuitscope.mixers.two_paths import Channels
from circuitscope.section import Unit


class S4MambaConfig(GatedBlockConfig):
    """W_o(y ⊙ SiLU(gate)), y a fixed convolution (S4D) of SiLU(conv(W_x x))."""

    name: Literal["s4_mamba"] = "s4_mamba"
    d_state: Annotated[int, Unit("states per channel")] = Field(
        default=16, ge=2, multiple_of=2, description="size N of the state; half are stored, as they come in pairs"
    )


@register(S4MambaConfig)
class S4Mamba(GatedBlock):
    """Φ_ij = K_{i−j} + D δ_ij per channel, the same for every input; Mamba's other factors surround it."""

    ssm: S4D

    def __init__(self, config: S4MambaConfig, d_model: int, positions: str):
        super().__init__(config, d_model, lambda n: S4D(n, config.d_state), config.d_state)
        self.d_state = config.d_state

    def scan(self, v: Channels) -> ChannelScan:
        return self.ssm.scan(v.shape[1])

    def scan_step(self, v: Channels, carry: Carry) -> Channels:
        return self.ssm.step(v, carry)

    def mixing_flops(self, length: int) -> int:
        """FLOPs of the conv and of S4D's recurrence, forward, per token."""
        return self.n_heads * s4d_flops(self.d_state) + self._conv_flops()
