"""How wrong an answer is, and how right: what analyses ask of a batch without knowing its task.

A task gives its batches a judge. That of tokens is the cross-entropy and the share of right answers.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

if TYPE_CHECKING:
    from circuitscope.tasks.batch import Batch
else:
    Batch = Any  # that module imports this one

Answers = Float[Tensor, "label out"]
PerLabel = Float[Tensor, " label"]


@runtime_checkable
class Judge(Protocol):
    """Judges what a model gives at the labelled positions of a batch, in the order of `Batch.labelled`."""

    @property
    def measures(self) -> str:
        """The name of what `right` measures, such as "accuracy"."""

    def losses(self, batch: Batch, answers: Answers) -> PerLabel:
        """What training minimizes, at each label."""

    def right(self, batch: Batch, answers: Answers) -> PerLabel:
        """1 for a right answer; 0, or less than 1, for others."""


class _Tokens:
    """The label's cross-entropy, and whether it has the largest logit."""

    measures = "accuracy"

    def losses(self, batch: Batch, answers: Answers) -> PerLabel:
        return F.cross_entropy(answers, _target(batch, answers), reduction="none")

    def right(self, batch: Batch, answers: Answers) -> PerLabel:
        return (answers.argmax(-1) == _target(batch, answers)).float()


@dataclass(frozen=True)
class SquaredError:
    """‖ŷ − y‖², and 1 − ‖ŷ − y‖² / zero, whose mean is the share of the variance that is explained.

    zero: the mean error of answering 0
    """

    zero: float
    measures = "explained variance"

    def losses(self, batch: Batch, answers: Answers) -> PerLabel:
        return (answers - _target(batch, answers)).square().sum(dim=1)

    def right(self, batch: Batch, answers: Answers) -> PerLabel:
        return 1 - self.losses(batch, answers) / self.zero


class Sign:
    """log(1 + e^{−y ŷ}) for labels y of ±1, the cross-entropy of two classes; and whether ŷ has the sign of y."""

    measures = "accuracy"

    def losses(self, batch: Batch, answers: Answers) -> PerLabel:
        return F.softplus(-(answers * _target(batch, answers))).squeeze(1)

    def right(self, batch: Batch, answers: Answers) -> PerLabel:
        return (answers * _target(batch, answers) > 0).float().squeeze(1)


class NearestValue:
    """‖ŷ − v‖² to the value v that is asked for, and whether v is the value of the context that is nearest to ŷ."""

    measures = "accuracy"

    def losses(self, batch: Batch, answers: Answers) -> PerLabel:
        return (answers - _target(batch, answers)).square().sum(dim=1)

    def right(self, batch: Batch, answers: Answers) -> PerLabel:
        where, target = batch.labelled()
        values = batch.values()[where.to(batch.inputs.device) // batch.length].to(answers.device)  # [label, pair, out]
        far = (values - answers[:, None]).square().sum(dim=2)
        to_right = (answers - target.to(answers.device)).square().sum(dim=1)
        return (to_right <= far.amin(dim=1)).float()


def _target(batch: Batch, answers: Answers) -> Tensor:
    """The labels, where the answers are."""
    return batch.labelled()[1].to(answers.device)


TOKENS: Judge = _Tokens()
