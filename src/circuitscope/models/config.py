"""The model part of a run's config."""

from typing import Annotated, Any, Literal

from pydantic import Field, SerializeAsAny, field_validator, model_validator

from circuitscope.errors import UserError
from circuitscope.mixers import MIXERS, MixerConfig, RotaryConfig, mixer_config
from circuitscope.models.presets import expand_preset
from circuitscope.section import Added, DefaultBy, Section, Unit

Positions = Literal["none", "learned", "sinusoidal", "rope", "alibi"]


class ModelConfig(Section):
    """A stack of pre-norm residual blocks with one token mixer each, over an embedding that is tied by default
    or, for vectors, between a linear read-in and read-out.

    The input may name a `preset` instead of mixers; then `n_layers` counts layers as that preset does.
    """

    mixers: tuple[SerializeAsAny[MixerConfig], ...] = Field(
        default=("attention",),
        validate_default=True,
        description="token mixers, one per layer or one for all layers: a name, or a mapping with name and options",
    )  # type: ignore[assignment]
    n_layers: Annotated[
        int, Unit("layers"), DefaultBy("one per mixer where several are listed; else the preset's own, for most 2")
    ] = Field(default=2, ge=1, le=1024, strict=True, description="number of layers")
    d_model: Annotated[int, Unit("channels")] = Field(
        default=64, ge=1, le=2**20, description="width of the residual stream"
    )
    positions: Annotated[
        Positions, DefaultBy("rope with a rotary mixer; learned if all are blind to order (as attention is); else none")
    ] = Field(
        default="learned",
        description="what tells the model the order: a learned or sinusoidal vector added at each position, or rope"
        " (rotated queries and keys, also of the delta rules, or C and B of the state-space models) or alibi (scores"
        " that fall with distance, in attention alone)",
    )
    state_mixer: Literal["mlp", "none"] = Field(default="mlp", description="what follows the token mixer in a layer")
    mlp_ratio: Annotated[int, Unit("times d_model")] = Field(
        default=4, ge=1, le=1024, description="hidden width of the MLP"
    )
    init: Annotated[
        Literal["gpt2", "native", "mimetic"],
        DefaultBy("gpt2 if every mixer starts so by default (as attention does), else native"),
    ] = Field(
        default="gpt2",
        description="first weights of the linear maps: N(0, 0.02²) and zero biases (gpt2), torch's own (native), or"
        " torch's own with every state-space model started as linear attention, its transitions near the identity and"
        " W_C = W_B (mimetic; mamba, mamba2 and s6 have such a start)",
    )
    embed_std: Annotated[float, Unit("standard deviation")] = Field(
        default=0.02, gt=0, description="initial spread of token and position embeddings"
    )
    rescale_residual: Annotated[
        bool, DefaultBy("true if init is not gpt2 and a mixer's own default is native, else false")
    ] = Field(
        default=False,
        description="divide the initial output projections by the root of the number of residual branches",
    )
    residual_branches: Annotated[int | None, Added(3, before=None), Unit("branches per layer")] = Field(
        default=None,
        ge=1,
        le=2,
        description="how many branches rescale_residual counts; none: 2 under gpt2 with an MLP, else 1",
    )
    embed_dropout: Annotated[float, Added(3, before=0.0), Unit("share of the entries")] = Field(
        default=0.0,
        ge=0,
        lt=1,
        description="dropout on the sum of token and position embeddings, in training only; 0: none",
    )
    tied: bool = Field(default=True, description="the unembedding shares the embedding's weight")
    norm_eps: float = Field(default=1e-5, gt=0, description="added to the variance in the layer norms")
    vocab_size: Annotated[int, Unit("tokens"), DefaultBy("in a run the task's; 8192 for a model alone")] = Field(
        default=8192,
        ge=2,
        lt=2**31,
        description="size of the vocabulary; at least the task's; without meaning in a model that reads vectors",
    )
    d_input: Annotated[
        int | None, Added(5, before=None), Unit("channels"), DefaultBy("in a run the task's; none for a model alone")
    ] = Field(
        default=None,
        ge=1,
        le=2**20,
        description="width of the vectors that the model reads through a linear map; none: it reads tokens",
    )
    d_output: Annotated[
        int | None, Added(5, before=None), Unit("channels"), DefaultBy("in a run the task's; none for a model alone")
    ] = Field(
        default=None, ge=1, le=2**20, description="width of the vectors that a model of vectors gives; none: logits"
    )
    max_length: Annotated[int, Unit("positions"), DefaultBy("in a run the task's; 64 for a model alone")] = Field(
        default=64, ge=1, le=2**31, description="longest sequence; at least the task's"
    )

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
        if data.get("positions") == "rope" and not any("rope" in config.positions_inside for config in configs):
            data["mixers"] = configs = [_rotated(config) for config in configs]
        if any(_is_rotary(config) for config in configs):
            data.setdefault("positions", "rope")
        elif not all(config.blind_to_order for config in configs):
            data.setdefault("positions", "none")
        if not all(config.default_init == "gpt2" for config in configs):
            data.setdefault("init", "native")
            data.setdefault("rescale_residual", data["init"] != "gpt2")
        return data

    @model_validator(mode="after")
    def _positions_reach_a_mixer(self) -> "ModelConfig":
        rotary = [mixer.name for mixer in self.mixers if _is_rotary(mixer)]
        if rotary and self.positions != "rope":
            raise UserError(
                f"model.positions: the rotary of {rotary[0]} needs rope, got {self.positions}; expected rope, or"
                " rotary: false"
            )
        inside = self.positions in ("rope", "alibi")
        if inside and not rotary and not any(self.positions in mixer.positions_inside for mixer in self.mixers):
            names = ", ".join(present := dict.fromkeys(mixer.name for mixer in self.mixers))
            fits = {name: None for name, kind in sorted(MIXERS.items()) if issubclass(kind.config, RotaryConfig)}
            where = f"attention, {', '.join(fits)}" if self.positions == "rope" else "attention"
            offered = "rotary: true, " if self.positions == "rope" else "rope, "
            instead = offered if fits.keys() & present.keys() else ""
            raise UserError(
                f"model.positions: {self.positions} acts only inside {where}; {names} would ignore it;"
                f" expected {instead}learned, sinusoidal or none"
            )
        return self

    @model_validator(mode="after")
    def _some_mixer_has_the_start(self) -> "ModelConfig":
        if self.init == "mimetic" and not any(mixer.has_mimetic_start for mixer in self.mixers):
            names = ", ".join(dict.fromkeys(mixer.name for mixer in self.mixers))
            have = ", ".join(name for name, kind in sorted(MIXERS.items()) if kind.config.has_mimetic_start)
            raise UserError(f"model.init: mimetic is a start of {have}; {names} has none; expected native or gpt2")
        return self

    @model_validator(mode="after")
    def _both_ends_or_neither(self) -> "ModelConfig":
        if (self.d_input is None) != (self.d_output is None):
            raise UserError(
                "a model that reads vectors needs model.d_input and model.d_output, and one that reads tokens has"
                f" neither, got {self.d_input} and {self.d_output}"
            )
        return self

    @property
    def reads(self) -> Literal["tokens", "vectors"]:
        """What the model reads."""
        return "tokens" if self.d_input is None else "vectors"

    @property
    def sees_ahead(self) -> int:
        """How many positions after its own an output of the model reads; 0 if the model is causal."""
        return sum(mixer.sees_ahead for mixer in self.mixers)

    def check_causal(self, what: str) -> None:
        """Refuses what a model cannot do that reads later positions: generation, predicting the next token."""
        if self.sees_ahead:
            layer = next(i for i, mixer in enumerate(self.mixers) if mixer.sees_ahead)
            raise UserError(
                f"{what} needs a causal model, and layer {layer} ({self.mixers[layer].name}, centred conv) reads"
                f" {self.mixers[layer].sees_ahead} positions ahead; expected conv_mode: causal"
            )

    @field_validator("mixers", mode="before")
    @classmethod
    def _mixers(cls, value: Any) -> tuple[MixerConfig, ...]:
        return tuple(mixer_config(m) for m in value)


def _is_rotary(config: MixerConfig) -> bool:
    return isinstance(config, RotaryConfig) and config.rotary


def _rotated(config: MixerConfig) -> MixerConfig:
    """The config with rope where the mixer can have it and the user has not said otherwise."""
    if isinstance(config, RotaryConfig) and "rotary" not in config.model_fields_set:
        return config.model_copy(update={"rotary": True})
    return config
