"""Simple rules for in-context learning: what y is at a new x, predicted from the points of the prompt before it.

A rule looks at the first points of several prompts and predicts y at one more x in each. `by_rule` makes a baseline of
it: the task's error of the rule at each label. Rules that are slow are asked about few of the labels; the others count
as not measured (nan).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor

from circuitscope.tasks.batch import Batch
from circuitscope.tasks.roles import Role

Floats = NDArray[np.float64]
Predict = Callable[[Floats, Floats, Floats], Floats]
"""From x [prompt, point, d], y [prompt, point] and a new x [prompt, d]: y [prompt] at the new x."""


@dataclass(frozen=True)
class Rule:
    """A rule, and about how many labels it is asked: the first prompts of a batch, at every so many points."""

    predict: Predict
    prompts: int | None = None
    every: int = 1


def by_rule(rule: Rule, batch: Batch) -> Float[Tensor, " label"]:
    """The loss of a rule at each label; nan where it was not asked. Outliers are left out of what the rule sees."""
    where, _ = batch.labelled()
    inputs = batch.inputs[: rule.prompts].cpu().double().numpy()
    x, y = inputs[:, ::2], inputs[:, 1::2, 0]
    clean = (batch.layout.roles[: rule.prompts, ::2] == Role.INPUT).numpy()  # [prompt, point]
    answers = np.full(batch.layout.roles.shape, np.nan)
    for i in range(1, x.shape[1], rule.every):
        if (asked := clean[:, i]).any():
            seen = clean[asked, :i]
            found = rule.predict(x[asked, :i] * seen[:, :, None], y[asked, :i] * seen, x[asked, i])
            answers[: len(x), 2 * i][asked] = found
    return batch.losses(torch.from_numpy(answers).flatten()[where.cpu()][:, None].float())


def answering_zero(batch: Batch) -> Float[Tensor, " label"]:
    """The loss of answering 0 at each label."""
    return batch.losses(torch.zeros_like(batch.labelled()[1]))


def least_squares(x: Floats, y: Floats, new: Floats) -> Floats:
    """w · x with the shortest w of least squared error: X⁺ y."""
    return _floats(np.einsum("nd,nd->n", least_squares_weights(x, y), new))


def least_squares_weights(x: Floats, y: Floats) -> Floats:
    """X⁺ y, by the smaller of X Xᵀ and Xᵀ X [prompt, d]; points that are all zero change nothing."""
    few = x.shape[1] <= x.shape[2]
    gram = x @ x.transpose(0, 2, 1) if few else x.transpose(0, 2, 1) @ x
    inverse = np.linalg.pinv(gram, rcond=1e-12, hermitian=True)
    if few:
        return _floats(np.einsum("npd,np->nd", x, np.einsum("npq,nq->np", inverse, y)))
    return _floats(np.einsum("nde,ne->nd", inverse, np.einsum("npe,np->ne", x, y)))


def averaging(x: Floats, y: Floats, new: Floats) -> Floats:
    """w · x with w the mean of y x."""
    return _floats(np.einsum("nd,nd->n", np.einsum("npd,np->nd", x, y), new) / x.shape[1])


def nearest(count: int) -> Predict:
    """The mean of y at the nearest points, all of them where there are no more than `count`."""

    def predict(x: Floats, y: Floats, new: Floats) -> Floats:
        far = np.square(x - new[:, None]).sum(axis=2)
        if far.shape[1] <= count:
            return _floats(y.mean(axis=1))
        near = np.argpartition(far, count - 1, axis=1)[:, :count]
        return _floats(np.take_along_axis(y, near, axis=1).mean(axis=1))

    return predict


def fitted(estimator: Callable[[], Any]) -> Predict:
    """What an estimator of scikit-learn predicts that is fitted to each prompt by itself."""

    def predict(x: Floats, y: Floats, new: Floats) -> Floats:
        return np.array([estimator().fit(a, b).predict(c[None])[0] for a, b, c in zip(x, y, new, strict=True)])

    return predict


def network(x: Floats, y: Floats, new: Floats, hidden: int = 100, steps: int = 300) -> Floats:
    """W2 relu(W1 x + b1) + b2, fitted to the points of all prompts at once by Adam (lr 0.01), each its own network."""
    n, _, dims = x.shape
    draw = torch.Generator().manual_seed(0)
    into = (torch.randn(n, dims, hidden, generator=draw) / dims**0.5).requires_grad_()
    out = (torch.randn(n, hidden, 1, generator=draw) / hidden**0.5).requires_grad_()
    b1, b2 = torch.zeros(n, 1, hidden, requires_grad=True), torch.zeros(n, 1, 1, requires_grad=True)
    points, wanted, asked = (torch.from_numpy(part).float() for part in (x, y[:, :, None], new[:, None]))

    def at(where: Tensor) -> Tensor:
        found: Tensor = (where @ into + b1).relu() @ out + b2
        return found

    adam = torch.optim.Adam([into, out, b1, b2], lr=0.01)
    with torch.enable_grad():
        for _ in range(steps):
            adam.zero_grad()
            (at(points) - wanted).square().mean(dim=(1, 2)).sum().backward()  # type: ignore[no-untyped-call]
            adam.step()
    return _floats(at(asked).detach()[:, 0, 0].numpy())


def _floats(x: Any) -> Floats:
    return np.asarray(x, dtype=np.float64)
