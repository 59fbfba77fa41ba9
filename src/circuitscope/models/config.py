"""The model part of a run's config."""

from typing import Any, Literal

from pydantic import Field, SerializeAsAny, field_validator, model_validator

from circuitscope.errors import UserError
from circuitscope.mixers import MixerConfig, mixer_config
from circuitscope.models.presets import expand_preset
from circuitscope.section import Section

Positions = Literal["none", "learned", "sinusoidal", "rope", "alibi"]


class ModelConfig(Section):
    """A stack of pre-norm residual blocks with one token mixer each, over an embedding that is tied by default.

    The input may name a `preset` instead of mixers; then `n_layers` counts layers as that preset does.
    """

    mixers: tuple[SerializeAsAny[MixerConfig], ...] = Field(
        default=("attention",), validate_default=True, description="one mixer per layer, or one for all layers"
    )  # type: ignore[assignment]
    n_layers: int = Field(default=2, ge=1, le=1024, strict=True, description="number of layers")
    d_model: int = Field(default=64, ge=1, le=2**20, description="width of the residual stream")
    positions: Positions = Field(
        default="learned",
        description="positional encoding; by default learned if every mixer is blind to order, otherwise none",
    )
    state_mixer: Literal["mlp", "none"] = Field(default="mlp", description="what follows the token mixer in a layer")
    mlp_ratio: int = Field(default=4, ge=1, le=1024, description="MLP width divided by d_model")
    init: Literal["gpt2", "native"] = Field(
        default="gpt2",
        description="gpt2: N(0, 0.02) and zero biases for every linear map; native: torch's own initialization;"
        " by default gpt2 if it is the default of every mixer, otherwise native",
    )
    embed_std: float = Field(default=0.02, gt=0, description="initial spread of token and position embeddings")
    rescale_residual: bool = Field(
        default=False,
        description="divide the initial output projections by the root of the number of residual branches;"
        " by default this is done if the initialization is native",
    )
    tied: bool = Field(default=True, description="the unembedding shares the embedding's weight")
    norm_eps: float = Field(default=1e-5, gt=0, description="epsilon of the layer norms")
    vocab_size: int = Field(default=8192, ge=2, lt=2**31, description="number of tokens; in a run the task gives it")
    max_length: int = Field(default=64, ge=1, le=2**31, description="number of positions; in a run the task gives it")

    @model_validator(mode="before")
    @classmethod
    def _one_mixer_per_layer(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        data = expand_preset(data)
        mixers = data["mixers"]
        default = cls.model_fields["n_layers"].default if len(mixers) == 1 else len(mixers)
        layers = data.setdefault("n_layers", default)
        if isinstance(layers, int) and 1 <= layers <= 1024:
            if len(mixers) not in (1, layers):
                raise UserError(
                    f"model.mixers: {len(mixers)} mixers for n_layers = {layers}; give one, or one per layer"
                )
            if len(mixers) == 1:
                mixers = mixers * layers
        data["mixers"] = mixers
        configs = [mixer_config(m) for m in mixers]
        if not all(config.blind_to_order for config in configs):
            data.setdefault("positions", "none")
        if not all(config.default_init == "gpt2" for config in configs):
            data.setdefault("init", "native")
            data.setdefault("rescale_residual", data["init"] == "native")
        return data

    @model_validator(mode="after")
    def _positions_reach_a_mixer(self) -> "ModelConfig":
        inside = self.positions in ("rope", "alibi")
        if inside and not any(self.positions in mixer.positions_inside for mixer in self.mixers):
            names = ", ".join(dict.fromkeys(mixer.name for mixer in self.mixers))
            raise UserError(
                f"model.positions: {self.positions} acts inside attention, and {names} would ignore it;"
                " expected learned, sinusoidal or none"
            )
        return self

    @field_validator("mixers", mode="before")
    @classmethod
    def _mixers(cls, value: Any) -> tuple[MixerConfig, ...]:
        return tuple(mixer_config(m) for m in value)
