"""Shows any model as layers with readings: one of this package, or another with TransformerLens's hook names.

This is the one place in analysis that knows which kind of model it looks at. `opened(model)` answers for both:
a HookedStack (HookedLM or HookedSequenceModel), whose mixers say what they offer, or any HookedRootModule that shows
attention patterns (TransformerBridge among them). `pattern_reading` makes a reading of a bare tensor of patterns.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from circuitscope.analysis.reading.gradients import without_gradients
from circuitscope.arguments import explained
from circuitscope.errors import UserError, shown, unknown
from circuitscope.lens import HookedModel, layer_count, layer_index
from circuitscope.mixers.mixer import HeadWeights
from circuitscope.mixers.reading import SLICE_BYTES, Factor, Product, Reading, State
from circuitscope.models.hooked_lm import HookedLM
from circuitscope.models.inputs import InputsLike, as_tokens
from circuitscope.models.naming import layer_names
from circuitscope.models.stack import HookedStack

Inputs = Int[Tensor, "batch pos"] | Float[Tensor, "batch pos channel"]
Stream = Float[Tensor, "batch pos d_model"]
Where = Int[Tensor, " label"]
Logits = Float[Tensor, "label vocab"]


class Mixing(NamedTuple):
    """One mixing matrix of a layer, or a slice of its units (heads or channels)."""

    layer: int
    product: Product
    units: slice
    matrix: Float[Tensor, "batch unit dest src"]

    def __repr__(self) -> str:
        units = f"{self.product.unit}s {self.units.start} to {self.units.stop - 1}"
        return f"Mixing(layer {self.layer}, {self.product.name}, {units}, matrix {list(self.matrix.shape)})"

    @property
    def is_last(self) -> bool:
        """Whether no further slice of this matrix follows."""
        return bool(self.units.stop == self.product.size)


@explained
def matrices(model: HookedModel, tokens: InputsLike, factors: str | Sequence[str] | None = None) -> Iterator[Mixing]:
    """Every mixing matrix of a model in one pass, in slices of units of about 8 MB.

    Args:
        factors: names of the factors to keep, of which some layers may have none; by default all that are matrices
            (not diagonal). A name that no layer has is an error.
    """
    return opened(model).walk(tokens).matrices(factors)


@explained
def pattern_reading(pattern: Float[Tensor, "batch head dest src"]) -> Reading:
    """A bare tensor of attention patterns as the reading of a layer."""
    if pattern.ndim != 4 or pattern.shape[2] != pattern.shape[3]:
        raise UserError(f"a pattern is [batch, head, dest, src], got {list(pattern.shape)}")
    factor = Factor("pattern", "head", pattern.shape[1], lambda heads: pattern[:, heads], shares=True, core=True)
    return Reading((len(pattern), pattern.shape[2]), (factor,), "only the patterns of this layer are known")


class Walk(ABC):
    """One pass of a model over inputs: iterating over it gives the reading of each layer, and afterwards the logits.

    Args:
        at: flat positions row · length + pos at which logits are wanted; with None the pass computes only what the
            readings need.
    """

    def __init__(self, model: Any, inputs: Inputs, at: Where | None):
        self.model, self.inputs = model, inputs
        self.at = None if at is None else at.to(inputs.device)

    @abstractmethod
    def __iter__(self) -> Iterator[tuple[int, Reading]]:
        """(layer, reading), in order."""

    @abstractmethod
    def logit_slices(self) -> Iterator[Logits]:
        """Logits at the positions `at`, in slices of about 8 MB; the caller may overwrite them.

        Slicing does not change the numbers; on a CPU, arrays this small stay in the cache.
        """

    @property
    def logits(self) -> Logits | None:
        """Logits at the positions `at`, after the pass has been iterated over."""
        slices = list(self.logit_slices())
        return torch.cat(slices) if slices else None

    @without_gradients
    def matrices(self, factors: str | Sequence[str] | None = None) -> Iterator[Mixing]:
        """Every mixing matrix, or those named that a layer has, in slices of units; "phi" is the core of any layer.

        Raises:
            UserError: after the pass, if a name is not that of a matrix in any layer.
        """
        named = [factors] if isinstance(factors, str) else factors
        known = {"phi"}
        for layer, reading in self:
            for name, product in reading.products().items():
                known.add(name)
                if named is None or name in named or (product.core and "phi" in named):
                    for units, matrix in reading.slices(product):
                        yield Mixing(layer, product, units, matrix)
        for name in named or ():
            if name not in known:
                raise unknown("factor", name, known)


class Opened(ABC):
    """A model, with what analysis needs from it besides its hooks."""

    def __init__(self, model: Any):
        self.model = model

    @property
    def n_layers(self) -> int:
        return layer_count(self.model)

    @abstractmethod
    def inputs(self, inputs: InputsLike) -> Inputs:
        """Tokens or vectors in any form as the tensor that the model reads, on its device."""

    @abstractmethod
    def walk(self, inputs: InputsLike, at: Where | None = None) -> Walk:
        """One pass over the layers."""

    @abstractmethod
    def reading(self, inputs: InputsLike, layer: int) -> Reading:
        """The reading of one layer on these inputs, with gradients where they are on."""

    def state(self, inputs: InputsLike, layer: int) -> State | None:
        """The recurrent state of a layer, where it has one."""
        return self.reading(inputs, layer).state

    @abstractmethod
    def called(self, layer: int) -> str:
        """The kind of a layer, such as "mamba" or "attention"."""

    @abstractmethod
    def hook(self, layer: int, name: str) -> str:
        """The full name of a mixer's hook that is called, for example, "hook_phi", "hook_z" or "hook_state"."""

    @abstractmethod
    def before_logits(self, inputs: Inputs) -> Float[Tensor, "batch pos out"]:
        """The last activation that hooks can still change, at all positions."""

    @abstractmethod
    def to_logits(self, out: Float[Tensor, "label out"]) -> Logits:
        """Logits from rows of `before_logits`."""

    @abstractmethod
    def logit_bytes(self, out: Tensor, labels: int) -> int:
        """How many bytes the logits at `labels` positions take, where `out` is `before_logits` of one sequence."""

    @abstractmethod
    def residuals(self, inputs: Inputs, layer: int, at: Where) -> tuple[Stream, Float[Tensor, "label d_model"]]:
        """The stream before a layer, detached; and the stream after it, at flat positions, as a function of it."""

    @property
    @abstractmethod
    def embedding(self) -> Float[Tensor, "token d_model"]:
        """The token embedding."""

    @abstractmethod
    def attention(self) -> dict[int, HeadWeights]:
        """Layers whose heads have W_Q, W_K, W_V and W_O, by number."""


@explained
def opened(model: HookedModel) -> Opened:
    """A model as analysis sees it."""
    if not hasattr(model, "hook_dict"):
        raise UserError(
            f"expected a model of circuitscope or another model with TransformerLens's hooks, got {shown(model)}"
            f"{'; give run.load()' if hasattr(model, 'load') else ''}"
        )
    return _Own(model) if isinstance(model, HookedStack) else _Foreign(model)


class _OwnWalk(Walk):
    """Runs one block after the other; a layer whose Φ can be read in passing is read while it runs."""

    model: HookedStack
    _final: Float[Tensor, "label d_model"] | None = None

    @without_gradients
    def __iter__(self) -> Iterator[tuple[int, Reading]]:
        resid, last = self.model.embedded(self.inputs), self.model.config.n_layers - 1
        for layer, block in enumerate(self.model.layers):
            goes_on, at = layer < last or self.at is not None, self.at if layer == last else None
            in_passing = self.model.config.mixers[layer].phi_in_passing
            if goes_on and in_passing and block.mixer.n_heads <= self._units_per_slice():
                kept: list[Tensor] = []
                listening = block.mixer.hook_phi.register_forward_hook(
                    lambda module, args, phi, kept=kept: kept.append(phi), prepend=True
                )
                try:
                    resid = block(resid, at)
                finally:
                    listening.remove()
                yield layer, block.mixer.reading_from(kept[0])
                continue
            yield layer, block.mixer.reading(block.mixer_input(resid))
            if goes_on:
                resid = block(resid, at)
        if self.at is not None:
            self._final = self.model.ln_final(resid)

    def _units_per_slice(self) -> int:
        return Reading(self.inputs.shape[:2]).units_per_slice

    @without_gradients
    def logit_slices(self) -> Iterator[Logits]:
        if self._final is not None:
            labels = max(1, int(SLICE_BYTES // (4 * self.model.d_out)))
            for part in self._final.split(labels):
                yield self.model.read_out(part)


class _Own(Opened):
    """A model of this package."""

    model: HookedStack

    def inputs(self, inputs: InputsLike) -> Inputs:
        return self.model.to_inputs(inputs)

    def walk(self, inputs: InputsLike, at: Where | None = None) -> Walk:
        return _OwnWalk(self.model, self.inputs(inputs), at)

    def reading(self, inputs: InputsLike, layer: int) -> Reading:
        return self.model.reading(inputs, layer)

    def called(self, layer: int) -> str:
        return layer_names(self.model.config)[layer]

    def hook(self, layer: int, name: str) -> str:
        full = f"blocks.{layer_index(self.model, layer)}.mixer.{name}"
        if full not in self.model.hook_dict:
            raise unknown("hook", full, self.model.hook_dict)
        return full

    def before_logits(self, inputs: Inputs) -> Float[Tensor, "batch pos out"]:
        return self.model.hidden(inputs)

    def to_logits(self, out: Float[Tensor, "label out"]) -> Logits:
        return self.model.read_out(out)

    def logit_bytes(self, out: Tensor, labels: int) -> int:
        return labels * self.model.d_out * out.element_size()

    def residuals(self, inputs: Inputs, layer: int, at: Where) -> tuple[Stream, Float[Tensor, "label d_model"]]:
        with torch.no_grad():
            before = self.model.stream_before(inputs, layer)
        before = before.detach().requires_grad_()
        return before, self.model.layers[layer](before, at)  # only these positions go on after the mixer

    @property
    def embedding(self) -> Float[Tensor, "token d_model"]:
        if not isinstance(self.model, HookedLM):
            raise UserError("a model that reads vectors has no token embedding; use the model 'logistic' or 'ridge'")
        return self.model.embed.weight

    def attention(self) -> dict[int, HeadWeights]:
        return {i: block.mixer for i, block in enumerate(self.model.layers) if isinstance(block.mixer, HeadWeights)}


class _ForeignWalk(Walk):
    """Takes all patterns from one run of the model."""

    _logits: Logits | None = None

    @without_gradients
    def __iter__(self) -> Iterator[tuple[int, Reading]]:
        names = _pattern_hooks(self.model)
        logits, cache = self.model.run_with_cache(self.inputs, names_filter=lambda name: name in names)
        if self.at is not None:
            self._logits = logits.flatten(0, 1)[self.at]
        for name, layer in names.items():
            yield layer, pattern_reading(cache[name])

    def logit_slices(self) -> Iterator[Logits]:
        if self._logits is not None:
            yield self._logits.clone()


def _pattern_hooks(model: HookedModel) -> dict[str, int]:
    """The names of a model's hooks that carry attention patterns, each with its layer."""
    names = [name for name in model.hook_dict if name.endswith("hook_pattern")]
    if not names:
        raise UserError(
            f"{type(model).__name__} shows no mixing matrix: it has no hook named …hook_pattern"
            " (circuitscope's own models show hook_phi)"
        )
    numbers = [re.search(r"\d+", name) for name in names]
    return {name: int(found[0]) if found else i for i, (name, found) in enumerate(zip(names, numbers, strict=True))}


class _Foreign(Opened):
    """Any HookedRootModule with TransformerLens's hook names."""

    _NAMES = {"hook_phi": "hook_pattern"}  # noqa: RUF012

    def inputs(self, inputs: InputsLike) -> Inputs:
        return as_tokens(inputs, next((parameter.device for parameter in self.model.parameters()), None))

    def walk(self, inputs: InputsLike, at: Where | None = None) -> Walk:
        return _ForeignWalk(self.model, self.inputs(inputs), at)

    def reading(self, inputs: InputsLike, layer: int) -> Reading:
        layer = layer_index(self.model, layer)
        names = [name for name, of in _pattern_hooks(self.model).items() if of == layer]
        if not names:
            raise UserError(
                f"layer {layer} of {type(self.model).__name__} shows no mixing matrix: it has no hook_pattern"
            )
        kept: list[Tensor] = []
        listening = self.model.hook_dict[names[-1]].register_forward_hook(
            lambda module, args, pattern: kept.append(pattern), prepend=True
        )
        try:
            self.model(self.inputs(inputs))
        finally:
            listening.remove()
        return pattern_reading(kept[0])

    def state(self, inputs: InputsLike, layer: int) -> State | None:
        return None  # at most the pattern of such a layer is known

    def called(self, layer: int) -> str:
        return "attention"

    def hook(self, layer: int, name: str) -> str:
        full = f"blocks.{layer_index(self.model, layer)}.attn.{self._NAMES.get(name, name)}"
        if full not in self.model.hook_dict:
            raise UserError(f"layer {layer} has no {name}: expected a hook named {full}")
        return full

    def before_logits(self, inputs: Inputs) -> Float[Tensor, "batch pos out"]:
        out: Tensor = self.model(inputs)
        return out

    def to_logits(self, out: Float[Tensor, "label out"]) -> Logits:
        return out

    def logit_bytes(self, out: Tensor, labels: int) -> int:
        return out.numel() * out.element_size()

    def residuals(self, inputs: Inputs, layer: int, at: Where) -> tuple[Stream, Float[Tensor, "label d_model"]]:
        names = [f"blocks.{layer}.hook_resid_{side}" for side in ("pre", "post")]
        for name in names:
            if name not in self.model.hook_dict:
                raise unknown("hook", name, self.model.hook_dict)
        seen: dict[str, Tensor] = {}

        def enter(value: Tensor, hook: Any) -> Tensor:
            seen["before"] = value.detach().requires_grad_()
            return seen["before"]

        def leave(value: Tensor, hook: Any) -> Tensor:
            seen["after"] = value
            return value.detach()

        with self.model.hooks(fwd_hooks=[(names[0], enter), (names[1], leave)]):
            self.model(inputs)
        return seen["before"], seen["after"].flatten(0, 1)[at]

    @property
    def embedding(self) -> Float[Tensor, "token d_model"]:
        weight = getattr(self.model, "W_E", None)
        if not isinstance(weight, Tensor):
            raise UserError("this model has no token embedding W_E; use the model 'logistic'")
        return weight

    def attention(self) -> dict[int, HeadWeights]:
        return {}
