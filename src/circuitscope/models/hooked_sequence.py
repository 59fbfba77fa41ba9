"""HookedSequenceModel, the model that reads vectors: it gives a vector at each position."""

from jaxtyping import Float
from torch import Tensor, nn

from circuitscope.errors import UserError
from circuitscope.models.config import ModelConfig
from circuitscope.models.inputs import InputsLike, as_vectors
from circuitscope.models.stack import HookedStack


class HookedSequenceModel(HookedStack):
    """Linear read-in (+ positions), blocks, final norm, linear read-out: W_out LN(…(W_in x + b_in)) + b_out.

    The blocks, their hooks and all that `HookedLM` says of them are the same; `hook_embed` carries what the read-in
    gives. Both linear maps start as in torch, whatever `init` says.

    Vectors may be a tensor, an array or lists, [batch, pos, d_input] or one sequence [pos, d_input], on any device.
    """

    def _build_read_in(self, config: ModelConfig) -> None:
        if config.d_input is None or config.d_output is None:
            raise UserError("a model that reads vectors needs d_input and d_output")
        self.encode = nn.Linear(config.d_input, config.d_model)
        self.encode.own_init = True  # type: ignore[assignment]

    def _build_read_out(self, config: ModelConfig) -> None:
        self.decode = nn.Linear(config.d_model, self.d_out)
        self.decode.own_init = True  # type: ignore[assignment]

    def _initialize_read_in(self, config: ModelConfig) -> None:
        """As torch has done it."""

    @property
    def d_out(self) -> int:
        assert self.config.d_output is not None
        return self.config.d_output

    @property
    def end_parameters(self) -> int:
        return sum(p.numel() for end in (self.encode, self.decode) for p in end.parameters())

    @property
    def end_weights(self) -> int:
        return 0

    def to_inputs(self, inputs: InputsLike) -> Float[Tensor, "batch pos d_input"]:
        return as_vectors(inputs, self.encode.in_features, self.device, self.encode.weight.dtype)

    def read_in(self, inputs: Float[Tensor, "batch pos d_input"]) -> Float[Tensor, "batch pos d_model"]:
        """W_in x + b_in."""
        out: Tensor = self.encode(inputs)
        return out

    def read_out(self, hidden: Float[Tensor, "*lead d_model"]) -> Float[Tensor, "*lead d_output"]:
        """W_out h + b_out."""
        out: Tensor = self.decode(hidden)
        return out
