"""S6 alone: Mamba's selective scan as a mixer, without the block around it."""

import math
from typing import ClassVar, Literal

from jaxtyping import Float
from pydantic import Field
from torch import Tensor, nn

from circuitscope.hooks import HookPoint
from circuitscope.mixers.mamba import SelectiveSSM, selective
from circuitscope.mixers.mixer import MixerConfig
from circuitscope.mixers.phi import Factor
from circuitscope.mixers.scan import mix_channels


class S6Config(MixerConfig):
    """W_o S6(x): one selective scan for each channel of the stream, then the output projection."""

    name: Literal["s6"] = "s6"
    d_state: int = Field(default=16, ge=1, description="states N of a channel")
    dt_rank: int | None = Field(default=None, ge=1, description="rank of the step size; none: d_model / 16, rounded up")


class S6(nn.Module):
    """v = x, Φ as Mamba's, y = W_o z. No conv, no SiLU, no gate: Δ, B and C are read from x itself."""

    on_demand: ClassVar[tuple[str, ...]] = ("hook_phi", "hook_state")
    factor_names = core = ("ssm",)
    no_composed = no_phi = ""
    d_head = 1

    def __init__(self, config: S6Config, d_model: int, positions: str):
        super().__init__()
        self.n_heads, self.d_state = d_model, config.d_state
        self.ssm = SelectiveSSM(d_model, config.d_state, config.dt_rank or math.ceil(d_model / 16))
        self.out = nn.Linear(d_model, d_model, bias=False)
        self.hook_dt, self.hook_B, self.hook_C = HookPoint(), HookPoint(), HookPoint()
        self.hook_v, self.hook_phi, self.hook_state, self.hook_z = (HookPoint() for _ in range(4))
        self.state_size = d_model * config.d_state

    def forward(self, x: Float[Tensor, "batch pos d_model"]) -> Float[Tensor, "batch pos d_model"]:
        out: Tensor = self.out(mix_channels(self, x, selective(self, x)))
        return out

    def factors(self, x: Float[Tensor, "batch pos d_model"]) -> list[Factor]:
        """The scan's matrix alone."""
        return [Factor("ssm", self.n_heads, selective(self, x).phi)]

    def mixing_flops(self, length: int) -> int:
        """Of the scan, forward, a token: 9 a state and channel."""
        return 9 * self.n_heads * self.d_state
