"""HookedLM, the model that reads tokens: it gives logits, and has a named hook for every activation in between."""

import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from circuitscope.arguments import explained
from circuitscope.errors import UserError
from circuitscope.models.config import ModelConfig
from circuitscope.models.generation import generate, why_no_steps
from circuitscope.models.inputs import InputsLike, as_tokens
from circuitscope.models.stack import HookedStack


class HookedLM(HookedStack):
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

    def _build_read_in(self, config: ModelConfig) -> None:
        self.embed = nn.Embedding(config.vocab_size, config.d_model)

    def _build_read_out(self, config: ModelConfig) -> None:
        if not config.tied:
            self.unembed = nn.Linear(config.d_model, config.vocab_size, bias=False)

    def _initialize_read_in(self, config: ModelConfig) -> None:
        nn.init.normal_(self.embed.weight, std=config.embed_std)

    @property
    def d_out(self) -> int:
        return self.config.vocab_size

    @property
    def end_parameters(self) -> int:
        return self.embed.weight.numel() * (1 if self.config.tied else 2)

    @property
    def end_weights(self) -> int:
        return self.embed.weight.numel() if self.config.tied else 0

    @property
    def W_U(self) -> Float[Tensor, "d_model vocab"]:
        """Unembedding matrix."""
        return (self.embed.weight if self.config.tied else self.unembed.weight).T

    def to_tokens(self, tokens: InputsLike) -> Int[Tensor, "batch pos"]:
        """Token numbers as a tensor [batch, pos] on the model's device. The model has no tokenizer."""
        return as_tokens(tokens, self.device)

    def to_inputs(self, inputs: InputsLike) -> Int[Tensor, "batch pos"]:
        return self.to_tokens(inputs)

    def read_out(self, hidden: Float[Tensor, "*lead d_model"]) -> Float[Tensor, "*lead vocab"]:
        """Logits, by the unembedding."""
        return F.linear(hidden, self.W_U.T)

    @explained
    def generate(
        self, tokens: InputsLike, n: int, *, temperature: float = 0.0, seed: int = 0, stop: int | None = None
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

    def read_in(self, inputs: Int[Tensor, "batch pos"]) -> Float[Tensor, "batch pos d_model"]:
        """The embeddings of the tokens."""
        try:
            found: Tensor = self.embed(inputs)
        except IndexError:
            last = self.config.vocab_size - 1
            wrong = int(inputs[(inputs < 0) | (inputs > last)][0])
            raise UserError(f"token {wrong}, but the model has tokens 0 to {last}") from None
        return found
