"""A model as a recurrence: its state, its step from a state, and generation by such steps.

What is here works on any model with layers and an embedding. What a state holds is in the file of each mixer.
"""

from collections.abc import Callable
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from circuitscope.devices import widened
from circuitscope.errors import UserError, described, shown
from circuitscope.mixers import MixerState
from circuitscope.models.block import Block
from circuitscope.models.config import ModelConfig


@dataclass(frozen=True)
class ModelState:
    """What a model keeps of the positions it has read: the state of each layer's mixer.

    `state.layers[0].parts` has a layer's tensors by name, each [batch, …]. With `map` a whole state can be changed:
    `state.map(torch.Tensor.detach)`, `state.map(lambda part: part[:1])` for the first sequence alone.
    """

    layers: tuple[MixerState, ...]

    @property
    def position(self) -> int:
        """How many positions have been read."""
        return self.layers[0].position

    def map(self, function: Callable[[Tensor], Tensor]) -> "ModelState":
        """The state with a function applied to every tensor of every layer."""
        return ModelState(tuple(layer.map(function) for layer in self.layers))


@runtime_checkable
class Stepping(Protocol):
    """What a model must have to take steps: its layers, and an embedding that counts positions on from `first`."""

    config: ModelConfig

    @property
    def layers(self) -> list[Block]: ...

    def embedded(self, inputs: Any, first: int = 0) -> Float[Tensor, "batch pos d_model"]: ...


@runtime_checkable
class Speaking(Stepping, Protocol):
    """What a model must have to generate tokens."""

    def step(self, tokens: Any, state: ModelState) -> tuple[Tensor, ModelState]: ...

    def check_length(self, length: int) -> None: ...


def start(model: Stepping, batch: int) -> ModelState:
    """The state before the first position."""
    if isinstance(batch, bool) or not isinstance(batch, Integral) or batch < 0:
        raise UserError(f"batch: expected a number of sequences, got {shown(batch)}")
    if why := why_no_steps(model):
        raise UserError(why)
    return ModelState(tuple(block.mixer.start(int(batch)) for block in model.layers))


def why_no_steps(model: Stepping) -> str:
    """Why a model has no recurrent state, and so cannot generate; "" if it has one."""
    try:
        model.config.check_causal("generation")
    except UserError as error:
        return str(error)
    for i, block in enumerate(model.layers):
        if not hasattr(block.mixer, "step"):
            return f"generation needs recurrent steps, and layer {i} ({model.config.mixers[i].name}) has no `step`"
    return ""


def through_layers(
    model: Stepping, inputs: Tensor, state: ModelState, at: Int[Tensor, " label"] | None = None
) -> tuple[Float[Tensor, "*lead d_model"], ModelState]:
    """The residual stream after the last layer, of inputs [batch, pos, …] that follow a state, and the state after.

    With `at`, the stream at these flat positions only.
    """
    _check_state(model, state, len(inputs))
    return _through_layers(model, inputs, state, at)


def _through_layers(
    model: Stepping, inputs: Tensor, state: ModelState, at: Tensor | None = None
) -> tuple[Tensor, ModelState]:
    resid, after, last = model.embedded(inputs, state.position), [], len(state.layers) - 1
    for i, (block, before) in enumerate(zip(model.layers, state.layers, strict=True)):
        resid, new = block.step(resid, before, at if i == last else None)
        after.append(new)
    return resid, ModelState(tuple(after))


def state_at(model: Stepping, inputs: Tensor, pos: int) -> ModelState:
    """The state after the inputs before `pos`."""
    length = inputs.shape[1]
    if isinstance(pos, bool) or not isinstance(pos, Integral) or not 0 <= pos <= length:
        raise UserError(f"pos: expected a position from 0 to {length}, the end of the sequence, got {shown(pos)}")
    state = start(model, len(inputs))
    return _through_layers(model, inputs[:, : int(pos)], state)[1] if pos else state


@torch.no_grad()
def generate(
    model: Speaking, tokens: Int[Tensor, "batch pos"], n: int, temperature: float, seed: int, stop: int | None
) -> Int[Tensor, "batch longer"]:
    """The tokens, followed by n more, each of which the model says after those before it; see `HookedLM.generate`."""
    if isinstance(n, bool) or not isinstance(n, Integral) or n < 0:
        raise UserError(f"n: expected a number of tokens to generate, 0 or more, got {shown(n)}")
    if isinstance(temperature, bool) or not isinstance(temperature, Real) or not 0 <= temperature < float("inf"):
        raise UserError(
            f"temperature: expected 0, for the likeliest token, or a positive number, got {shown(temperature)}"
        )
    if isinstance(seed, bool) or not isinstance(seed, Integral) or not 0 <= seed < 2**63:
        raise UserError(f"seed: expected a whole number from 0 to 2^63 − 1, got {shown(seed)}")
    last = model.config.vocab_size - 1
    if stop is not None and (isinstance(stop, bool) or not isinstance(stop, Integral) or not 0 <= stop <= last):
        raise UserError(f"stop: expected a token from 0 to {last}, or None, got {shown(stop)}")
    state, length, n = start(model, len(tokens)), tokens.shape[1], int(n)
    model.check_length(length + max(n - 1, 0))  # the last token is said, and not read
    draws = torch.Generator(tokens.device).manual_seed(int(seed)) if temperature else None
    said = torch.cat([tokens, tokens.new_full((len(tokens), n), -1 if stop is None else int(stop))], dim=1)
    stopped, new = torch.zeros_like(tokens[:, 0], dtype=torch.bool), tokens
    for place in range(length, length + n):
        logits, state = model.step(new, state)
        chosen = _choose(logits[:, -1], float(temperature), draws)
        if stop is not None:
            chosen = torch.where(stopped, int(stop), chosen)
            stopped = stopped | (chosen == stop)
        said[:, place] = chosen
        if stop is not None and bool(stopped.all()):
            break
        new = chosen[:, None]
    return said


def _choose(
    logits: Float[Tensor, "batch vocab"], temperature: float, draws: torch.Generator | None
) -> Int[Tensor, " batch"]:
    """The likeliest token or, with a temperature, one that is drawn."""
    if draws is None:
        return logits.argmax(-1)
    chances = (widened(logits - logits.max(-1, keepdim=True).values) / temperature).softmax(-1)
    return torch.multinomial(chances, 1, generator=draws)[:, 0]


def _check_state(model: Stepping, state: ModelState, batch: int) -> None:
    """Refuses a state that another model or another batch has left."""
    if not isinstance(state, ModelState):
        raise UserError(f"expected a state, as model.start or model.step gives, got {described(state)}")
    fresh = start(model, batch)
    if len(state.layers) != len(fresh.layers):
        raise UserError(f"a state of {len(state.layers)} layers, but the model has {len(fresh.layers)}")
    for i, (got, expected) in enumerate(zip(state.layers, fresh.layers, strict=True)):
        for name, part in expected.parts.items():
            if name not in got.parts:
                has, needs = (", ".join(one.parts) for one in (got, expected))
                raise UserError(f"a state of another model: layer {i} keeps {needs}, and the state has {has}")
            _check_part(f"{name} of layer {i}", got.parts[name], part)


def _check_part(what: str, got: Tensor, fresh: Tensor) -> None:
    """Refuses a part of another shape or type; an axis of size 0 in a fresh state grows with the positions."""
    if got.ndim == fresh.ndim and len(got) != len(fresh):
        raise UserError(f"a state of {len(got)} sequences, but {len(fresh)} sequences of tokens")
    grown = [a == b or b == 0 for a, b in zip(got.shape, fresh.shape, strict=False)]
    if got.ndim != fresh.ndim or not all(grown) or got.dtype != fresh.dtype or got.device != fresh.device:
        raise UserError(
            f"a state of another model: {what} is {described(got)} on {got.device}, expected"
            f" {described(fresh)} on {fresh.device}"
        )
