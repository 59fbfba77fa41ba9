"""Mamba: a gated block around the selective scan S6; without its conv or its gate where asked."""

import math
from collections.abc import Callable
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float
from pydantic import Field
from torch import Tensor, nn

from circuitscope.hooks import HookPoint
from circuitscope.kernels.selective_scan import (
    selective_scan,
    selective_scan_phi,
    selective_scan_with_state_edit,
)
from circuitscope.kernels.short_conv import short_conv, short_conv_phi
from circuitscope.mixers.mixer import MixerConfig
from circuitscope.mixers.phi import Factor, Heads, convolve, mix

Channels = Float[Tensor, "batch pos channel"]
States = Float[Tensor, "batch pos state"]


class MambaConfig(MixerConfig):
    """W_o(y ⊙ SiLU(gate)), y the selective scan of SiLU(conv(W_x x))."""

    name: Literal["mamba"] = "mamba"
    d_state: int = Field(default=16, ge=1, description="states N of a channel")
    expand: int = Field(default=2, ge=1, description="channels over d_model")
    dt_rank: int | None = Field(default=None, ge=1, description="rank of the step size; none: d_model / 16, rounded up")
    conv: bool = Field(default=True, description="short conv before the scan")
    conv_width: int = Field(default=4, ge=1, description="taps of the short conv")
    activation: bool = Field(default=True, description="SiLU before the scan, kept when the conv is dropped")
    gate: bool = Field(default=True, description="SiLU gate on the output")


class SelectiveSSM(nn.Module):
    """Step size, input and output matrices of S6, read from the values themselves.

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

    def forward(self, v: Channels) -> tuple[Channels, States, States]:
        low, B, C = self.x_proj(v).split(self.sizes, dim=-1)
        return F.softplus(self.dt_proj(low)), B, C

    @property
    def A(self) -> Float[Tensor, "channel state"]:
        return -self.A_log.exp()


def initialize_dt(dt_proj: nn.Linear) -> None:
    """W_dt ~ U(±rank^−½); the bias makes softplus(bias) log-uniform in [1e-3, 1e-1]. Kept by every init."""
    nn.init.uniform_(dt_proj.weight, -(dt_proj.in_features**-0.5), dt_proj.in_features**-0.5)
    with torch.no_grad():
        dt_proj.bias.copy_(dt_bias(dt_proj.out_features))
    dt_proj.own_init = True  # type: ignore[assignment]


def dt_bias(count: int) -> Float[Tensor, " count"]:
    """Inverse softplus of step sizes log-uniform in [1e-3, 1e-1], clamped to at least 1e-4."""
    dt = torch.exp(torch.rand(count) * math.log(100) + math.log(1e-3)).clamp(min=1e-4)
    return dt + torch.log(-torch.expm1(-dt))


class Mamba(nn.Module):
    """Φ is the scan's matrix, per channel: Σ_n C_in exp(A_en (S_i − S_j)) Δ_je B_jn + D_e δ_ij."""

    on_demand: ClassVar[tuple[str, ...]] = ("hook_phi", "hook_phi_conv", "hook_state")
    core = ("ssm",)
    no_composed = no_phi = ""
    d_head = 1

    def __init__(self, config: MambaConfig, d_model: int, positions: str):
        super().__init__()
        self.config = config
        channels = self.n_heads = config.expand * d_model
        self.in_proj = nn.Linear(d_model, channels * (2 if config.gate else 1), bias=False)
        if config.conv:
            self.conv = nn.Conv1d(channels, channels, config.conv_width, groups=channels)
            self.hook_phi_conv, self.hook_conv = HookPoint(), HookPoint()
        self.ssm = SelectiveSSM(channels, config.d_state, config.dt_rank or math.ceil(d_model / 16))
        self.out = nn.Linear(channels, d_model, bias=False)
        self.hook_dt, self.hook_B, self.hook_C = HookPoint(), HookPoint(), HookPoint()
        if config.gate:
            self.hook_gate = HookPoint()
        self.hook_v, self.hook_phi, self.hook_state, self.hook_z = (HookPoint() for _ in range(4))
        present = {"gate": config.gate, "ssm": True, "silu": config.activation, "conv": config.conv}
        self.factor_names = tuple(name for name, there in present.items() if there)
        self.state_size = channels * (config.d_state + (config.conv_width - 1 if config.conv else 0))

    def forward(self, x: Float[Tensor, "batch pos d_model"]) -> Float[Tensor, "batch pos d_model"]:
        pre, gate = self._into(x)
        v = F.silu(pre) if self.config.activation else pre
        dt, B, C = self._select(v)
        A, D = self.ssm.A, self.ssm.D

        def scan(v: Heads) -> Heads:
            return selective_scan(v[..., 0], dt, A, B, C, D)[..., None]

        def scan_states(v: Heads, edit: Callable[[Tensor], Tensor]) -> Heads:
            return selective_scan_with_state_edit(v[..., 0], dt, A, B, C, D, edit)[..., None]

        z = mix(self, v[..., None], phi=lambda: selective_scan_phi(dt, A, B, C, D), fused=scan, state=scan_states)[
            ..., 0
        ]
        out: Tensor = self.out(z if gate is None else z * F.silu(gate))
        return out

    def factors(self, x: Float[Tensor, "batch pos d_model"]) -> list[Factor]:
        """diag(SiLU(gate)) · Φ_ssm · diag(σ(pre)) · Φ_conv; SiLU(pre) = σ(pre) · pre."""
        pre, gate = self._into(x)
        dt, B, C = self._select(F.silu(pre) if self.config.activation else pre)
        A, D, n, length = self.ssm.A, self.ssm.D, self.n_heads, x.shape[1]
        found = [Factor("ssm", n, lambda c: selective_scan_phi(dt[..., c], A[c], B, C, D[c]))]
        if gate is not None:
            found.insert(0, Factor("gate", n, lambda c: F.silu(gate[..., c]).mT, diagonal=True))
        if self.config.activation:
            found.append(Factor("silu", n, lambda c: pre[..., c].sigmoid().mT, diagonal=True))
        if self.config.conv:
            found.append(Factor("conv", n, lambda c: short_conv_phi(self.conv.weight[c, 0], length)[None]))
        return found

    def mixing_flops(self, length: int) -> int:
        """Of the conv and the scan, forward, a token: 9 a state and channel, 2 a tap."""
        taps = self.config.conv_width if self.config.conv else 0
        return self.n_heads * (9 * self.config.d_state + 2 * taps)

    def _into(self, x: Float[Tensor, "batch pos d_model"]) -> tuple[Channels, Channels | None]:
        """What enters SiLU and the scan, and the gate."""
        u, gate = self.in_proj(x), None
        if self.config.gate:
            u, gate = u.chunk(2, dim=-1)
            gate = self.hook_gate(gate)
        if self.config.conv:
            weight, bias = self.conv.weight[:, 0], self.conv.bias
            u = self.hook_conv(
                convolve(
                    self.hook_phi_conv,
                    u,
                    matrix=lambda: short_conv_phi(weight, x.shape[1]),
                    bias=bias,
                    fused=lambda u: short_conv(u, weight, bias),
                )
            )
        return u, gate

    def _select(self, v: Channels) -> tuple[Channels, States, States]:
        dt, B, C = self.ssm(v)
        return self.hook_dt(dt), self.hook_B(B), self.hook_C(C)
