"""What a model answers at labelled positions: the loss there, the most likely token, and whether it is a value."""

from collections.abc import Iterable
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from circuitscope.tasks import Batch


class Answers(NamedTuple):
    """For each label −log softmax(logits)[target], and the token with the largest logit."""

    loss: Float[Tensor, " label"]
    token: Int[Tensor, " label"]


def answers(slices: Iterable[Float[Tensor, "_label vocab"]], target: Int[Tensor, " label"]) -> Answers:
    """Loss and most likely token from logits that come in slices of the labels, in order; overwrites the logits."""
    losses, tokens, start = [], [], 0
    for logits in slices:
        wanted = target[start : start + len(logits)]
        top = _largest(logits)
        logits -= logits.gather(1, top[:, None])
        chosen = logits.gather(1, wanted[:, None]).squeeze(1)
        losses.append(logits.exp_().sum(dim=1).log() - chosen)
        tokens.append(top)
        start += len(logits)
    return Answers(torch.cat(losses), torch.cat(tokens))


def is_a_value(token: Int[Tensor, " label"], batch: Batch) -> Float[Tensor, " label"]:
    """1 for each answer that is one of the values of its sequence, right or wrong, and 0 for every other."""
    where, _ = batch.labelled()
    values = batch.values()[where // batch.tokens.shape[1]]
    return (values == token[:, None]).any(dim=1).float()


def _largest(logits: Float[Tensor, "label vocab"]) -> Int[Tensor, " label"]:
    """The first largest entry of each row; on a CPU, NumPy finds it several times faster than torch."""
    if logits.device.type != "cpu" or logits.dtype == torch.bfloat16:
        return logits.argmax(dim=1)
    return torch.from_numpy(logits.numpy().argmax(axis=1))
