"""RWKV-4's time mixing: per channel, an average of the past that keys weight and that decays with distance."""

import math
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from circuitscope.devices import widened
from circuitscope.hooks import hook
from circuitscope.kernels.short_conv import token_shift, token_shift_phi
from circuitscope.kernels.wkv import wkv, wkv_phi, wkv_start, wkv_steps, wkv_with_state_edit
from circuitscope.mixers.mixer import MixerConfig, Stream
from circuitscope.mixers.reading import Build, Factor, GatedTransition, Reading, State
from circuitscope.mixers.registry import register
from circuitscope.mixers.state import Carry, MixerState
from circuitscope.mixers.two_paths import Channels, convolve, mix


class RWKVConfig(MixerConfig):
    """W_o(σ(r) ⊙ wkv(k, v)); k, v, r read a mixture of the token and the token before it."""

    name: Literal["rwkv"] = "rwkv"


@register(RWKVConfig)
class RWKV(nn.Module):
    """Φ_ij = σ(r_i) · weights_ij per channel. Φ acts on the values, which come after the token shift:

    weights_ij ∝ e^{k_j − (i−1−j) w} for j < i, weights_ii ∝ e^{u + k_i}, rows sum to 1,
    w = e^{time_decay}, u = time_first.

    `hook_gate` holds r before σ. `hook_phi_conv` is the matrix of the shift before the values, per channel of x:
    mix · I + (1 − mix) · shift. `hook_conv` holds its result, before the projection. `hook_phi_conv_k` and
    `hook_phi_conv_r` are the shifts before the keys and the receptance, which Φ is made with. `hook_state`
    [batch, pos, channel, 3] holds (num, den, max): the numerator is num · e^max and the denominator den · e^max, where
    max is the running maximum of the exponents. y_t reads the state before t, so an edit at t shows from t + 1 on.

    time_decay, time_first and the mixes start as in RWKV-4 (`set_depth`). The model initializes the projections,
    whereas RWKV-4 starts keys, receptance and output at zero.
    """

    no_composed = (
        "rwkv shifts tokens before it projects the values, so a composed matrix over tokens exists only per pair"
        " of channels; ask for one factor at a time: phi, or shift"
    )
    d_head = 1

    def __init__(self, config: RWKVConfig, d_model: int, positions: str):
        super().__init__()
        self.config = config
        channels = self.n_heads = d_model
        self.time_decay, self.time_first = nn.Parameter(torch.empty(channels)), nn.Parameter(torch.empty(channels))
        self.time_mix_k, self.time_mix_v, self.time_mix_r = (nn.Parameter(torch.empty(d_model)) for _ in "kvr")
        for name, parameter in self.named_parameters():
            if name.startswith("time"):
                parameter.no_weight_decay = True  # type: ignore[attr-defined]
        self.key = nn.Linear(d_model, channels, bias=False)
        self.value = nn.Linear(d_model, channels, bias=False)
        self.receptance = nn.Linear(d_model, channels, bias=False)
        self.out = nn.Linear(channels, d_model, bias=False)
        self.hook_k, self.hook_gate = hook("batch pos channel d_head"), hook("batch pos channel")
        self.hook_phi_conv, self.hook_phi_conv_k, self.hook_phi_conv_r = (
            hook("batch channel dest src", on_demand=True) for _ in range(3)
        )
        self.hook_conv = hook("batch pos channel")
        self.hook_v, self.hook_z = (hook("batch pos channel d_head") for _ in "vz")
        self.hook_phi = hook("batch channel dest src", on_demand=True)
        self.hook_state = hook("batch pos channel part", on_demand=True)
        self.state_size = 4 * channels  # numerator, denominator, their scale, and the last input
        self.set_depth(0, 1)

    def set_depth(self, layer: int, n_layers: int) -> None:
        """Initializes time_first, and the decay and the mixes, which depend on the layer in RWKV-4.

        With ρ = layer/(n − 1) (0 at n = 1) and α = 1 − layer/n, per channel h of d:
        time_decay = −5 + 8 (h/(d−1))^{0.7+1.3ρ}, time_first = ln 0.3 + ½((h+1) mod 3 − 1),
        mix_k = (h/d)^α, mix_v = (h/d)^α + 0.3ρ, mix_r = (h/d)^{α/2}. A mix of 1 is the token itself.
        """
        channels = self.n_heads
        rho, alpha = layer / max(n_layers - 1, 1), 1 - layer / n_layers
        h = torch.arange(channels)
        with torch.no_grad():
            self.time_decay.copy_(-5 + 8 * (h / max(channels - 1, 1)) ** (0.7 + 1.3 * rho))
            self.time_first.copy_(math.log(0.3) + 0.5 * ((h + 1) % 3 - 1))
            self.time_mix_k.copy_((h / channels) ** alpha)
            self.time_mix_v.copy_((h / channels) ** alpha + 0.3 * rho)
            self.time_mix_r.copy_((h / channels) ** (alpha / 2))

    def forward(self, x: Stream) -> Stream:
        k, v, r, _ = self._into(x)
        w, u, gate = self.time_decay.exp(), self.time_first, r.sigmoid()
        z = mix(
            self,
            v[..., None],
            phi=lambda: gate.mT[..., None] * wkv_phi(w, u, k),
            fused=lambda v: (gate * wkv(w, u, k, v[..., 0]))[..., None],
            state=lambda v, edit: (gate * wkv_with_state_edit(w, u, k, v[..., 0], edit))[..., None],
        )
        out: Tensor = self.out(z[..., 0])
        return out

    def start(self, batch: int) -> MixerState:
        """(num, den, max) as in `hook_state`, and the last input, which the shifts read; zero before the first one."""
        num, den, top = wkv_start(batch, self.n_heads, self.out.weight)
        return MixerState(0, {"num": num, "den": den, "max": top, "input": num[:, None]})

    def step(self, x: Stream, state: MixerState) -> tuple[Stream, MixerState]:
        """One position after the other from a state."""
        carry = Carry(self, state)
        k, v, r, _ = self._into(x, carry)
        v, parts = self.hook_v(v[..., None])[..., 0], ("num", "den", "max")
        y, after = wkv_steps(self.time_decay.exp(), self.time_first, k, v, *(carry[part] for part in parts))
        for part, new in zip(parts, after, strict=True):
            carry[part] = new
        return self.out(self.hook_z((r.sigmoid() * y)[..., None])[..., 0]), carry.after(x.shape[1])

    def reading(self, x: Stream) -> Reading:
        """diag(σ(r)) · the row-normalized weights and, per channel of x, the shift before the values."""
        k, _, r, (shift_k, shift, shift_r) = self._into(x)
        w, u, n = self.time_decay.exp(), self.time_first, self.n_heads
        rate = -widened(self.time_decay).exp()[:, None]  # for numerator and denominator; z is their ratio
        return Reading(
            x.shape,
            factors=(
                Factor("receptance", "channel", n, lambda c: r[..., c].sigmoid().mT, diagonal=True, core=True),
                Factor("wkv", "channel", n, lambda c: wkv_phi(w[c], u[c], k[..., c]), shares=True, core=True),
                Factor("shift", "channel", n, shift, hook="hook_phi_conv", reach=2),
            ),
            beside=(
                Factor("shift_k", "channel", n, shift_k, hook="hook_phi_conv_k", reach=2),
                Factor("shift_r", "channel", n, shift_r, hook="hook_phi_conv_r", reach=2),
            ),
            transition=GatedTransition(torch.ones(1, x.shape[1], n, device=rate.device), rate),
            state=State(),
            no_composed=self.no_composed,
        )

    def mixing_flops(self, length: int) -> int:
        """FLOPs of shifts and recurrence, forward, per token. Per channel: 3 per shift, 20 for wkv, 2 for σ(r)."""
        return self.n_heads * (3 * 3 + 20 + 2)

    def _into(self, x: Stream, carry: Carry | None = None) -> tuple[Channels, Channels, Channels, list[Build]]:
        """Keys, values, receptance, and the matrices of the shifts before each of them."""
        if carry is None:
            before = token_shift(x)
        else:
            seen = torch.cat([carry["input"], x], dim=1)
            before, carry["input"] = seen[:, :-1], seen[:, -1:].clone()

        def shifted(point: nn.Module, mix: Float[Tensor, " channel"]) -> tuple[Channels, Build]:
            return convolve(
                point,
                x,
                matrix=lambda c: self._shift(mix[c], x.shape[1]),
                bias=None,
                fused=lambda x: before.lerp(x, mix),
            )

        of_k, shift_k = shifted(self.hook_phi_conv_k, self.time_mix_k)
        of_v, shift_v = shifted(self.hook_phi_conv, self.time_mix_v)
        of_r, shift_r = shifted(self.hook_phi_conv_r, self.time_mix_r)
        k = self.hook_k(self.key(of_k)[..., None])[..., 0]
        v = self.value(self.hook_conv(of_v))
        return k, v, self.hook_gate(self.receptance(of_r)), [shift_k, shift_v, shift_r]

    @staticmethod
    def _shift(mix: Float[Tensor, " channel"], length: int) -> Float[Tensor, "channel dest src"]:
        """mix · I + (1 − mix) · shift."""
        own = torch.eye(length, dtype=mix.dtype, device=mix.device)
        before = token_shift_phi(length, dtype=mix.dtype, device=mix.device)
        return mix[:, None, None] * own + (1 - mix)[:, None, None] * before
