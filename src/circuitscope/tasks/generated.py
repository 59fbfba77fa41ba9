"""Answers that a model generates: at every label it reads its own answers before it, and not the right ones."""

from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from circuitscope.errors import described
from circuitscope.tasks.batch import NO_LABEL, Batch


@runtime_checkable
class Generating(Protocol):
    """What a model must have to generate: a state, a step from it, and a sentence that says why it has none, or ""."""

    @property
    def cannot_generate(self) -> str: ...

    def start(self, batch: int) -> Any: ...

    def step(self, tokens: Int[Tensor, "batch pos"], state: Any) -> tuple[Float[Tensor, "batch pos vocab"], Any]: ...


def why_not_generated(model: Any) -> str:
    """Why a model cannot generate its answers, in one sentence; "" if it can."""
    if not isinstance(model, Generating):
        return f"generation needs a model with recurrent steps, got {described(model).split('(')[0]}"
    return model.cannot_generate


@torch.no_grad()
def generated_answers(model: Generating, batch: Batch) -> Int[Tensor, " label"]:
    """The likeliest token at each label, if a label is the next token and the model goes on with what it said there.

    All sequences go through together: up to the first label in one step, then position by position, where each sequence
    reads the batch's token or, after a label, its own.
    """
    tokens, asked = batch.tokens.cpu(), (batch.labels != NO_LABEL).cpu()
    columns = asked.any(dim=0).nonzero()[:, 0]
    if not len(columns):
        return tokens.new_zeros(0)
    first, last = int(columns[0]), int(columns[-1])
    said, state, new = [], model.start(len(batch)), tokens[:, : first + 1]
    for pos in range(first, last + 1):
        logits, state = model.step(new, state)
        said.append(logits[:, -1].argmax(-1))
        if pos < last:
            own, given = asked[:, pos].to(logits.device), tokens[:, pos + 1].to(logits.device)
            new = torch.where(own, said[-1], given)[:, None]
    return torch.stack(said, dim=1).cpu()[asked[:, first : last + 1]]
