"""S4 in its diagonal form S4D-Lin: one fixed convolution per channel, then GELU and a gated linear unit."""

import math
from typing import Annotated, Literal

import torch
import torch.nn.functional as F
from jaxtyping import Complex
from pydantic import Field
from torch import Tensor, nn

from circuitscope.devices import widened
from circuitscope.hooks import hook
from circuitscope.kernels.long_conv import long_conv, toeplitz
from circuitscope.kernels.s4d import S4DParams, s4d_kernel, s4d_lin, s4d_start, s4d_steps, s4d_with_state_edit
from circuitscope.mixers.mixer import MixerConfig, Stream
from circuitscope.mixers.reading import GatedTransition, Reading, State
from circuitscope.mixers.registry import register
from circuitscope.mixers.scan import ChannelScan, mix_channels
from circuitscope.mixers.state import Carry, MixerState
from circuitscope.mixers.two_paths import Channels
from circuitscope.section import Unit


class S4Config(MixerConfig):
    """GLU(W gelu(K * x + D x)), K the impulse response of a diagonal state-space model."""

    name: Literal["s4"] = "s4"
    d_state: Annotated[int, Unit("states per channel")] = Field(
        default=64, ge=2, multiple_of=2, description="size N of the state; half are stored, as they come in pairs"
    )


class S4D(nn.Module):
    """K_l = 2 Re Σ_n C_n (e^{ΔA_n} − 1)/A_n e^{lΔA_n} over N/2 conjugate pairs, skip D; K does not depend on the input.

    At the start A_n = −½ + iπn, Δ is log-uniform in [1e-3, 1e-1], C complex normal and D normal, as S4D's
    authors published it. All are learned; A, Δ and D have no weight decay.
    """

    log_A_real: nn.Parameter
    A_imag: nn.Parameter
    C: nn.Parameter
    log_dt: nn.Parameter
    D: nn.Parameter

    def __init__(self, channels: int, d_state: int):
        super().__init__()
        add_s4d_parameters(self, channels, d_state)

    @property
    def params(self) -> S4DParams:
        """The parameters in the form that the kernels take."""
        return S4DParams(self.log_A_real, self.A_imag, self.C, self.log_dt)

    def scan(self, length: int) -> ChannelScan:
        """The three ways to compute z at this length; states are complex [batch, pos, channel, N/2]."""
        K, D = s4d_kernel(self.params, length), self.D
        return ChannelScan(
            phi=lambda part: toeplitz(K[part], length, D[part])[None],
            bare_phi=lambda part: toeplitz(K[part], length)[None],
            fused=lambda v: long_conv(v, K, D),
            with_states=lambda v, edit: s4d_with_state_edit(v, self.params, D, edit),
            transition=s4d_transition(self.params, length),
        )

    def start(self, batch: int) -> Complex[Tensor, "batch channel state"]:
        """h before the first position."""
        return s4d_start(self.params, batch)

    def step(self, v: Channels, carry: Carry) -> Channels:
        """z from a state, whose part "scan" is h."""
        z, carry["scan"] = s4d_steps(v, self.params, self.D, carry["scan"])
        return z


def add_s4d_parameters(
    module: nn.Module, channels: int, d_state: int, dt_min: float = 1e-3, dt_max: float = 1e-1
) -> None:
    """Gives a module S4D-Lin's parameters: log_A_real, A_imag, C with E|C|² = 1, log_dt log-uniform, D normal."""
    log_A_real, A_imag = s4d_lin(channels, d_state // 2)
    module.log_A_real, module.A_imag = nn.Parameter(log_A_real), nn.Parameter(A_imag)
    module.C = nn.Parameter(torch.randn(channels, d_state // 2, 2) * 0.5**0.5)
    module.log_dt = nn.Parameter(torch.rand(channels) * math.log(dt_max / dt_min) + math.log(dt_min))
    module.D = nn.Parameter(torch.randn(channels))
    for parameter in (module.log_A_real, module.A_imag, module.log_dt, module.D):
        parameter.no_weight_decay = True  # type: ignore[attr-defined]


def s4d_transition(params: S4DParams, length: int) -> GatedTransition:
    """|Ā_n| per channel, the same at every position and for every input.

    log |Ā_n| is Δ Re A by zero-order hold, and log |(1 + ΔA/2)/(1 − ΔA/2)| by the bilinear rule.
    """
    dt = widened(params.log_dt).exp()[:, None]
    rate: Tensor = -dt * widened(params.log_A_real).exp()
    if params.discretization == "bilinear":
        half = torch.complex(rate, dt * widened(params.A_imag)) / 2
        rate = ((1 + half) / (1 - half)).abs().log()
    return GatedTransition(torch.ones(1, length, len(rate), device=rate.device), rate)


def s4d_flops(d_state: int) -> int:
    """FLOPs of one channel's recurrence per token: 14 per conjugate pair (Ā h 6, + B̄ u 4, 2 Re C h 4), 2 for D u."""
    return 7 * d_state + 2


@register(S4Config)
class S4(nn.Module):
    """v = x; Φ_ij = K_{i−j} + D δ_ij per channel, for every input; y = (W h + b) ⊙ σ(W_g h + b_g), h = gelu(z).

    W and W_g are the halves of the published 1×1 conv to 2·d_model. Only W is `out`. Shrinking W shrinks the
    residual branch by the same factor; shrinking both would also move every gate towards ½.
    """

    d_head = 1

    def __init__(self, config: S4Config, d_model: int, positions: str):
        super().__init__()
        self.n_heads, self.d_state = d_model, config.d_state
        self.ssm = S4D(d_model, config.d_state)
        self.out, self.out_gate = nn.Linear(d_model, d_model), nn.Linear(d_model, d_model)
        self.hook_v, self.hook_z = (hook("batch pos channel d_head") for _ in "vz")
        self.hook_phi = hook("batch channel dest src", on_demand=True)
        self.hook_state = hook("batch pos channel state", on_demand=True)
        self.hook_gate = hook("batch pos d_model")
        self.state_size = d_model * config.d_state

    def forward(self, x: Stream) -> Stream:
        return self._out(mix_channels(self, x, self.ssm.scan(x.shape[1])))

    def start(self, batch: int) -> MixerState:
        """The complex state h of every channel."""
        return MixerState(0, {"scan": self.ssm.start(batch)})

    def step(self, x: Stream, state: MixerState) -> tuple[Stream, MixerState]:
        """One position after the other from a state."""
        carry = Carry(self, state)
        z = self.hook_z(self.ssm.step(self.hook_v(x[..., None])[..., 0], carry)[..., None])[..., 0]
        return self._out(z), carry.after(x.shape[1])

    def _out(self, z: Channels) -> Stream:
        h = F.gelu(z)
        out: Tensor = self.out(h) * self.hook_gate(self.out_gate(h)).sigmoid()
        return out

    def reading(self, x: Stream) -> Reading:
        """The Toeplitz matrix alone. GELU and GLU are not linear in z, so they belong to Out."""
        scan = self.ssm.scan(x.shape[1])
        return Reading(x.shape, factors=(scan.factor(self.n_heads),), transition=scan.transition, state=State())

    def mixing_flops(self, length: int) -> int:
        """FLOPs of the recurrence (not of the FFT or the taps that compute it), forward, per token."""
        return self.n_heads * s4d_flops(self.d_state)
