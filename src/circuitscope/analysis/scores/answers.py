"""What a model answers at labelled positions: the loss there, how right it is, and whether it is a value."""

from collections.abc import Iterable
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from circuitscope.tasks import Batch
from circuitscope.tasks.judging import TOKENS


class Answers(NamedTuple):
    """For each label −log softmax(logits)[target], and the token with the largest logit."""

    loss: Float[Tensor, " label"]
    token: Int[Tensor, " label"]


class Judged(NamedTuple):
    """For each label the loss, and how right the answer is, at most 1."""

    loss: Float[Tensor, " label"]
    right: Float[Tensor, " label"]


def judged(slices: Iterable[Float[Tensor, "_label out"]], batch: Batch, device: torch.device) -> Judged:
    """What the batch's judge says of answers that come in slices of the labels, in order; overwrites them.

    Args:
        device: where the answers are.
    """
    if batch.judge is TOKENS:  # this is much faster for large vocabularies, and says the same
        target = batch.labelled()[1].to(device)
        given = answers(slices, target)
        return Judged(given.loss, (given.token == target).float())
    whole = torch.cat(list(slices))
    return Judged(batch.losses(whole), batch.right(whole))


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
    values = batch.values()[where // batch.length]
    return (values == token[:, None]).any(dim=1).float()


def _largest(logits: Float[Tensor, "label vocab"]) -> Int[Tensor, " label"]:
    """The first largest entry of each row; on a CPU, NumPy finds it several times faster than torch."""
    if logits.device.type != "cpu" or logits.dtype == torch.bfloat16:
        return logits.argmax(dim=1)
    return torch.from_numpy(logits.numpy().argmax(axis=1))
