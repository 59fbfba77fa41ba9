"""Named models: which mixers a model has in which layers, and what the studies count as one layer of it.

In the MQAR studies a layer is a token mixer followed by an MLP; bare blocks have no MLP.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from circuitscope import mixers
from circuitscope.errors import UserError, shown, unknown
from circuitscope.section import Section


@dataclass(frozen=True)
class Preset:
    """A model with any number of layers: `fields(n)` gives the fields of its config."""

    about: str
    fields: Callable[[int], dict[str, Any]]
    layers: int = 2


def _stack(mixer: Any, **fields: Any) -> Callable[[int], dict[str, Any]]:
    """The same mixer in every layer."""
    return lambda n: {"mixers": [mixer] * n, **fields}


def _based(n: int) -> dict[str, Any]:
    """Gated conv and linear attention in turn; a single layer is linear attention."""
    attention = {"name": "based", "feature_dim": 8}
    layers = [attention if i % 2 else "gated_conv" for i in range(n)] if n > 1 else [attention]
    return {"mixers": layers, "positions": "learned", "init": "gpt2"}


def _mambaformer(n: int) -> dict[str, Any]:
    """A Mamba block, then n pairs of attention and Mamba."""
    return {"mixers": ["mamba", *[_EIGHT_HEADS, "mamba"] * n], "positions": "none", "state_mixer": "none"}


def _standard_hybrid(n: int) -> dict[str, Any]:
    return {"mixers": [_EIGHT_HEADS, "mamba"] * n, "positions": "learned", "state_mixer": "none"}


def _one_hybrid(n: int) -> dict[str, Any]:
    """n Mamba blocks, of which the middle two are replaced by attention and Mamba."""
    stack: list[Any] = ["mamba"] * n
    if n >= 2:
        stack[n // 2 - 1 : n // 2 + 1] = [_EIGHT_HEADS, "mamba"]
    return {"mixers": stack, "positions": "none", "state_mixer": "none"}


_EIGHT_HEADS = {"name": "attention", "n_heads": 8}

PRESETS: dict[str, Preset] = {
    "attention": Preset("softmax attention, one head, learned positions", _stack("attention")),
    "attention_rope": Preset("softmax attention, one head, rotary positions", _stack("attention", positions="rope")),
    **{
        f"attention_conv_{on}": Preset(
            f"attention with a short conv before {', '.join(on.upper())}", _stack({"name": "attention", "conv_on": on})
        )
        for on in ("q", "k", "v", "qkv")
    },
    "based": Preset("Taylor linear attention, alternating with a gated short conv", _based),
    "h3": Preset("H3: shift SSM, then S4D between two gates", _stack("h3")),
    "hyena": Preset("Hyena, order 2: implicit long conv between two gates", _stack("hyena")),
    "rwkv": Preset("RWKV-4 time mixing", _stack("rwkv")),
    "mamba": Preset("Mamba block followed by an MLP, as in the MQAR studies", _stack("mamba")),
    "mamba_bare": Preset("Mamba blocks alone, as published", _stack("mamba", state_mixer="none")),
    "mamba_no_conv": Preset("Mamba without its short conv", _stack({"name": "mamba", "conv": False})),
    "mamba_no_gate": Preset("Mamba without its gate", _stack({"name": "mamba", "gate": False})),
    "s6": Preset("the selective scan alone, followed by an MLP", _stack("s6")),
    "mamba2": Preset("Mamba2 (SSD)", _stack("mamba2")),
    "deltanet": Preset("DeltaNet, one head", _stack("deltanet")),
    "gated_deltanet": Preset("Gated DeltaNet, one head", _stack("gated_deltanet")),
    "s4": Preset("S4 (S4D-Lin)", _stack("s4")),
    "s4_mamba": Preset("Mamba's block around S4D", _stack("s4_mamba")),
    "mambaformer": Preset("a Mamba block, then alternating attention and Mamba; two blocks per layer", _mambaformer),
    "standard_hybrid": Preset(
        "alternating attention and Mamba with learned positions; two blocks per layer", _standard_hybrid
    ),
    "transformer_initial_mamba": Preset(
        "a Mamba layer, then attention layers, no positions",
        lambda n: {"mixers": ["mamba", *[_EIGHT_HEADS] * n], "positions": "none"},
    ),
    "mamba_one_hybrid": Preset("Mamba blocks, the middle two being attention and Mamba", _one_hybrid, layers=8),
    "lstm": Preset("torch's LSTM, the plain baseline; it has no Φ", _stack("lstm")),
}


def model_mapping(spec: Any) -> dict[Any, Any]:
    """A model's spec as a mapping of its fields. One word names a preset or a mixer; words with commas are mixers."""
    if isinstance(spec, Section):
        return spec.model_dump(mode="json")
    if isinstance(spec, str):
        return {"mixers": spec} if "," in spec else {"preset": spec}
    if not isinstance(spec, dict):
        raise UserError(f"model: expected a name or a mapping, got {shown(spec)}; names: {', '.join(PRESETS)}")
    return dict(spec)


def expand_preset(model: dict[Any, Any]) -> dict[Any, Any]:
    """The fields of a model, with `preset` replaced by its fields and `mixers` as a list."""
    if "preset" in model:
        if "mixers" in model:
            raise UserError(
                f"model: expected a preset or mixers, got both: {shown(model['preset'])} and a list of mixers"
            )
        rest = {key: value for key, value in model.items() if key not in ("preset", "n_layers")}
        layers = model.get("n_layers")
        if layers is not None and (not isinstance(layers, int) or isinstance(layers, bool) or not 1 <= layers <= 512):
            raise UserError(f"model.n_layers: expected a number of layers from 1 to 512, got {shown(layers)}")
        model = preset_fields(model["preset"], layers) | rest
    listed = model.get("mixers", "attention")
    if isinstance(listed, str):
        listed = [name.strip() for name in listed.split(",")]
    if not isinstance(listed, list | tuple) or not listed:
        raise UserError(f"model.mixers: expected a list of mixers, got {shown(listed)}")
    return {**model, "mixers": [dict(m) if isinstance(m, dict) else m for m in listed]}


def preset_fields(name: str, n_layers: int | None = None) -> dict[str, Any]:
    """The fields of a model's config for a preset, or for a stack of the mixer with that name.

    `n_layers` counts layers as the preset does.
    """
    if not isinstance(name, str) or name not in {*PRESETS, *mixers.names()}:
        raise unknown("model", name, {*PRESETS, *mixers.names()})
    preset = PRESETS.get(name) or Preset("", _stack(name))
    fields = preset.fields(preset.layers if n_layers is None else n_layers)
    return {**fields, "n_layers": len(fields["mixers"])}
