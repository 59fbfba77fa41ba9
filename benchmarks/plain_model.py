"""The model once more, as one writes it without hooks: parameters by the same names, so weights load.

With `MaterializedAttention` it is the reference of the training step; with our fused kernel it is
the hook-free copy.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from circuitscope.models.config import ModelConfig
from circuitscope.models.stack import HookedStack

Heads = Float[Tensor, "batch pos head d_head"]


class MaterializedAttention(nn.Module):
    """softmax(QKᵀ/√d + mask) V with the pattern in memory; the mask is made once."""

    mask: Tensor

    def __init__(self, length: int):
        super().__init__()
        mask = torch.full((length, length), float("-inf")).triu(1)
        self.register_buffer("mask", mask, persistent=False)

    def forward(self, q: Heads, k: Heads, v: Heads) -> Heads:
        scores = torch.einsum("bthd,bshd->bhts", q * q.shape[-1] ** -0.5, k) + self.mask
        return torch.einsum("bhts,bshd->bthd", scores.softmax(dim=-1), v)


class Mixer(nn.Module):
    """Query, key and value projections, attention, output projection."""

    def __init__(self, d_model: int, n_heads: int, attend: Callable[[Heads, Heads, Heads], Heads]):
        super().__init__()
        self.heads = (n_heads, d_model // n_heads)
        self.qkv = nn.Linear(d_model, 3 * d_model)
        self.out = nn.Linear(d_model, d_model)
        self.attend = attend

    def forward(self, x: Float[Tensor, "batch pos d_model"]) -> Float[Tensor, "batch pos d_model"]:
        q, k, v = (part.unflatten(-1, self.heads) for part in self.qkv(x).chunk(3, dim=-1))
        out: Tensor = self.out(self.attend(q, k, v).flatten(2))
        return out


class MLP(nn.Module):
    """W_out gelu(W_in x)."""

    def __init__(self, d_model: int, d_hidden: int):
        super().__init__()
        self.into = nn.Linear(d_model, d_hidden)
        self.out = nn.Linear(d_hidden, d_model)

    def forward(self, x: Float[Tensor, "*lead d_model"]) -> Float[Tensor, "*lead d_model"]:
        out: Tensor = self.out(F.gelu(self.into(x)))
        return out


class Block(nn.Module):
    """Pre-norm attention, pre-norm MLP."""

    def __init__(self, d_model: int, d_hidden: int, n_heads: int, eps: float, attend: Callable[..., Heads]):
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(d_model, eps=eps), nn.LayerNorm(d_model, eps=eps)
        self.mixer = Mixer(d_model, n_heads, attend)
        self.mlp = MLP(d_model, d_hidden)

    def forward(self, x: Float[Tensor, "batch pos d_model"], at: Int[Tensor, " label"] | None = None) -> Tensor:
        mixed = self.mixer(self.ln1(x))
        if at is not None:
            x, mixed = (part.flatten(0, 1).index_select(0, at) for part in (x, mixed))
        x = x + mixed
        out: Tensor = x + self.mlp(self.ln2(x))
        return out


class PlainStack(nn.Module):
    """Read-in with learned positions, blocks, final norm; the weights of `model`. The ends are those of a subclass."""

    def __init__(self, model: HookedStack, attend: Callable[[Heads, Heads, Heads], Heads]):
        super().__init__()
        c = model.config
        if not (c.positions == "learned" and c.state_mixer == "mlp"):
            raise ValueError("a plain model copies models with learned positions and an MLP")
        n_heads = model.cfg.n_heads
        self.build_ends(c)
        self.pos_embed = nn.Parameter(torch.empty(c.max_length, c.d_model))
        self.blocks = nn.ModuleList(
            Block(c.d_model, c.mlp_ratio * c.d_model, n_heads, c.norm_eps, attend) for _ in range(c.n_layers)
        )
        self.ln_final = nn.LayerNorm(c.d_model, eps=c.norm_eps)
        self.load_state_dict(model.state_dict())  # strict: the same parameters or an error

    def build_ends(self, c: ModelConfig) -> None:
        """Makes what `read_in` needs, and a read-out."""
        raise NotImplementedError

    def read_in(self, inputs: Tensor) -> Float[Tensor, "batch pos d_model"]:
        """The inputs as the first block takes them, without positions."""
        raise NotImplementedError

    def hidden(self, inputs: Tensor, at: Int[Tensor, " label"] | None = None) -> Tensor:
        """What the read-out reads."""
        x = self.read_in(inputs) + self.pos_embed[: inputs.shape[1]]
        last = len(self.blocks) - 1
        for i, block in enumerate(self.blocks):
            x = block(x, at if i == last else None)
        out: Tensor = self.ln_final(x)
        return out


class PlainLM(PlainStack):
    """Embedding and tied unembedding."""

    def build_ends(self, c: ModelConfig) -> None:
        if not c.tied:
            raise ValueError("PlainLM copies models with a tied head")
        self.embed = nn.Embedding(c.vocab_size, c.d_model)

    def read_in(self, inputs: Int[Tensor, "batch pos"]) -> Float[Tensor, "batch pos d_model"]:
        out: Tensor = self.embed(inputs)
        return out

    def forward(self, tokens: Int[Tensor, "batch pos"], at: Int[Tensor, " label"] | None = None) -> Tensor:
        """Logits at every position, or at the flat positions `at`."""
        return F.linear(self.hidden(tokens, at), self.embed.weight)


class PlainSequenceModel(PlainStack):
    """Linear read-in of vectors and linear read-out."""

    def build_ends(self, c: ModelConfig) -> None:
        if c.d_input is None or c.d_output is None:
            raise ValueError("PlainSequenceModel copies models that read vectors")
        self.encode, self.decode = nn.Linear(c.d_input, c.d_model), nn.Linear(c.d_model, c.d_output)

    def read_in(self, inputs: Float[Tensor, "batch pos d_input"]) -> Float[Tensor, "batch pos d_model"]:
        out: Tensor = self.encode(inputs)
        return out

    def forward(self, inputs: Float[Tensor, "batch pos d_input"]) -> Float[Tensor, "batch pos d_output"]:
        """Answers at every position."""
        out: Tensor = self.decode(self.hidden(inputs))
        return out
