"""Causal softmax attention: Φ is the pattern itself."""

from typing import ClassVar, Literal

import torch
from einops import rearrange
from jaxtyping import Float
from pydantic import Field
from torch import Tensor, nn

from circuitscope.errors import UserError
from circuitscope.hooks import HookPoint, wanted
from circuitscope.kernels.attention import causal_scores, fused_attention
from circuitscope.mixers.mixer import MixerConfig
from circuitscope.mixers.phi import Factor, Heads, mix
from circuitscope.mixers.positions import alibi, rotate


class AttentionConfig(MixerConfig):
    """softmax(QKᵀ/√d) V, causal."""

    needs_positions: ClassVar[bool] = True

    name: Literal["attention"] = "attention"
    n_heads: int = Field(default=1, ge=1, description="attention heads; must divide d_model")
    qkv_bias: bool = Field(default=True, description="bias in the query, key and value projections")


class Attention(nn.Module):
    """z = softmax(causal(QKᵀ/√d)) V, y = W_O z.

    `hook_attn_scores`, `hook_pattern` and `hook_phi` fire only when listened to; then the pattern is
    built, goes through both hooks in this order, and z is computed from what comes back.
    """

    on_demand: ClassVar[tuple[str, ...]] = ()
    factor_names = core = ("pattern",)
    no_composed = no_phi = ""
    state_size = None

    def __init__(self, config: AttentionConfig, d_model: int, positions: str):
        super().__init__()
        if d_model % config.n_heads:
            fits = [h for h in range(1, d_model + 1) if d_model % h == 0]
            nearest = min(fits, key=lambda h: abs(h - config.n_heads))
            raise UserError(f"n_heads must divide d_model = {d_model}, got {config.n_heads}; nearest: {nearest}")
        self.n_heads, self.d_head = config.n_heads, d_model // config.n_heads
        if positions == "rope" and self.d_head % 2:
            raise UserError(f"rope needs an even head size, got d_model / n_heads = {self.d_head}")
        self.positions = positions
        self.qkv = nn.Linear(d_model, 3 * d_model, bias=config.qkv_bias)
        self.out = nn.Linear(d_model, d_model)
        self.hook_q, self.hook_k, self.hook_v = HookPoint(), HookPoint(), HookPoint()
        if positions == "rope":
            self.hook_rot_q, self.hook_rot_k = HookPoint(), HookPoint()
        self.hook_attn_scores, self.hook_pattern, self.hook_phi = HookPoint(), HookPoint(), HookPoint()
        self.hook_z = HookPoint()

    def forward(self, x: Float[Tensor, "batch pos d_model"]) -> Float[Tensor, "batch pos d_model"]:
        q, k, v = self._project(x)
        q, k = self._place(self.hook_q(q), self.hook_k(k))
        bias = self._bias(x)
        listened = wanted(self.hook_attn_scores, self.hook_pattern)

        def phi() -> Float[Tensor, "batch head dest src"]:
            scores = self.hook_attn_scores(causal_scores(q, k, bias))
            pattern: Tensor = self.hook_pattern(scores.softmax(dim=-1))
            return pattern

        def fused(v: Heads) -> Heads:
            if listened:
                return torch.einsum("bhij,bjhd->bihd", phi(), v)
            return fused_attention(q, k, v, bias)

        z = mix(self, v, phi=phi, fused=fused)
        out: Tensor = self.out(rearrange(z, "batch pos head d_head -> batch pos (head d_head)"))
        return out

    def factors(self, x: Float[Tensor, "batch pos d_model"]) -> list[Factor]:
        """The pattern, past all hooks."""
        q, k, _ = self._project(x)
        if self.positions == "rope":
            q, k = rotate(q), rotate(k)
        pattern = causal_scores(q, k, self._bias(x)).softmax(dim=-1)
        return [Factor("pattern", self.n_heads, lambda heads: pattern[:, heads])]

    def _place(self, q: Heads, k: Heads) -> tuple[Heads, Heads]:
        """Queries and keys with their positions, where the encoding lives in them."""
        if self.positions != "rope":
            return q, k
        return self.hook_rot_q(rotate(q)), self.hook_rot_k(rotate(k))

    def _project(self, x: Float[Tensor, "batch pos d_model"]) -> tuple[Heads, Heads, Heads]:
        q, k, v = rearrange(
            self.qkv(x), "batch pos (three head d_head) -> three batch pos head d_head", three=3, head=self.n_heads
        )
        return q, k, v

    def _bias(self, x: Float[Tensor, "batch pos d_model"]) -> Float[Tensor, "head dest src"] | None:
        if self.positions != "alibi":
            return None
        return alibi(self.n_heads, x.shape[1], x.device).to(x.dtype)

    def mixing_flops(self, length: int) -> int:
        """Of QKᵀ and of the pattern times V, forward, a token, averaged over causal rows."""
        return 2 * (length + 1) * self.n_heads * self.d_head

    # TransformerLens's names for the weights, as views [head, d_model, d_head] and [head, d_head, d_model].

    @property
    def W_Q(self) -> Float[Tensor, "head d_model d_head"]:
        return self._weight(0)

    @property
    def W_K(self) -> Float[Tensor, "head d_model d_head"]:
        return self._weight(1)

    @property
    def W_V(self) -> Float[Tensor, "head d_model d_head"]:
        return self._weight(2)

    @property
    def W_O(self) -> Float[Tensor, "head d_head d_model"]:
        return rearrange(self.out.weight, "d_model (head d_head) -> head d_head d_model", head=self.n_heads)

    def _weight(self, which: int) -> Float[Tensor, "head d_model d_head"]:
        return rearrange(
            self.qkv.weight.chunk(3)[which], "(head d_head) d_model -> head d_model d_head", head=self.n_heads
        )
