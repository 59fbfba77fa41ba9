"""What a model costs: parameters, recurrent state, training FLOPs. Counted, never measured."""

from typing import NamedTuple

from torch import nn

from circuitscope.models.hooked_lm import HookedLM


class Parameters(NamedTuple):
    """`total` counts a tied embedding once; `without_embeddings` leaves out embedding, positions, unembedding."""

    total: int
    without_embeddings: int


def parameters(model: HookedLM) -> Parameters:
    """How many parameters a model has."""
    total = sum(p.numel() for p in model.parameters())
    tables = model.embed.weight.numel() * (1 if model.config.tied else 2)
    if model.config.positions == "learned":
        tables += model.pos_embed.numel()
    return Parameters(total, total - tables)


def state_size(model: HookedLM) -> int | None:
    """Floats of recurrent state that one sequence carries from a position to the next, over all layers.

    What counts: the state of the recurrence and the inputs that a short conv still needs (width − 1 a
    channel). None where a layer's state grows with the length, as attention's keys and values do.
    """
    sizes = [block.mixer.state_size for block in model.layers]
    return None if None in sizes else sum(sizes)


def forward_flops_per_token(model: HookedLM, length: int) -> int:
    """2 a weight of every linear map, the unembedding included, and what each mixer counts as its mixing.

    An `nn.Linear` is a linear map; whatever else a mixer multiplies (convs, scans, an LSTM's matrices) is
    in its `mixing_flops`. Not counted: the embedding lookup, biases, norms, activations, softmax, and what
    lies in a module with a true `once_a_batch`, such as the MLP that makes a filter. The unembedding is
    counted at every position, though training reads it only where labels are.
    """
    weights = _linear_weights(model)
    if model.config.tied:
        weights += model.embed.weight.numel()
    mixing: int = sum(block.mixer.mixing_flops(length) for block in model.layers)
    return 2 * weights + mixing


def training_flops_per_token(model: HookedLM, length: int) -> int:
    """Three times the forward pass: the backward pass takes two products for every one."""
    return 3 * forward_flops_per_token(model, length)


def _linear_weights(module: nn.Module) -> int:
    if getattr(module, "once_a_batch", False):
        return 0
    own = module.weight.numel() if isinstance(module, nn.Linear) else 0
    return own + sum(_linear_weights(child) for child in module.children())
