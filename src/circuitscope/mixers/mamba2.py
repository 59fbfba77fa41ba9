"""Mamba2: a gated block around SSD, the state-space model with one decay per head."""

from typing import Annotated, ClassVar, Literal

import torch
import torch.nn.functional as F
from einops import rearrange
from jaxtyping import Float
from pydantic import Field
from torch import Tensor, nn

from circuitscope.hooks import hook
from circuitscope.kernels.ssd import ssd, ssd_phi, ssd_steps, ssd_with_state_edit
from circuitscope.mixers.mamba import dt_bias, start_near_identity
from circuitscope.mixers.mixer import RotaryConfig, Stream, check_divides
from circuitscope.mixers.positions import check_rotates, rotate
from circuitscope.mixers.reading import Build, Factor, GatedTransition, Reading, State
from circuitscope.mixers.registry import register
from circuitscope.mixers.state import Carry, MixerState, first_position
from circuitscope.mixers.two_paths import Channels, Heads, mix, short_convolve_parts
from circuitscope.section import Unit

StepSizes = Float[Tensor, "batch pos head"]
Groups = Float[Tensor, "batch pos group state"]


class Mamba2Config(RotaryConfig):
    """W_o RMSNorm(y ⊙ SiLU(gate)), y the SSD of SiLU(conv(·)) of values, B and C."""

    has_mimetic_start: ClassVar[bool] = True

    name: Literal["mamba2"] = "mamba2"
    d_state: Annotated[int, Unit("states per channel")] = Field(default=128, ge=1, description="size N of the state")
    headdim: Annotated[int, Unit("channels per head")] = Field(
        default=64, ge=1, description="size of a head; must divide expand · d_model"
    )
    n_groups: Annotated[int, Unit("groups")] = Field(
        default=1, ge=1, description="groups of heads that share B and C; must divide the number of heads"
    )
    expand: Annotated[int, Unit("times d_model")] = Field(default=2, ge=1, description="channels of the block")
    conv_width: Annotated[int, Unit("taps")] = Field(default=4, ge=1, description="length of the short conv")
    norm_eps: float = Field(default=1e-5, gt=0, description="epsilon of the norm before the output projection")


@register(Mamba2Config)
class Mamba2(nn.Module):
    """Φ = (C Bᵀ ⊙ Γ) diag(Δ) + D δ per head, Γ_ij = exp(Σ_{k=j+1..i} Δ_k A); y = W_o RMSNorm(z ⊙ SiLU(gate)).

    The gate comes before the norm. The gate is a factor, diag(SiLU(gate)); the norm is not linear and
    belongs to Out. `hook_conv` and `hook_phi_conv` cover the channels of the values. The convs of B and C, which Φ is
    made with, are at `hook_phi_conv_B` and `hook_phi_conv_C`; what they give, after SiLU, is at `hook_B` and `hook_C`.
    `hook_dt` is Δ, after its softplus. The norm is over all channels, even with more than one group. With rope, B and C
    are rotated after `hook_B` and `hook_C`; `hook_rot_B` and `hook_rot_C` hold what the SSD reads.
    """

    def __init__(self, config: Mamba2Config, d_model: int, positions: str):
        super().__init__()
        self.config = config
        channels = config.expand * d_model
        check_divides("headdim", config.headdim, f"expand · d_model = {channels}", channels)
        heads = channels // config.headdim
        check_divides("n_groups", config.n_groups, f"the number of heads, {heads}", heads)
        self.n_heads, self.d_head = heads, config.headdim
        shared = config.n_groups * config.d_state
        self.convolved = (channels, shared, shared)  # values, B, C
        convolved = sum(self.convolved)
        self.sizes = (channels, convolved, heads)  # gate, what the conv reads, Δ
        self.in_proj = nn.Linear(d_model, sum(self.sizes), bias=False)
        self.conv = nn.Conv1d(convolved, convolved, config.conv_width, groups=convolved)
        self.dt_bias = nn.Parameter(dt_bias(heads))
        self.A_log = nn.Parameter((1 + 15 * torch.rand(heads)).log())
        self.D = nn.Parameter(torch.ones(heads))
        for parameter in (self.dt_bias, self.A_log, self.D):
            parameter.no_weight_decay = True  # type: ignore[attr-defined]
        self.norm = nn.RMSNorm(channels, eps=config.norm_eps)
        self.out = nn.Linear(channels, d_model, bias=False)
        self.hook_phi_conv = hook("batch channel dest src", on_demand=True)
        self.hook_phi_conv_B, self.hook_phi_conv_C = (
            hook("batch state_channel dest src", on_demand=True) for _ in "BC"
        )
        self.hook_conv, self.hook_gate = hook("batch pos channel"), hook("batch pos channel")
        self.hook_dt = hook("batch pos head")
        self.hook_B, self.hook_C = (hook("batch pos group state") for _ in "BC")
        if config.rotary:
            check_rotates(config.d_state, "d_state")
            self.hook_rot_B, self.hook_rot_C = (hook("batch pos group state") for _ in "BC")
        self.hook_v, self.hook_z = (hook("batch pos head d_head") for _ in "vz")
        self.hook_phi = hook("batch head dest src")
        self.hook_state = hook("batch pos head state d_head", on_demand=True)
        self.state_size = channels * config.d_state + convolved * (config.conv_width - 1)

    @torch.no_grad()
    def start_mimetic(self, max_length: int) -> None:
        """Starts as linear attention whose queries are its keys: C has the projection and the conv of B."""
        start_near_identity(self.A_log, self.dt_bias, max_length)
        _, read, dt = self.in_proj.weight.split(self.sizes)
        dt.zero_()
        assert self.conv.bias is not None
        for weights in (read, self.conv.weight, self.conv.bias):
            _, of_B, of_C = weights.split(self.convolved)
            of_C.copy_(of_B)

    @property
    def A(self) -> Float[Tensor, " head"]:
        return -self.A_log.exp()

    def forward(self, x: Stream) -> Stream:
        gate, pre, dt, B, C, _ = self._into(x)
        A, D = self.A, self.D
        z = mix(
            self,
            self._values(pre),
            phi=lambda: ssd_phi(dt, A, B, C, D),
            fused=lambda v: ssd(v, dt, A, B, C, D),
            state=lambda v, edit: ssd_with_state_edit(v, dt, A, B, C, D, edit),
        )
        return self._out(z, gate)

    def start(self, batch: int) -> MixerState:
        """The state S of every head, and the last inputs of the conv."""
        zeros = self.A_log.new_zeros
        conv = zeros(batch, self.config.conv_width - 1, self.sizes[1])
        return MixerState(0, {"conv": conv, "scan": zeros(batch, self.n_heads, self.config.d_state, self.d_head)})

    def step(self, x: Stream, state: MixerState) -> tuple[Stream, MixerState]:
        """One position after the other from a state."""
        carry = Carry(self, state)
        gate, pre, dt, B, C, _ = self._into(x, carry)
        v = self.hook_v(self._values(pre))
        z, carry["scan"] = ssd_steps(v, dt, self.A, B, C, self.D, carry["scan"])
        return self._out(self.hook_z(z), gate), carry.after(x.shape[1])

    def _values(self, pre: Channels) -> Heads:
        return rearrange(F.silu(pre), "batch pos (head d_head) -> batch pos head d_head", head=self.n_heads)

    def _out(self, z: Heads, gate: Channels) -> Stream:
        out: Tensor = self.out(self.norm(z.flatten(2) * F.silu(gate)))
        return out

    def reading(self, x: Stream) -> Reading:
        """diag(SiLU(gate)) · Φ_ssd · diag(σ(pre)) · Φ_conv: Φ_ssd is per head, the other factors are per channel."""
        gate, pre, dt, B, C, (conv, conv_B, conv_C) = self._into(x)
        n, A, D = pre.shape[-1], self.A, self.D
        per_group = self.n_heads // self.config.n_groups

        def phi(part: slice, skip: bool = True) -> Float[Tensor, "batch head dest src"]:
            groups = torch.arange(part.start, part.stop, device=x.device) // per_group
            D_or_none = D[part] if skip else None
            return ssd_phi(dt[..., part], A[part], B[:, :, groups], C[:, :, groups], D_or_none)

        return Reading(
            x.shape,
            factors=(
                Factor("gate", "channel", n, lambda c: F.silu(gate[..., c]).mT, diagonal=True),
                Factor("ssd", "head", self.n_heads, phi, core=True, without_skip=lambda h: phi(h, skip=False)),
                Factor("silu", "channel", n, lambda c: pre[..., c].sigmoid().mT, diagonal=True),
                Factor("conv", "channel", n, conv, hook="hook_phi_conv", reach=self.config.conv_width),
            ),
            beside=(
                Factor(
                    "conv_B", "channel", self.convolved[1], conv_B, hook="hook_phi_conv_B", reach=self.config.conv_width
                ),
                Factor(
                    "conv_C", "channel", self.convolved[2], conv_C, hook="hook_phi_conv_C", reach=self.config.conv_width
                ),
            ),
            transition=GatedTransition(dt, A[:, None]),
            state=State(by="hook_rot_C" if self.config.rotary else "hook_C", groups=self.config.n_groups),
        )

    def mixing_flops(self, length: int) -> int:
        """FLOPs of the conv and the recurrence (not of its chunked form), forward, per token.

        5 per state and channel (decay 1, write 2, read 2), 3 per channel for Δ x and D x, 2 per tap and channel of the
        conv.
        """
        states, taps = self.config.d_state, self.config.conv_width
        channels = self.n_heads * self.d_head
        return channels * (5 * states + 3) + 2 * taps * (channels + 2 * self.config.n_groups * states)

    def _into(
        self, x: Stream, carry: Carry | None = None
    ) -> tuple[Channels, Channels, StepSizes, Groups, Groups, list[Build]]:
        """The gate, the input of the values' SiLU, Δ, B, C, and the matrices of the convs of values, B and C."""
        gate, u, dt = self.in_proj(x).split(self.sizes, dim=-1)
        gate = self.hook_gate(gate)
        points = (self.hook_phi_conv, self.hook_phi_conv_B, self.hook_phi_conv_C)
        convolved = short_convolve_parts(points, u, self.convolved, self.conv.weight[:, 0], self.conv.bias, carry)
        (pre, B, C), convs = [out for out, _ in convolved], [matrix for _, matrix in convolved]
        pre = self.hook_conv(pre)
        groups = self.config.n_groups
        B, C = (rearrange(F.silu(u), "batch pos (group state) -> batch pos group state", group=groups) for u in (B, C))
        dt = self.hook_dt(F.softplus(dt + self.dt_bias))
        B, C = self.hook_B(B), self.hook_C(C)
        if self.config.rotary:
            first = first_position(carry)
            B, C = self.hook_rot_B(rotate(B, first)), self.hook_rot_C(rotate(C, first))
        return gate, pre, dt, B, C, convs
