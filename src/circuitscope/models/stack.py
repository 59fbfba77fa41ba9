"""HookedStack, what all models share: layers between a read-in and a read-out, with a hook for every activation.

HookedLM reads tokens and HookedSequenceModel reads vectors; each says what its read-in and read-out are.
"""

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

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
from circuitscope.models.generation import ModelState, start, state_at, through_layers
from circuitscope.models.inputs import InputsLike
from circuitscope.models.norm import HookedLayerNorm


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
    original_architecture: str = "HookedStack"


class HookedStack(HookedRootModule):
    """Read-in (+ positions), blocks, final norm, read-out.

    It is a TransformerLens HookedRootModule: `run_with_hooks`, `run_with_cache`, `hooks` and
    `transformer_lens.patching` work on it (patching needs `model.eval()`). Every mixer answers to the names
    `blocks.i.attn.hook_*` and `blocks.i.hook_attn_out` as well as to this package's `mixer` names.
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
        self._build_read_in(config)
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
        self._build_read_out(config)

    @abstractmethod
    def _build_read_in(self, config: ModelConfig) -> None:
        """Makes the modules that turn inputs into the residual stream."""

    @abstractmethod
    def _build_read_out(self, config: ModelConfig) -> None:
        """Makes the modules that turn the final norm's output into what the model gives."""

    @abstractmethod
    def _initialize_read_in(self, config: ModelConfig) -> None:
        """Gives the read-in its first weights."""

    @abstractmethod
    def to_inputs(self, inputs: InputsLike) -> Tensor:
        """Inputs in any form as the tensor [batch, pos, …] that the model reads, on its device."""

    @abstractmethod
    def read_in(self, inputs: Tensor) -> Float[Tensor, "batch pos d_model"]:
        """What the inputs are in the residual stream."""

    @abstractmethod
    def read_out(self, hidden: Float[Tensor, "*lead d_model"]) -> Float[Tensor, "*lead out"]:
        """What the model gives, from the final norm's output."""

    @property
    @abstractmethod
    def d_out(self) -> int:
        """The width of what the model gives."""

    @property
    @abstractmethod
    def end_parameters(self) -> int:
        """How many parameters the read-in and the read-out have."""

    @property
    @abstractmethod
    def end_weights(self) -> int:
        """How many weights of read-in and read-out each position is multiplied by that no `nn.Linear` holds."""

    def _initialize(self, config: ModelConfig) -> None:
        """Linear maps start at N(0, 0.02) with zero biases (`gpt2`) or as in torch (`native`, `mimetic`).

        With `mimetic`, a mixer that can start as linear attention then does so. Embeddings start at N(0, embed_std).
        Modules with a true `own_init` keep what their mixer gave them, and the read-in and read-out of vectors what
        torch gave them. With `rescale_residual`, output projections shrink by 1/√(residual branches), of which each
        layer has as many as `residual_branches` says, or two under gpt2 with an MLP, and otherwise one.
        """
        self._initialize_read_in(config)
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
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.ln_final.weight.device

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
            d_vocab=self.d_out,
            n_ctx=c.max_length,
            d_mlp=c.mlp_ratio * c.d_model if c.state_mixer == "mlp" else None,
            attn_only=c.state_mixer == "none",
            device=self.device,
            dtype=self.ln_final.weight.dtype,
            original_architecture=type(self).__name__,
        )

    def forward(
        self,
        inputs: InputsLike,
        at: Int[Tensor, " label"] | None = None,
        *,
        initial_state: ModelState | None = None,
    ) -> Float[Tensor, "*lead out"]:
        """What the model gives [batch, pos, out]; with `at`, [label, out] at those flat positions only.

        `at` holds indices row · length + pos, as `Batch.labelled()` gives them. It saves work and changes no
        number: everything after the last mixer, including the read-out, runs at those positions only, so
        hooks there see [label, …] instead of [batch, pos, …].

        With an `initial_state` the inputs follow those that the state has read. Then the recurrent steps compute, in
        plain torch and not by the fused kernels; hooks on Φ, on convs' matrices and on states are refused.
        """
        return self.read_out(self.hidden(inputs, at, initial_state=initial_state))

    def hidden(
        self,
        inputs: InputsLike,
        at: Int[Tensor, " label"] | None = None,
        *,
        initial_state: ModelState | None = None,
    ) -> Float[Tensor, "*lead d_model"]:
        """What the read-out reads: the final norm's output."""
        if at is not None and not isinstance(at, Tensor):
            raise UserError(f"at: expected a tensor of flat positions, as batch.labelled() gives, got {described(at)}")
        if initial_state is None:
            resid = self.layers[-1](self.stream_before(inputs, self.config.n_layers - 1), at)
        else:
            resid, _ = through_layers(self, self.to_inputs(inputs), initial_state, at)
        out: Tensor = self.ln_final(resid)
        return out

    def start(self, batch: int = 1) -> ModelState:
        """The state before the first position, for a batch of sequences."""
        return start(self, batch)

    def step(self, inputs: InputsLike, state: ModelState) -> tuple[Float[Tensor, "batch pos out"], ModelState]:
        """What the model gives for one or more inputs that follow those of a state, and the state after them.

        Gradients flow to the state that is given and out of the one that is returned.
        """
        resid, after = through_layers(self, self.to_inputs(inputs), state)
        return self.read_out(self.ln_final(resid)), after

    def state_at(self, inputs: InputsLike, pos: int) -> ModelState:
        """The state in which position `pos` finds the model: `model(inputs[:, pos:], initial_state=…)` goes on from it.

        It holds all that the model keeps of inputs[:, :pos], the tails of convs and shifts included.
        """
        return state_at(self, self.to_inputs(inputs), pos)

    def stream_before(self, inputs: InputsLike, layer: int) -> Float[Tensor, "batch pos d_model"]:
        """The residual stream that enters a layer."""
        resid = self.embedded(inputs)
        for block in self.layers[:layer]:
            resid = block(resid)
        return resid

    def reading(self, inputs: InputsLike, layer: int) -> Reading:
        """How a layer describes itself on these inputs; −1 is the last layer."""
        layer = layer_index(self, layer)
        block = self.layers[layer]
        found: Reading = block.mixer.reading(block.mixer_input(self.stream_before(inputs, layer)))
        return found

    def embedded(self, inputs: InputsLike, first: int = 0) -> Float[Tensor, "batch pos d_model"]:
        """The residual stream before the first layer; `first` is the position of the first input."""
        inputs = self.to_inputs(inputs)
        self.check_length(first + inputs.shape[1])
        resid: Tensor = self.hook_embed(self.read_in(inputs))
        if self.config.positions in ("learned", "sinusoidal"):
            resid = resid + self.hook_pos_embed(self.pos_embed[first : first + inputs.shape[1]].expand_as(resid))
        return F.dropout(resid, self.config.embed_dropout, self.training) if self.config.embed_dropout else resid

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
