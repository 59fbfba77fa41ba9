"""The n-gram rule with back-off, counted within each sequence: a baseline for tasks whose labels are next tokens."""

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from circuitscope.tasks.batch import NO_LABEL, Batch


def counts_in_context(
    batch: Batch, n: int, vocab_size: int, separator: int | None = None
) -> Float[Tensor, "label vocab"]:
    """How often each token was the label earlier in the sequence behind the same last n − 1 tokens.

    Where those tokens have not been seen together, the last n − 2 count, and so on down to none; a row is 0 if no
    label stands before it. What a context holds ends with the separator, if there is one.
    """
    rows = [
        _of_sequence(tokens, labels, n, vocab_size, separator)
        for tokens, labels in zip(batch.tokens.cpu(), batch.labels.cpu(), strict=True)
    ]
    return torch.cat(rows)


def _of_sequence(
    tokens: Int[Tensor, " pos"], labels: Int[Tensor, " pos"], n: int, vocab_size: int, separator: int | None
) -> Float[Tensor, "label vocab"]:
    at = (labels != NO_LABEL).nonzero().squeeze(1)
    following = F.one_hot(labels[at], vocab_size).float()
    alike = torch.ones(len(at), len(at)).tril(-1)  # [label, earlier label], 1 where the contexts are the same
    counts = alike @ following
    open_still = torch.ones(len(at), dtype=torch.bool)
    for back in range(n - 1):
        inside = open_still & (at >= back)
        token = torch.where(inside, tokens[(at - back).clamp(min=0)], -1)  # -1: outside the string on both sides
        alike = alike * (token[:, None] == token)
        longer = alike @ following
        counts = torch.where(longer.sum(dim=1, keepdim=True) > 0, longer, counts)
        open_still = inside & (token != separator) if separator is not None else inside
    return counts
