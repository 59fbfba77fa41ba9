"""Hyena of order 2: a long convolution with an implicit filter between two elementwise products."""

import math
from itertools import pairwise
from typing import Annotated, Literal

import torch
from jaxtyping import Float
from pydantic import Field
from torch import Tensor, nn

from circuitscope.hooks import hook
from circuitscope.kernels.long_conv import long_conv, toeplitz
from circuitscope.mixers.mixer import MixerConfig, Stream
from circuitscope.mixers.reading import Build, Factor, Reading
from circuitscope.mixers.registry import register
from circuitscope.mixers.state import Carry, MixerState
from circuitscope.mixers.two_paths import Heads, mix, short_convolve_parts
from circuitscope.section import Added, DefaultBy, Unit


class HyenaConfig(MixerConfig):
    """W_o(x2 ⊙ (h * (x1 ⊙ v) + b ⊙ x1 ⊙ v)); x1, x2, v a short conv of W x, h an MLP of the lag."""

    name: Literal["hyena"] = "hyena"
    l_max: Annotated[int | None, Unit("positions"), DefaultBy("none: the model's max_length")] = Field(
        default=None, ge=1, description="lags in which the filter's time goes from 0 to 1"
    )
    conv_width: Annotated[int, Unit("taps")] = Field(default=3, ge=1, description="length of the short conv")
    filter_bands: Annotated[int, Unit("pairs")] = Field(
        default=1, ge=1, description="pairs of cosine and sine that the filter reads, besides time"
    )
    filter_width: Annotated[int, Unit("channels")] = Field(default=64, ge=1, description="width of the filter's MLP")
    filter_layers: Annotated[int, Unit("layers")] = Field(
        default=2, ge=0, le=1024, description="inner layers of the filter's MLP"
    )
    frequency: float = Field(default=1.0, gt=0, description="initial frequency of the MLP's sines")
    filter_init: Annotated[Literal["native", "gpt2"], Added(3, before="native")] = Field(
        default="native",
        description="first weights of the filter's MLP, whatever the model's init is: torch's own (native), or"
        " N(0, 0.02²) and zero biases (gpt2), which start the filter a thousand times smaller",
    )


class ImplicitFilter(nn.Module):
    """h_l = MLP(features of l) ⊙ exp(−t |δ|), t = l/(l_max − 1); |δ| from 3.07 to 15.35 across channels.

    The features are t, cos(f w), −sin(f w) with w = 2π l/l_max and f from 1e-4 to bands − 1. With one band, as
    published, f = 1e-4 and the pair is almost constant. A filter depends on l_max, not on the length of the input:
    for lags beyond l_max its time exceeds 1.
    """

    once_a_batch = True  # it does not run for each token, so accounting leaves it out
    deltas: Tensor

    def __init__(self, config: HyenaConfig, channels: int):
        super().__init__()
        self.l_max = config.l_max or 64
        self.bands = config.filter_bands
        width = config.filter_width
        sizes = [2 * self.bands + 1, *[width] * (config.filter_layers + 1)]
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(sizes))
        self.last = nn.Linear(width, channels, bias=False)
        self.frequency = nn.Parameter(torch.full((width,), config.frequency))
        slow, fast = math.log(100) / 1.5, math.log(100) / 0.3
        self.register_buffer("deltas", torch.linspace(slow, fast, channels), persistent=False)
        for layer in (*self.layers, self.last):
            layer.own_init = True  # type: ignore[assignment]
            if config.filter_init == "gpt2":
                nn.init.normal_(layer.weight, std=0.02)  # type: ignore[arg-type]
                if layer.bias is not None:
                    nn.init.zeros_(layer.bias)  # type: ignore[arg-type]
        for parameter in self.parameters():
            parameter.no_weight_decay = True  # type: ignore[attr-defined]

    def forward(self, length: int) -> Float[Tensor, "channel lag"]:
        lag = torch.arange(length, dtype=self.deltas.dtype, device=self.deltas.device)[:, None]
        t = lag / max(self.l_max - 1, 1)
        f = torch.linspace(1e-4, self.bands - 1, self.bands, dtype=lag.dtype, device=lag.device)
        angle = f * (2 * math.pi * lag / self.l_max)
        h = torch.cat([t, angle.cos(), -angle.sin()], dim=-1)
        for layer in self.layers:
            h = torch.sin(self.frequency * layer(h))
        filters: Tensor = self.last(h) * torch.exp(-t * self.deltas)
        return filters.T


@register(HyenaConfig)
class Hyena(nn.Module):
    """Φ = diag(x2) · Toeplitz(h + bδ) · diag(x1), per channel.

    `hook_q` holds x2 and `hook_k` holds x1, both after the short conv. `hook_phi_conv` is the short conv on the
    values, without its bias; `hook_phi_conv_x1` and `hook_phi_conv_x2` are those on x1 and x2, which Φ is made with.
    There is no finite recurrent state: an implicit filter has no recurrence, so the next output needs every earlier
    x1 ⊙ v.

    The filter's time needs a scale: the config's `l_max` or, if that is none, 64 until `set_length` is called.
    """

    d_head = 1
    state_size = None

    def __init__(self, config: HyenaConfig, d_model: int, positions: str):
        super().__init__()
        self.config = config
        self.n_heads = d_model
        self.in_proj = nn.Linear(d_model, 3 * d_model)
        self.conv = nn.Conv1d(3 * d_model, 3 * d_model, config.conv_width, groups=3 * d_model)
        self.filter = ImplicitFilter(config, d_model)
        self.skip = nn.Parameter(torch.randn(d_model))
        self.out = nn.Linear(d_model, d_model)
        self.hook_q, self.hook_k, self.hook_v, self.hook_z = (hook("batch pos channel d_head") for _ in "qkvz")
        self.hook_phi, self.hook_phi_conv, self.hook_phi_conv_x1, self.hook_phi_conv_x2 = (
            hook("batch channel dest src", on_demand=True) for _ in range(4)
        )
        self.hook_conv = hook("batch pos channel")

    def set_length(self, max_length: int) -> None:
        """Sets `l_max` to the model's length if the config leaves it open."""
        self.filter.l_max = self.config.l_max or max_length

    def forward(self, x: Stream) -> Stream:
        x1, x2, v, _ = self._into(x)
        h, length = self.filter(x.shape[1]), x.shape[1]

        def phi() -> Float[Tensor, "batch channel dest src"]:
            q, k = x2[..., 0].mT[..., :, None], x1[..., 0].mT[..., None, :]
            return q * toeplitz(h, length, self.skip) * k

        def fused(v: Heads) -> Heads:
            return x2 * long_conv((x1 * v)[..., 0], h, self.skip)[..., None]

        out: Tensor = self.out(mix(self, v, phi=phi, fused=fused)[..., 0])
        return out

    def start(self, batch: int) -> MixerState:
        """The history of x1 ⊙ v, which grows with the positions, and the last inputs of the short conv."""
        zeros, channels = self.skip.new_zeros, self.n_heads
        conv = zeros(batch, self.config.conv_width - 1, 3 * channels)
        return MixerState(0, {"conv": conv, "history": zeros(batch, 0, channels)})

    def step(self, x: Stream, state: MixerState) -> tuple[Stream, MixerState]:
        """The long conv over the history: the cost of a position grows with the positions before it.

        Several positions go through the kernel of the forward pass, which is differentiable once.
        """
        carry = Carry(self, state)
        x1, x2, v, _ = self._into(x, carry)
        u = torch.cat([carry["history"], (x1 * self.hook_v(v))[..., 0]], dim=1)
        carry["history"], h = u, self.filter(u.shape[1])
        if x.shape[1] == 1:
            y = torch.einsum("bjc,cj->bc", u, h.flip(1))[:, None] + self.skip * u[:, -1:]
        else:
            y = long_conv(u, h, self.skip)[:, carry.position :]
        return self.out(self.hook_z(x2 * y[..., None])[..., 0]), carry.after(x.shape[1])

    def reading(self, x: Stream) -> Reading:
        """diag(x2) · Toeplitz(h + bδ) · diag(x1) · Φ_conv."""
        x1, x2, _, (conv_x1, conv_x2, conv) = self._into(x)
        n, length = self.n_heads, x.shape[1]
        h = self.filter(length)
        return Reading(
            x.shape,
            factors=(
                Factor("x2", "channel", n, lambda c: x2[:, :, c, 0].mT, diagonal=True, core=True),
                Factor(
                    "filter",
                    "channel",
                    n,
                    lambda c: toeplitz(h[c], length, self.skip[c])[None],
                    core=True,
                    without_skip=lambda c: toeplitz(h[c], length)[None],
                ),
                Factor("x1", "channel", n, lambda c: x1[:, :, c, 0].mT, diagonal=True, core=True),
                Factor("conv", "channel", n, conv, hook="hook_phi_conv", reach=self.config.conv_width),
            ),
            beside=(
                Factor("conv_x1", "channel", n, conv_x1, hook="hook_phi_conv_x1", reach=self.config.conv_width),
                Factor("conv_x2", "channel", n, conv_x2, hook="hook_phi_conv_x2", reach=self.config.conv_width),
            ),
            transition="an implicit filter has no recurrence, so Hyena has no state to carry",
        )

    def mixing_flops(self, length: int) -> int:
        """FLOPs of both convolutions and the products, forward, per token: 2 per tap.

        The long convolution is averaged over causal rows and counted as a sum over taps; the FFT, which is used for
        long inputs, needs fewer. The filter's MLP is left out, because it runs once per batch.
        """
        return self.n_heads * (3 * 2 * self.config.conv_width + length + 1 + 4)

    def _into(self, x: Stream, carry: Carry | None = None) -> tuple[Heads, Heads, Heads, list[Build]]:
        """x1, x2, the values, and the matrices of their convs."""
        points = (self.hook_phi_conv_x1, self.hook_phi_conv_x2, self.hook_phi_conv)
        sizes = [self.n_heads] * 3
        convolved = short_convolve_parts(points, self.in_proj(x), sizes, self.conv.weight[:, 0], self.conv.bias, carry)
        (x1, x2, v), convs = [out for out, _ in convolved], [matrix for _, matrix in convolved]
        return self.hook_k(x1[..., None]), self.hook_q(x2[..., None]), self.hook_conv(v)[..., None], convs
