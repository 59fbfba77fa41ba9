"""One layer of a model: a token mixer, then an MLP or nothing, each on a pre-norm residual branch."""

from typing import Any

import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from circuitscope.hooks import hook
from circuitscope.mixers import MixerConfig, MixerState, build_mixer
from circuitscope.models.config import ModelConfig
from circuitscope.models.norm import HookedLayerNorm


class MLP(nn.Module):
    """W_out gelu(W_in x)."""

    def __init__(self, d_model: int, d_hidden: int):
        super().__init__()
        self.into = nn.Linear(d_model, d_hidden)
        self.out = nn.Linear(d_hidden, d_model)
        self.hook_pre, self.hook_post = hook("batch pos d_mlp"), hook("batch pos d_mlp")

    def forward(self, x: Float[Tensor, "*lead d_model"]) -> Float[Tensor, "*lead d_model"]:
        out: Tensor = self.out(self.hook_post(F.gelu(self.hook_pre(self.into(x)))))
        return out


class Block(nn.Module):
    """x + mixer(ln1(x)), then + mlp(ln2(·)) if there is an MLP."""

    def __init__(self, config: ModelConfig, mixer: MixerConfig):
        super().__init__()
        self.hook_resid_pre = hook("batch pos d_model")
        self.ln1 = HookedLayerNorm(config.d_model, config.norm_eps)
        self.mixer: Any = build_mixer(mixer, config.d_model, config.positions)
        self.hook_mixer_out = hook("batch pos d_model")
        self.has_mlp = config.state_mixer == "mlp"
        if self.has_mlp:
            self.hook_resid_mid = hook("batch pos d_model")
            self.ln2 = HookedLayerNorm(config.d_model, config.norm_eps)
            self.mlp = MLP(config.d_model, config.mlp_ratio * config.d_model)
            self.hook_mlp_out = hook("batch pos d_model")
        self.hook_resid_post = hook("batch pos d_model")

    @property
    def attn(self) -> Any:
        """TransformerLens's name for an attention mixer."""
        return self.mixer

    def mixer_input(self, resid: Float[Tensor, "batch pos d_model"]) -> Float[Tensor, "batch pos d_model"]:
        """What the mixer reads: the normalized residual stream."""
        out: Tensor = self.ln1(self.hook_resid_pre(resid))
        return out

    def forward(
        self, resid: Float[Tensor, "batch pos d_model"], at: Int[Tensor, " label"] | None = None
    ) -> Float[Tensor, "*lead d_model"]:
        """With `at` (flat indices row · length + pos), everything after the mixer runs at these positions only."""
        resid = self.hook_resid_pre(resid)
        return self._after_mixer(resid, self.mixer(self.ln1(resid)), at)

    def step(
        self, resid: Float[Tensor, "batch pos d_model"], state: MixerState, at: Int[Tensor, " label"] | None = None
    ) -> tuple[Float[Tensor, "*lead d_model"], MixerState]:
        """The block on positions that follow those of its mixer's state, and the state after them."""
        resid = self.hook_resid_pre(resid)
        mixed, state = self.mixer.step(self.ln1(resid), state)
        return self._after_mixer(resid, mixed, at), state

    def _after_mixer(self, resid: Tensor, mixed: Tensor, at: Tensor | None) -> Tensor:
        mixed = self.hook_mixer_out(mixed)
        if at is not None:
            resid, mixed = (x.flatten(0, 1).index_select(0, at) for x in (resid, mixed))
        resid = resid + mixed
        if self.has_mlp:
            resid = self.hook_resid_mid(resid)
            resid = resid + self.hook_mlp_out(self.mlp(self.ln2(resid)))
        out: Tensor = self.hook_resid_post(resid)
        return out
