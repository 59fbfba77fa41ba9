"""Someone else's model: TransformerLens's hook names, nothing of this package."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformer_lens import HookedRootModule
from transformer_lens.hook_points import HookPoint

import circuitscope as cs


class ForeignAttention(nn.Module):
    def __init__(self, qkv: nn.Linear, out: nn.Linear, n_heads: int):
        super().__init__()
        self.qkv, self.out, self.n_heads = qkv, out, n_heads
        self.hook_v, self.hook_pattern, self.hook_z = HookPoint(), HookPoint(), HookPoint()

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (u.unflatten(-1, (self.n_heads, -1)) for u in self.qkv(x).chunk(3, dim=-1))
        scores = torch.einsum("bihd,bjhd->bhij", q, k) / q.shape[-1] ** 0.5
        hidden = torch.ones_like(scores, dtype=torch.bool).triu(1)
        pattern = self.hook_pattern(scores.masked_fill(hidden, -torch.inf).softmax(-1))
        return self.out(self.hook_z(torch.einsum("bhij,bjhd->bihd", pattern, self.hook_v(v))).flatten(2))


class ForeignBlock(nn.Module):
    def __init__(self, norm: nn.LayerNorm, attn: ForeignAttention):
        super().__init__()
        self.ln1, self.attn = norm, attn
        self.hook_resid_pre, self.hook_attn_out, self.hook_resid_post = HookPoint(), HookPoint(), HookPoint()

    def forward(self, x: Tensor) -> Tensor:
        x = self.hook_resid_pre(x)
        return self.hook_resid_post(x + self.hook_attn_out(self.attn(self.ln1(x))))


class Foreign(HookedRootModule):
    """An attention-only transformer with the weights of a HookedLM (learned positions, no MLP, not tied)."""

    def __init__(self, model: cs.HookedLM):
        super().__init__()
        self.tokens, self.positions, self.unembed = model.embed, model.pos_embed, model.unembed
        self.ln_final = _plain(model.ln_final)
        self.blocks = nn.ModuleList(
            ForeignBlock(_plain(b.ln1), ForeignAttention(b.mixer.qkv, b.mixer.out, b.mixer.n_heads))
            for b in model.layers
        )
        self.setup()

    def forward(self, tokens: Tensor) -> Tensor:
        x = F.embedding(tokens, self.tokens.weight) + self.positions[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.unembed(self.ln_final(x))


def _plain(norm: nn.LayerNorm) -> nn.LayerNorm:
    out = nn.LayerNorm(norm.normalized_shape, eps=norm.eps)
    out.weight, out.bias = norm.weight, norm.bias
    return out
