"""HookedLM, the model: it takes tokens, gives logits, and has a named hook for every activation in between."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from circuitscope.arguments import explained
from circuitscope.errors import UserError, described
from circuitscope.hooks import hook
from circuitscope.kernels import forks
from circuitscope.lens import (
    Cache,
    HookedRootModule,
    HookNames,
    HookPoint,
    NamesFilter,
    layer_index,
    resolve_filter,
)
from circuitscope.mixers.positions import sinusoidal
from circuitscope.mixers.reading import Reading
from circuitscope.models.block import Block
from circuitscope.models.config import ModelConfig
from circuitscope.models.generation import ModelState, generate, start, state_at, through_layers, why_no_steps
from circuitscope.models.norm import HookedLayerNorm
from circuitscope.models.tokens import TokensLike, as_tokens


@dataclass
class LensConfig:
    """What TransformerLens's tools read from `model.cfg`."""

    n_layers: int
    n_heads: int
    n_key_value_heads: int | None
    d_head: int
    d_model: int
    d_vocab: int
    n_ctx: int
    d_mlp: int | None
    attn_only: bool
    device: torch.device
    dtype: torch.dtype
    normalization_type: str = "LN"
    act_fn: str = "gelu"
    model_name: str = "circuitscope"
    original_architecture: str = "HookedLM"


class HookedLM(HookedRootModule):
    """Embedding (+ positions), blocks, final norm, unembedding (no bias, tied by default).

    It is a TransformerLens HookedRootModule: `run_with_hooks`, `run_with_cache`, `hooks` and
    `transformer_lens.patching` work on it (patching needs `model.eval()`). Every mixer answers to the names
    `blocks.i.attn.hook_*` and `blocks.i.hook_attn_out` as well as to this package's `mixer` names.

    Tokens may be a tensor, an array or lists of numbers, [batch, pos] or one sequence [pos], on any device.

    `run_with_cache` returns an ActivationCache. Some of its methods do not work here:
    `logit_attrs` and `get_full_resid_decomposition` (they need a tokenizer's residual directions and the
    accumulated biases of TransformerLens's own models), `compute_ssm_effective_attention` and
    `compute_ssm_state` (they look for its own SSM wrappers; use `hook_phi` and `hook_state` instead),
    `stack_neuron_results` and `get_neuron_results` (they expect the weight layout of its MLP), and
    `logit_lens` (it needs an `unembed` module). If a stack has mixers other than attention, the
    per-head methods (`stack_head_results`, `compute_head_results`) do not work either.
    """

    def __init__(self, config: ModelConfig, seed: int = 0):
        super().__init__()
        self.config = config
        forks.computing()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self._build(config)
            self._initialize(config)
        self.setup()  # type: ignore[no-untyped-call]
        self.mod_dict = HookNames(self.hook_dict)
        self.aliases = self._alias_mixers()
        self.on_demand = frozenset(name for name, point in self.hook_dict.items() if getattr(point, "on_demand", False))

    def _build(self, config: ModelConfig) -> None:
        self.embed = nn.Embedding(config.vocab_size, config.d_model)
        self.hook_embed = hook("batch pos d_model")
        if config.positions == "learned":
            self.pos_embed = nn.Parameter(torch.empty(config.max_length, config.d_model))
        elif config.positions == "sinusoidal":
            self.register_buffer("pos_embed", sinusoidal(config.max_length, config.d_model), persistent=False)
        if config.positions in ("learned", "sinusoidal"):
            self.hook_pos_embed = hook("batch pos d_model")
        self.blocks = nn.ModuleList(Block(config, mixer) for mixer in config.mixers)
        for i, block in enumerate(self.layers):  # what a mixer's initialization needs besides its own config
            if hasattr(block.mixer, "set_depth"):
                block.mixer.set_depth(i, config.n_layers)
            if hasattr(block.mixer, "set_length"):
                block.mixer.set_length(config.max_length)
        self.ln_final = HookedLayerNorm(config.d_model, config.norm_eps)
        if not config.tied:
            self.unembed = nn.Linear(config.d_model, config.vocab_size, bias=False)

    def _initialize(self, config: ModelConfig) -> None:
        """Linear maps start at N(0, 0.02) with zero biases (`gpt2`) or as in torch (`native`, `mimetic`).

        With `mimetic`, a mixer that can start as linear attention then does so. Embeddings start at N(0, embed_std).
        Modules with a true `own_init` keep what their mixer gave them. With `rescale_residual`, output projections
        shrink by 1/√(residual branches), of which each layer has as many as `residual_branches` says, or two under
        gpt2 with an MLP, and otherwise one.
        """
        nn.init.normal_(self.embed.weight, std=config.embed_std)
        if config.positions == "learned":
            nn.init.normal_(self.pos_embed, std=config.embed_std)
        if config.init == "gpt2":
            for module in self.modules():
                if isinstance(module, nn.Linear) and not getattr(module, "own_init", False):
                    nn.init.normal_(module.weight, std=0.02)
                    if module.bias is not None:
                        nn.init.zeros_(module.bias)
        if config.init == "mimetic":
            for block, mixer in zip(self.layers, config.mixers, strict=True):
                if mixer.has_mimetic_start:
                    block.mixer.start_mimetic(config.max_length)
        if config.rescale_residual:
            branches = config.residual_branches or (2 if config.init == "gpt2" and config.state_mixer == "mlp" else 1)
            with torch.no_grad():
                for block in self.layers:
                    block.mixer.out.weight.mul_((branches * config.n_layers) ** -0.5)
                    if block.has_mlp:
                        block.mlp.out.weight.mul_((branches * config.n_layers) ** -0.5)

    def _alias_mixers(self) -> dict[str, str]:
        """A mapping from TransformerLens's hook names, which call every mixer attention, to this package's."""
        aliases: dict[str, str] = {}
        for i, block in enumerate(self.layers):
            aliases[f"blocks.{i}.hook_attn_out"] = f"blocks.{i}.hook_mixer_out"
            for name, module in block.mixer.named_modules():
                if isinstance(module, HookPoint):
                    aliases[f"blocks.{i}.attn.{name}"] = f"blocks.{i}.mixer.{name}"
        for alias, name in aliases.items():
            self.mod_dict[alias] = self.mod_dict[name]
        return aliases

    @property
    def layers(self) -> list[Block]:
        """The blocks, with their type."""
        return list(self.blocks)  # type: ignore[arg-type]

    @property
    def cfg(self) -> LensConfig:
        """The model's sizes under TransformerLens's names."""
        c, mixer = self.config, self.layers[0].mixer
        return LensConfig(
            n_layers=c.n_layers,
            n_heads=mixer.n_heads,
            n_key_value_heads=None,
            d_head=mixer.d_head,
            d_model=c.d_model,
            d_vocab=c.vocab_size,
            n_ctx=c.max_length,
            d_mlp=c.mlp_ratio * c.d_model if c.state_mixer == "mlp" else None,
            attn_only=c.state_mixer == "none",
            device=self.embed.weight.device,
            dtype=self.embed.weight.dtype,
        )

    @property
    def W_U(self) -> Float[Tensor, "d_model vocab"]:
        """Unembedding matrix."""
        return (self.embed.weight if self.config.tied else self.unembed.weight).T

    def to_tokens(self, tokens: TokensLike) -> Int[Tensor, "batch pos"]:
        """Token numbers as a tensor [batch, pos] on the model's device. The model has no tokenizer."""
        return as_tokens(tokens, self.embed.weight.device)

    def forward(
        self,
        tokens: TokensLike,
        at: Int[Tensor, " label"] | None = None,
        *,
        initial_state: ModelState | None = None,
    ) -> Float[Tensor, "*lead vocab"]:
        """Logits [batch, pos, vocab]; with `at`, logits [label, vocab] at those flat positions only.

        `at` holds indices row · length + pos, as `Batch.labelled()` gives them. It saves work and changes no
        logit: everything after the last mixer, including the unembedding, runs at those positions only, so
        hooks there see [label, …] instead of [batch, pos, …].

        With an `initial_state` the tokens follow those that the state has read. Then the recurrent steps compute, in
        plain torch and not by the fused kernels; hooks on Φ, on convs' matrices and on states are refused.
        """
        return F.linear(self.hidden(tokens, at, initial_state=initial_state), self.W_U.T)

    def hidden(
        self,
        tokens: TokensLike,
        at: Int[Tensor, " label"] | None = None,
        *,
        initial_state: ModelState | None = None,
    ) -> Float[Tensor, "*lead d_model"]:
        """What the unembedding reads: the final norm's output."""
        if at is not None and not isinstance(at, Tensor):
            raise UserError(f"at: expected a tensor of flat positions, as batch.labelled() gives, got {described(at)}")
        if initial_state is None:
            resid = self.layers[-1](self.stream_before(tokens, self.config.n_layers - 1), at)
        else:
            resid, _ = through_layers(self, self.to_tokens(tokens), initial_state, at)
        out: Tensor = self.ln_final(resid)
        return out

    def start(self, batch: int = 1) -> ModelState:
        """The state before the first position, for a batch of sequences."""
        return start(self, batch)

    def step(self, tokens: TokensLike, state: ModelState) -> tuple[Float[Tensor, "batch pos vocab"], ModelState]:
        """Logits of one or more tokens that follow those of a state, and the state after them.

        Gradients flow to the state that is given and out of the one that is returned.
        """
        resid, after = through_layers(self, self.to_tokens(tokens), state)
        return F.linear(self.ln_final(resid), self.W_U.T), after

    def state_at(self, tokens: TokensLike, pos: int) -> ModelState:
        """The state in which position `pos` finds the model: `model(tokens[:, pos:], initial_state=…)` goes on from it.

        It holds all that the model keeps of tokens[:, :pos], the tails of convs and shifts included.
        """
        return state_at(self, self.to_tokens(tokens), pos)

    @explained
    def generate(
        self, tokens: TokensLike, n: int, *, temperature: float = 0.0, seed: int = 0, stop: int | None = None
    ) -> Int[Tensor, "batch pos"]:
        """The tokens, followed by n more, each of which the model says after those before it.

        Args:
            tokens: prompts of one length.
            temperature: 0 takes the likeliest token; otherwise tokens are drawn from softmax(logits / temperature).
            seed: of the draws; the same seed draws the same tokens.
            stop: a sequence that has said this token goes on with nothing else.
        """
        return generate(self, self.to_tokens(tokens), n, temperature, seed, stop)

    @property
    def cannot_generate(self) -> str:
        """Why the model cannot generate, in one sentence; "" if it can."""
        return why_no_steps(self)

    def stream_before(self, tokens: TokensLike, layer: int) -> Float[Tensor, "batch pos d_model"]:
        """The residual stream that enters a layer."""
        resid = self.embedded(tokens)
        for block in self.layers[:layer]:
            resid = block(resid)
        return resid

    def reading(self, tokens: TokensLike, layer: int) -> Reading:
        """How a layer describes itself on these tokens; −1 is the last layer."""
        layer = layer_index(self, layer)
        block = self.layers[layer]
        found: Reading = block.mixer.reading(block.mixer_input(self.stream_before(tokens, layer)))
        return found

    def embedded(self, tokens: TokensLike, first: int = 0) -> Float[Tensor, "batch pos d_model"]:
        """The residual stream before the first layer; `first` is the position of the first token."""
        tokens = self.to_tokens(tokens)
        self.check_length(first + tokens.shape[1])
        resid: Tensor = self.hook_embed(self._looked_up(tokens))
        if self.config.positions in ("learned", "sinusoidal"):
            resid = resid + self.hook_pos_embed(self.pos_embed[first : first + tokens.shape[1]].expand_as(resid))
        return F.dropout(resid, self.config.embed_dropout, self.training) if self.config.embed_dropout else resid

    def _looked_up(self, tokens: Int[Tensor, "batch pos"]) -> Float[Tensor, "batch pos d_model"]:
        try:
            found: Tensor = self.embed(tokens)
        except IndexError:
            last = self.config.vocab_size - 1
            wrong = int(tokens[(tokens < 0) | (tokens > last)][0])
            raise UserError(f"token {wrong}, but the model has tokens 0 to {last}") from None
        return found

    def check_length(self, length: int) -> None:
        """Refuses a sequence that is longer than the positions that are added to the stream."""
        limited = self.config.positions in ("learned", "sinusoidal")
        if limited and length > self.config.max_length:
            raise UserError(
                f"sequence of {length} positions, but the model has {self.config.positions} positions"
                f" for {self.config.max_length}; build it with max_length={length}"
            )

    def run_with_cache(  # type: ignore[override]
        self, *args: Any, names_filter: NamesFilter = None, remove_batch_dim: bool = False, **kwargs: Any
    ) -> tuple[Tensor, Cache]:
        """The output, and an ActivationCache of the named hooks (by default all but per-channel Φ and states)."""
        names = resolve_filter(names_filter, self.hook_dict, self.aliases, self.on_demand)
        out, cache = super().run_with_cache(*args, names_filter=names, remove_batch_dim=remove_batch_dim, **kwargs)
        return out, Cache(cache, self, self.aliases, has_batch_dim=not remove_batch_dim)
