"""What a model costs: parameters, recurrent state and training FLOPs, all counted and not measured."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import nn

from circuitscope.errors import UserError
from circuitscope.models.stack import HookedStack


@contextmanager
def without_weights() -> Iterator[None]:
    """Models that are made inside have shapes but take no memory; sizes that no model can have are refused."""
    try:
        with torch.device("meta"):
            yield
    except (RuntimeError, OverflowError) as error:
        raise UserError(f"a model of these sizes cannot be built: {str(error).splitlines()[0]}") from None


class Parameters(NamedTuple):
    """`total` counts a tied embedding once; `without_embeddings` leaves out both ends of the model and its positions.

    The ends are the embedding and unembedding, or the read-in and read-out of vectors.
    """

    total: int
    without_embeddings: int


def parameters(model: HookedStack) -> Parameters:
    """How many parameters a model has."""
    total = sum(p.numel() for p in model.parameters())
    tables = model.end_parameters
    if model.config.positions == "learned":
        tables += model.pos_embed.numel()
    return Parameters(total, total - tables)


def state_size(model: HookedStack) -> int | None:
    """The number of floats that one sequence carries from each position to the next, over all layers.

    This counts the state of the recurrence and the inputs that a short conv still needs (width − 1 per
    channel). It is None if a layer's state grows with the length, as attention's keys and values do.
    """
    sizes = [block.mixer.state_size for block in model.layers]
    return None if None in sizes else sum(sizes)


def forward_flops_per_token(model: HookedStack, length: int) -> int:
    """2 FLOPs per weight of every linear map, including unembedding or read-out, plus the `mixing_flops` of each mixer.

    A linear map is an `nn.Linear`; whatever else a mixer multiplies (convs, scans, an LSTM's matrices) is
    in its `mixing_flops`. The count leaves out the embedding lookup, biases, norms, activations, softmax, and
    modules with a true `once_a_batch`, such as the MLP that makes a filter. It includes the unembedding at
    every position, although training computes it only at labels.
    """
    weights = _linear_weights(model) + model.end_weights
    mixing: int = sum(block.mixer.mixing_flops(length) for block in model.layers)
    return 2 * weights + mixing


def training_flops_per_token(model: HookedStack, length: int) -> int:
    """Three times the forward pass, because the backward pass needs two products for each product of the forward."""
    return 3 * forward_flops_per_token(model, length)


def _linear_weights(module: nn.Module) -> int:
    if getattr(module, "once_a_batch", False):
        return 0
    own = module.weight.numel() if isinstance(module, nn.Linear) else 0
    return own + sum(_linear_weights(child) for child in module.children())
