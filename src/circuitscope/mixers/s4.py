"""S4 in its diagonal form S4D-Lin: one fixed convolution a channel, then GELU and a gated linear unit."""

import math
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float
from pydantic import Field
from torch import Tensor, nn

from circuitscope.hooks import HookPoint
from circuitscope.kernels.long_conv import long_conv, toeplitz
from circuitscope.kernels.s4d import S4DParams, s4d_kernel, s4d_lin, s4d_with_state_edit
from circuitscope.mixers.mixer import MixerConfig
from circuitscope.mixers.phi import Factor
from circuitscope.mixers.scan import Scan, mix_channels


class S4Config(MixerConfig):
    """GLU(W gelu(K * x + D x)), K the impulse response of a diagonal state-space model."""

    name: Literal["s4"] = "s4"
    d_state: int = Field(default=64, ge=2, multiple_of=2, description="states N of a channel, half of them stored")


class S4D(nn.Module):
    """K_l = 2 Re Σ_n C_n (e^{ΔA_n} − 1)/A_n e^{lΔA_n} over N/2 conjugate pairs, skip D; blind to its input.

    A_n = −½ + iπn at the start, Δ log-uniform in [1e-3, 1e-1], C complex normal, D normal, as S4D's
    authors publish it. All are learned; A, Δ and D without weight decay.
    """

    def __init__(self, channels: int, d_state: int):
        super().__init__()
        log_A_real, A_imag = s4d_lin(channels, d_state // 2)
        self.log_A_real, self.A_imag = nn.Parameter(log_A_real), nn.Parameter(A_imag)
        self.C = nn.Parameter(torch.randn(channels, d_state // 2, 2) * 0.5**0.5)
        self.log_dt = nn.Parameter(torch.rand(channels) * math.log(100) + math.log(1e-3))
        self.D = nn.Parameter(torch.randn(channels))
        for parameter in (self.log_A_real, self.A_imag, self.log_dt, self.D):
            parameter.no_weight_decay = True  # type: ignore[attr-defined]

    @property
    def params(self) -> S4DParams:
        """What the kernels take."""
        return S4DParams(self.log_A_real, self.A_imag, self.C, self.log_dt)

    def scan(self, length: int) -> Scan:
        """The three ways to z at this length; states are complex [batch, pos, channel, N/2]."""
        K, D = s4d_kernel(self.params, length), self.D
        return Scan(
            phi=lambda part: toeplitz(K[part], length, D[part])[None],
            fused=lambda v: long_conv(v, K, D),
            with_states=lambda v, edit: s4d_with_state_edit(v, self.params, D, edit),
        )


def s4d_flops(d_state: int) -> int:
    """Of a channel's recurrence, forward, a token: 14 a conjugate pair (Ā h: 6, + B̄ u: 4, 2 Re C h: 4), 2 for D u."""
    return 7 * d_state + 2


class S4(nn.Module):
    """v = x; Φ_ij = K_{i−j} + D δ_ij per channel, for every input; y = (W h + b) ⊙ σ(W_g h + b_g), h = gelu(z).

    W and W_g are the halves of the published 1×1 conv to 2·d_model. Only W is `out`: shrinking it shrinks
    the residual branch by as much, where shrinking both would also open every gate to ½.
    """

    on_demand: ClassVar[tuple[str, ...]] = ("hook_phi", "hook_state")
    factor_names = core = ("ssm",)
    no_composed = no_phi = ""
    d_head = 1

    def __init__(self, config: S4Config, d_model: int, positions: str):
        super().__init__()
        self.n_heads, self.d_state = d_model, config.d_state
        self.ssm = S4D(d_model, config.d_state)
        self.out, self.out_gate = nn.Linear(d_model, d_model), nn.Linear(d_model, d_model)
        self.hook_v, self.hook_phi, self.hook_state, self.hook_z = (HookPoint() for _ in range(4))
        self.hook_gate = HookPoint()
        self.state_size = d_model * config.d_state

    def forward(self, x: Float[Tensor, "batch pos d_model"]) -> Float[Tensor, "batch pos d_model"]:
        h = F.gelu(mix_channels(self, x, self.ssm.scan(x.shape[1])))
        out: Tensor = self.out(h) * self.hook_gate(self.out_gate(h)).sigmoid()
        return out

    def factors(self, x: Float[Tensor, "batch pos d_model"]) -> list[Factor]:
        """The Toeplitz matrix alone: GELU and GLU are not linear in z, they are in Out."""
        return [Factor("ssm", self.n_heads, self.ssm.scan(x.shape[1]).phi)]

    def mixing_flops(self, length: int) -> int:
        """Of the recurrence (not of the FFT or the taps that compute it), forward, a token."""
        return self.n_heads * s4d_flops(self.d_state)
