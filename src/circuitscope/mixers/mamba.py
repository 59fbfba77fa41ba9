"""Mamba: a gated block around the selective scan S6. A config can leave out its conv, its SiLU or its gate."""

import math
from collections.abc import Callable
from typing import Annotated, Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float
from pydantic import Field
from torch import Tensor, nn

from circuitscope.hooks import hook, wanted
from circuitscope.kernels.scan_edges import selective_scan_edge_sums
from circuitscope.kernels.selective_scan import (
    selective_scan,
    selective_scan_phi,
    selective_scan_phi_profile,
    selective_scan_steps,
    selective_scan_with_state_edit,
)
from circuitscope.mixers.mixer import MixerConfig, RotaryConfig, Stream
from circuitscope.mixers.positions import check_rotates, rotate
from circuitscope.mixers.reading import Build, Factor, GatedTransition, Profile, Reading, State
from circuitscope.mixers.registry import register
from circuitscope.mixers.scan import ChannelScan, mix_channels
from circuitscope.mixers.state import Carry, MixerState, first_position
from circuitscope.mixers.two_paths import Channels, short_convolve
from circuitscope.section import DefaultBy, Unit

Shared = Float[Tensor, "batch pos state"]


class GatedBlockConfig(MixerConfig):
    """The options of what surrounds the state-space model in Mamba's block."""

    expand: Annotated[int, Unit("times d_model")] = Field(default=2, ge=1, description="channels of the block")
    conv: bool = Field(default=True, description="whether there is a short conv before the scan")
    conv_width: Annotated[int, Unit("taps")] = Field(
        default=4, ge=1, description="length of the short conv; without effect if conv is false"
    )
    activation: bool = Field(
        default=True, description="whether there is a SiLU before the scan, with the conv or without it"
    )
    gate: bool = Field(default=True, description="whether a SiLU gate multiplies the output")


class MambaConfig(GatedBlockConfig, RotaryConfig):
    """W_o(y ⊙ SiLU(gate)), y the selective scan of SiLU(conv(W_x x))."""

    has_mimetic_start: ClassVar[bool] = True

    name: Literal["mamba"] = "mamba"
    d_state: Annotated[int, Unit("states per channel")] = Field(default=16, ge=1, description="size N of the state")
    dt_rank: Annotated[int | None, Unit("channels"), DefaultBy("none: d_model / 16, rounded up")] = Field(
        default=None, ge=1, description="rank of the map that gives the step sizes Δ"
    )


class SelectiveSSM(nn.Module):
    """Step size, input and output matrices of S6, which are read from the values themselves.

    Δ = softplus(W_dt W_low v + b), B = W_B v, C = W_C v; A = −exp(A_log), D per channel.
    """

    def __init__(self, channels: int, d_state: int, dt_rank: int):
        super().__init__()
        self.sizes = (dt_rank, d_state, d_state)
        self.x_proj = nn.Linear(channels, sum(self.sizes), bias=False)
        self.dt_proj = nn.Linear(dt_rank, channels)
        self.A_log = nn.Parameter(torch.arange(1, d_state + 1).float().log().repeat(channels, 1))
        self.D = nn.Parameter(torch.ones(channels))
        self.A_log.no_weight_decay = self.D.no_weight_decay = True  # type: ignore[attr-defined]
        initialize_dt(self.dt_proj)

    @torch.no_grad()
    def start_mimetic(self, max_length: int) -> None:
        """Starts as linear attention whose queries are its keys; see `start_near_identity`."""
        self.dt_proj.weight.zero_()
        start_near_identity(self.A_log, self.dt_proj.bias, max_length)
        _, of_B, of_C = self.x_proj.weight.split(self.sizes)
        of_C.copy_(of_B)

    def forward(self, v: Channels) -> tuple[Channels, Shared, Shared]:
        low, B, C = self.x_proj(v).split(self.sizes, dim=-1)
        return F.softplus(self.dt_proj(low)), B, C

    @property
    def A(self) -> Float[Tensor, "channel state"]:
        return -self.A_log.exp()

    def start(self, batch: int) -> Float[Tensor, "batch channel state"]:
        """h before the first position."""
        return self.A_log.new_zeros(batch, *self.A_log.shape)


def initialize_dt(dt_proj: nn.Linear) -> None:
    """W_dt ~ U(±rank^−½); the bias makes softplus(bias) log-uniform in [1e-3, 1e-1]. Every `init` keeps these."""
    nn.init.uniform_(dt_proj.weight, -(dt_proj.in_features**-0.5), dt_proj.in_features**-0.5)
    with torch.no_grad():
        dt_proj.bias.copy_(dt_bias(dt_proj.out_features))
    dt_proj.own_init = True  # type: ignore[assignment]


MIMETIC_LOSS = 0.1  # of log state, over the longest sequence, at the rate that is fastest


@torch.no_grad()
def start_near_identity(A_log: Tensor, bias: Tensor, max_length: int) -> None:
    """Sets rates and step sizes so that a state hardly decays: Δ = 1, and exp(Δ A max_length) is at least e^−0.1.

    The rates keep their ratios. This is the first half of the mimetic start (Trockman et al. 2024, arXiv 2410.11135):
    with transitions near the identity Φ_ij is about C_i · B_j. The second half, W_C = W_B, then makes a position read
    those that are like it, as attention does whose W_Q is its W_K. The numbers 1 and 0.1 are this package's choice.
    """
    A_log.add_(math.log(MIMETIC_LOSS / max_length) - A_log.max())
    bias.fill_(math.log(math.e - 1))  # softplus of it is 1


def dt_bias(count: int) -> Float[Tensor, " count"]:
    """Inverse softplus of step sizes log-uniform in [1e-3, 1e-1], clamped to at least 1e-4."""
    dt = torch.exp(torch.rand(count) * math.log(100) + math.log(1e-3)).clamp(min=1e-4)
    return dt + torch.log(-torch.expm1(-dt))


def add_selective_hooks(mixer: Any, d_state: int, rotary: bool) -> None:
    """Gives a mixer what `selective` calls: hook_dt, hook_B, hook_C and, with rope, hook_rot_B and hook_rot_C."""
    mixer.hook_dt = hook("batch pos channel")
    mixer.hook_B, mixer.hook_C = (hook("batch pos state") for _ in "BC")
    mixer.rotary = rotary
    mixer.state = State(by="hook_rot_C" if rotary else "hook_C", channels_first=True)
    if rotary:
        check_rotates(d_state, "d_state")
        mixer.hook_rot_B, mixer.hook_rot_C = (hook("batch pos state") for _ in "BC")


def selective(mixer: Any, v: Channels) -> ChannelScan:
    """S6 for these values, from the `ssm` of a mixer with `add_selective_hooks`."""
    dt, B, C = _read(mixer, v)
    A, D = mixer.ssm.A, mixer.ssm.D
    return ChannelScan(
        phi=lambda part: selective_scan_phi(dt[..., part], A[part], B, C, D[part]),
        bare_phi=lambda part: selective_scan_phi(dt[..., part], A[part], B, C),
        fused=lambda v: selective_scan(v, dt, A, B, C, D),
        with_states=lambda v, edit: selective_scan_with_state_edit(v, dt, A, B, C, D, edit),
        transition=GatedTransition(dt, A),
        profile=lambda part: _profile(dt[..., part], A[part], B, C, D[part]),
        on_edges=lambda part, *given: selective_scan_edge_sums(dt[..., part], A[part], B, C, D[part], *given),
    )


def selective_step(mixer: Any, v: Channels, carry: Carry) -> Channels:
    """z of S6 from a state, whose part "scan" is h."""
    dt, B, C = _read(mixer, v, carry)
    z, carry["scan"] = selective_scan_steps(v, dt, mixer.ssm.A, B, C, mixer.ssm.D, carry["scan"])
    return z


def _read(mixer: Any, v: Channels, carry: Carry | None = None) -> tuple[Channels, Shared, Shared]:
    """Δ, B and C, as the scan reads them."""
    dt, B, C = mixer.ssm(v)
    dt, B, C = mixer.hook_dt(dt), mixer.hook_B(B), mixer.hook_C(C)
    if mixer.rotary:
        first = first_position(carry)
        B, C = mixer.hook_rot_B(rotate(B, first)), mixer.hook_rot_C(rotate(C, first))
    return dt, B, C


def _profile(
    dt: Channels,
    A: Float[Tensor, "channel state"],
    B: Shared,
    C: Shared,
    D: Float[Tensor, " channel"],
) -> tuple[Profile, Profile]:
    """The profile of Φ with and without D, which changes only the diagonal: Φ_ii = Δ_i B_i · C_i + D."""
    bare = selective_scan_phi_profile(dt, A, B, C)
    whole = bare.clone()
    whole[..., 0] = (dt * (B * C).sum(-1, keepdim=True) + D).abs().mean(1)
    return whole, bare


class GatedBlock(nn.Module):
    """W_o(z ⊙ SiLU(gate)), z = Φ SiLU(conv(W_x x)). A subclass gives the state-space model, which has a Φ per channel.

    Args:
        ssm: builds the state-space model for a number of channels.
        d_state: floats of state per channel.
    """

    d_head = 1
    state = State()

    def __init__(self, config: GatedBlockConfig, d_model: int, ssm: Callable[[int], Any], d_state: int):
        super().__init__()
        self.config = config
        channels = self.n_heads = config.expand * d_model
        self.in_proj = nn.Linear(d_model, channels * (2 if config.gate else 1), bias=False)
        if config.conv:
            self.conv = nn.Conv1d(channels, channels, config.conv_width, groups=channels)
            self.hook_phi_conv = hook("batch channel dest src", on_demand=True)
            self.hook_conv = hook("batch pos channel")
        self.ssm: Any = ssm(channels)
        self.out = nn.Linear(channels, d_model, bias=False)
        if config.gate:
            self.hook_gate = hook("batch pos channel")
        self.hook_v, self.hook_z = (hook("batch pos channel d_head") for _ in "vz")
        self.hook_phi = hook("batch channel dest src", on_demand=True)
        self.hook_state = hook("batch pos channel state", on_demand=True)
        self.state_size = channels * (d_state + (config.conv_width - 1 if config.conv else 0))

    def scan(self, v: Channels) -> ChannelScan:
        """The state-space model for these values."""
        raise NotImplementedError

    def scan_step(self, v: Channels, carry: Carry) -> Channels:
        """z for values that follow those of a state, whose part "scan" is the model's own."""
        raise NotImplementedError

    def forward(self, x: Stream) -> Stream:
        pre, gate, _ = self._into(x)
        v = F.silu(pre) if self.config.activation else pre
        return self._out(mix_channels(self, v, self.scan(v)), gate)

    def start(self, batch: int) -> MixerState:
        """The state-space model's state, and the last inputs of the conv, if there is one."""
        parts = {"scan": self.ssm.start(batch)}
        if self.config.conv:
            parts["conv"] = self.conv.weight.new_zeros(batch, self.config.conv_width - 1, self.n_heads)
        return MixerState(0, parts)

    def step(self, x: Stream, state: MixerState) -> tuple[Stream, MixerState]:
        """One position after the other from a state."""
        carry = Carry(self, state)
        pre, gate, _ = self._into(x, carry)
        v = self.hook_v((F.silu(pre) if self.config.activation else pre)[..., None])[..., 0]
        z = self.hook_z(self.scan_step(v, carry)[..., None])[..., 0]
        return self._out(z, gate), carry.after(x.shape[1])

    def reading(self, x: Stream) -> Reading:
        """diag(SiLU(gate)) · Φ_ssm · diag(σ(pre)) · Φ_conv; SiLU(pre) = σ(pre) · pre."""
        pre, gate, conv = self._into(x)
        n = self.n_heads
        scan = self.scan(F.silu(pre) if self.config.activation else pre)
        found = [scan.factor(n)]
        if gate is not None:
            found.insert(0, Factor("gate", "channel", n, lambda c: F.silu(gate[..., c]).mT, diagonal=True))
        if self.config.activation:
            found.append(Factor("silu", "channel", n, lambda c: pre[..., c].sigmoid().mT, diagonal=True))
        if conv is not None:
            taps = None if wanted(self.hook_phi_conv) else self.conv.weight[:, 0].flip(1)
            found.append(
                Factor("conv", "channel", n, conv, hook="hook_phi_conv", taps=taps, reach=self.config.conv_width)
            )
        return Reading(x.shape, factors=tuple(found), transition=scan.transition, state=self.state)

    def _out(self, z: Channels, gate: Channels | None) -> Stream:
        out: Tensor = self.out(z if gate is None else z * F.silu(gate))
        return out

    def _conv_flops(self) -> int:
        """FLOPs of the conv, forward, per token: 2 per tap and channel."""
        return 2 * self.n_heads * self.config.conv_width if self.config.conv else 0

    def _into(self, x: Stream, carry: Carry | None = None) -> tuple[Channels, Channels | None, Build | None]:
        """What enters SiLU and the scan, and, if there are any, the gate and the matrix of the conv."""
        u, gate, conv = self.in_proj(x), None, None
        if self.config.gate:
            u, gate = u.chunk(2, dim=-1)
            gate = self.hook_gate(gate)
        if self.config.conv:
            u, conv = short_convolve(self.hook_phi_conv, u, self.conv.weight[:, 0], self.conv.bias, carry=carry)
            u = self.hook_conv(u)
        return u, gate, conv


@register(MambaConfig)
class Mamba(GatedBlock):
    """Φ is the scan's matrix, per channel: Σ_n C_in exp(A_en (S_i − S_j)) Δ_je B_jn + D_e δ_ij.

    With rope, B and C are rotated after `hook_B` and `hook_C`; `hook_rot_B` and `hook_rot_C` hold what the scan reads.
    A rotation turns two states into each other. They decay at different rates here, so Φ_ij depends on i − j and, the
    more the states have decayed, also on i; in Mamba2 and the delta rules it depends on i − j alone.
    """

    ssm: SelectiveSSM

    def __init__(self, config: MambaConfig, d_model: int, positions: str):
        rank = config.dt_rank or math.ceil(d_model / 16)
        super().__init__(config, d_model, lambda n: SelectiveSSM(n, config.d_state, rank), config.d_state)
        self.d_state = config.d_state
        add_selective_hooks(self, config.d_state, config.rotary)

    def start_mimetic(self, max_length: int) -> None:
        """Starts the scan as linear attention; the conv, the gate and the projections around it start as always."""
        self.ssm.start_mimetic(max_length)

    def scan(self, v: Channels) -> ChannelScan:
        return selective(self, v)

    def scan_step(self, v: Channels, carry: Carry) -> Channels:
        return selective_step(self, v, carry)

    def mixing_flops(self, length: int) -> int:
        """FLOPs of the conv and the scan, forward, per token: 9 per state and channel, 2 per tap and channel."""
        return 9 * self.n_heads * self.d_state + self._conv_flops()
