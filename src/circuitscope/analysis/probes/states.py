"""Recurrent states as probes see them: which hook carries one, and which vector of the token reads it."""

from typing import NamedTuple

from circuitscope.analysis.reading.hooked import on_device_of, undisturbed
from circuitscope.analysis.reading.opened import Inputs, opened
from circuitscope.errors import UserError
from circuitscope.lens import HookedModel, layer_of
from circuitscope.mixers.reading import State

Tokens = Inputs


class ReadableState(NamedTuple):
    """A state that a vector of the token reads, and the whole name of the hook that carries this vector."""

    state: State
    by: str


def state_at(model: HookedModel, tokens: Tokens, hook: str) -> State | None:
    """The recurrent state that a hook carries, or None where it carries something else."""
    layer = layer_of(hook)
    state = None if layer is None else _state(model, tokens, layer)
    return state if layer is not None and state and hook == opened(model).hook(layer, state.hook) else None


def readable_state(model: HookedModel, tokens: Tokens, hook: str) -> ReadableState:
    """The recurrent state that a hook carries, with the vector that reads it; an error says why there is none."""
    layer = layer_of(hook)
    if layer is None:
        raise UserError(f"read_out reads the recurrent state of a layer, and {hook} belongs to none")
    subject, state = opened(model), _state(model, tokens, layer)
    kind = f"layer {layer} is {subject.called(layer)}"
    if state is None:
        raise UserError(f"read_out reads a recurrent state, but {kind}, which has none that can be read")
    own = subject.hook(layer, state.hook)
    if hook != own:
        raise UserError(f"read_out reads a recurrent state: {kind}, whose state is at {own}; got {hook}")
    if not state.by:
        raise UserError(f"read_out reads a state by a vector of the token, but {kind}, where no such vector reads it")
    return ReadableState(state, subject.hook(layer, state.by))


def check_has_state(model: HookedModel, tokens: Tokens) -> None:
    """Refuses a model without any recurrent state."""
    layers = range(opened(model).n_layers)
    if not any(_state(model, tokens, layer) for layer in layers):
        kinds = ", ".join(dict.fromkeys(opened(model).called(layer) for layer in layers))
        raise UserError(f"read_out reads a recurrent state, and no layer of this model has one: they are {kinds}")


def _state(model: HookedModel, tokens: Tokens, layer: int) -> State | None:
    with undisturbed(model):
        return opened(model).state(on_device_of(model, tokens[:1]), layer)
