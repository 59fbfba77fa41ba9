"""Based: causal linear attention with the second-order Taylor polynomial of the exponential as its kernel."""

from typing import Annotated, ClassVar, Literal

import torch
from einops import rearrange
from jaxtyping import Float
from pydantic import Field
from torch import Tensor, nn

from circuitscope.errors import UserError
from circuitscope.hooks import hook
from circuitscope.kernels.linear_attention import based_attention, based_phi, based_steps
from circuitscope.mixers.mixer import MixerConfig, Stream, check_divides
from circuitscope.mixers.reading import Factor, Reading
from circuitscope.mixers.registry import register
from circuitscope.mixers.state import Carry, MixerState
from circuitscope.mixers.two_paths import Heads, mix
from circuitscope.section import DefaultBy, Unit

Features = Float[Tensor, "batch pos head feature_dim"]


class BasedConfig(MixerConfig):
    """φ(Q)φ(K)ᵀ V with rows normalized, causal; φ(q)·φ(k) = 1 + s + s²/2, s = q·k/√d."""

    blind_to_order: ClassVar[bool] = True
    default_init: ClassVar[str] = "gpt2"

    name: Literal["based"] = "based"
    n_heads: Annotated[int, Unit("heads")] = Field(
        default=1, ge=1, description="heads; must divide d_model unless head_dim is given"
    )
    feature_dim: Annotated[int, Unit("channels per head")] = Field(
        default=16, ge=1, description="size d of queries and keys, for 1 + d + d² features; 8 in the MQAR studies"
    )
    head_dim: Annotated[int | None, Unit("channels per head"), DefaultBy("none: d_model / n_heads")] = Field(
        default=None, ge=1, description="size of values"
    )
    window: Annotated[int | None, Unit("positions")] = Field(
        default=None, ge=1, description="how far back a query sees, its own position included; none: to the start"
    )
    eps: float = Field(default=1e-12, ge=0, description="added to the sum of a row before dividing by it")


@register(BasedConfig)
class Based(nn.Module):
    """Φ_ij = (1 + s + s²/2) / (row sum + eps), per head; y = W_O z.

    This mixer is the linear attention alone. The published stack alternates it, layer by layer, with a gated
    short conv, which is the mixer `gated_conv` here. A `window` cuts off these same weights, whereas the
    published models have separate layers of softmax attention over a window.

    `state_size` counts Σ φ(k) vᵀ and Σ φ(k). Sums cannot forget, so with a window there is no recurrence: the
    state is then the cache of the keys and values of the window − 1 positions before.
    """

    def __init__(self, config: BasedConfig, d_model: int, positions: str):
        super().__init__()
        if positions in ("rope", "alibi"):
            raise UserError(f"based takes positions learned, sinusoidal or none, got {positions}")
        if config.head_dim is None:
            check_divides("n_heads", config.n_heads, f"d_model = {d_model}", d_model, "; or give head_dim")
        self.config = config
        self.n_heads, self.d_head = config.n_heads, config.head_dim or d_model // config.n_heads
        d = config.feature_dim
        self.sizes = (self.n_heads * d, self.n_heads * d, self.n_heads * self.d_head)
        self.qkv = nn.Linear(d_model, sum(self.sizes), bias=False)
        self.out = nn.Linear(self.n_heads * self.d_head, d_model, bias=False)
        self.hook_q, self.hook_k = (hook("batch pos head feature") for _ in "qk")
        self.hook_v, self.hook_z = (hook("batch pos head d_head") for _ in "vz")
        self.hook_phi = hook("batch head dest src")
        if config.window is None:
            self.state_size = self.n_heads * (1 + d + d**2) * (self.d_head + 1)
        else:
            self.state_size = self.n_heads * (config.window - 1) * (d + self.d_head)

    def forward(self, x: Stream) -> Stream:
        q, k, v = self._into(x)
        eps, window = self.config.eps, self.config.window
        z = mix(
            self,
            v,
            phi=lambda: based_phi(q, k, eps, window),
            fused=lambda v: based_attention(q, k, v, eps, window),
        )
        return self._out(z)

    def start(self, batch: int) -> MixerState:
        """Σ φ(k) vᵀ and Σ φ(k) or, with a window, the keys and values that it still holds."""
        zeros, heads, d = self.out.weight.new_zeros, self.n_heads, self.config.feature_dim
        if self.config.window is not None:
            return MixerState(0, {"k": zeros(batch, 0, heads, d), "v": zeros(batch, 0, heads, self.d_head)})
        features = 1 + d + d**2
        return MixerState(
            0, {"sums": zeros(batch, heads, features, self.d_head), "counts": zeros(batch, heads, features)}
        )

    def step(self, x: Stream, state: MixerState) -> tuple[Stream, MixerState]:
        """In blocks of positions from the sums; with a window all positions at once from the keys and values."""
        carry = Carry(self, state)
        q, k, v = self._into(x)
        v, eps, window = self.hook_v(v), self.config.eps, self.config.window
        if window is None:
            z, carry["sums"], carry["counts"] = based_steps(q, k, v, carry["sums"], carry["counts"], eps)
        else:
            k, v = torch.cat([carry["k"], k], 1), torch.cat([carry["v"], v], 1)
            z = torch.einsum("bhij,bjhd->bihd", based_phi(q, k, eps, window), v)
            carry["k"], carry["v"] = (part[:, max(0, k.shape[1] - window + 1) :].clone() for part in (k, v))
        return self._out(self.hook_z(z)), carry.after(x.shape[1])

    def _out(self, z: Heads) -> Stream:
        out: Tensor = self.out(rearrange(z, "batch pos head d_head -> batch pos (head d_head)"))
        return out

    def reading(self, x: Stream) -> Reading:
        """The normalized weights. 1 + s + s²/2 is positive, so each row consists of shares of 1, up to eps."""
        q, k, _ = self._into(x)
        eps, window = self.config.eps, self.config.window

        def weights(part: slice) -> Float[Tensor, "batch head dest src"]:
            return based_phi(q[:, :, part], k[:, :, part], eps, window)

        return Reading(
            x.shape,
            factors=(
                Factor(
                    "linear_attention", "head", self.n_heads, weights, shares=True, core=True, reach=self.config.window
                ),
            ),
            transition="Based only adds to its state, so its transition is the identity at every lag",
        )

    def mixing_flops(self, length: int) -> int:
        """FLOPs of QKᵀ and of the weights times V, forward, per token, averaged over the keys that rows see.

        This is what the kernel computes. Up to a length of about 1,000 it is less than the recurrent form needs.
        """
        window = min(self.config.window or length, length)
        seen = window * (window + 1) // 2 + (length - window) * window
        return 2 * self.n_heads * (self.config.feature_dim + self.d_head) * seen // length

    def _into(self, x: Stream) -> tuple[Features, Features, Heads]:
        """Queries, keys and values."""
        q, k, v = (
            rearrange(part, "batch pos (head size) -> batch pos head size", head=self.n_heads)
            for part in self.qkv(x).split(self.sizes, dim=-1)
        )
        return self.hook_q(q), self.hook_k(k), v
