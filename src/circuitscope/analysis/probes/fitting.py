"""One linear probe: how well it reads labels from activations, on sequences it was not trained on.

Arrays come in, from anywhere, and one `Fit` comes out. `fit` standardizes the features, splits by sequence, fits a
control task too, and computes baselines and an interval from resampled sequences.
"""

import warnings
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from sklearn.base import clone, is_regressor  # type: ignore[import-untyped]
from sklearn.exceptions import ConvergenceWarning  # type: ignore[import-untyped]
from sklearn.linear_model import LogisticRegression, RidgeCV  # type: ignore[import-untyped]
from sklearn.pipeline import Pipeline  # type: ignore[import-untyped]
from sklearn.preprocessing import StandardScaler  # type: ignore[import-untyped]
from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]

from circuitscope.analysis.probes.estimators import ALPHAS, CandidateSet, EmbeddingRidge, Floats, Ints
from circuitscope.arguments import explained
from circuitscope.errors import UserError, shown, unknown

Array = NDArray[Any]
Bools = NDArray[np.bool_]

MODELS = ("logistic", "ridge", "embedding", "candidates")
PER_CLASS = 5  # training examples per class that a logistic probe needs, on average
_RESAMPLES = 1000
_SMALL = 512  # features up to which one thread is faster than several that wait for each other


@dataclass(frozen=True)
class Fit:
    """How well a probe reads its labels on held-out sequences.

    `accuracy` is the share of right answers, or R² where `metric` is "r2"; `low` and `high` are its 95% interval over
    resampled test sequences. `control` is what the same probe reaches on the control task, `majority` what the best
    constant answer reaches (of a candidate set: always the same place), `chance` what a blind guess reaches.
    `estimator` is the fitted pipeline: StandardScaler, then the model. `covariance` [feature, output] is the covariance
    of activations and labels over the training examples.
    """

    metric: Literal["accuracy", "r2"]
    accuracy: float
    low: float
    high: float
    control: float
    majority: float
    chance: float
    n_train: int
    n_test: int
    estimator: Pipeline
    covariance: Floats
    control_covariance: Floats | None

    def __repr__(self) -> str:
        control = "no control" if self.control != self.control else f"control {self.control:.3f}"
        return (
            f"Fit({self.metric} {self.accuracy:.3f}, {self.low:.3f} to {self.high:.3f}; {control},"
            f" chance {self.chance:.3f}; {self.n_train} training examples, {self.n_test} to test)"
        )

    @property
    def selectivity(self) -> float:
        """Accuracy minus that on the control task."""
        return self.accuracy - self.control

    def directions(self, count: int | None = None) -> Floats:
        """Orthonormal directions [direction, feature] in which the activations vary with the label.

        They are the first left singular vectors of Cov(x, y) over the training examples, where y is the label's
        embedding, its vector, or one entry per class; by default as many as hold 99% of the squared covariance. Once
        all of them are removed, no linear probe can read y. That is not so for the rows of the probe's own W.
        """
        left, size, _ = np.linalg.svd(self.covariance, full_matrices=False)
        if count is None:
            count = 1 + int(np.searchsorted(np.cumsum(size**2), 0.99 * np.sum(size**2)))
        return _first(left, count)

    def control_directions(self, count: int) -> Floats | None:
        """The same for the labels of the control task; None where no control was fitted."""
        if self.control_covariance is None:
            return None
        return _first(np.linalg.svd(self.control_covariance, full_matrices=False)[0], count)


class TooFewExamples(UserError):
    """There are too few training examples for the number of classes."""

    def __init__(self, have: int, need: int, message: str):
        super().__init__(message)
        self.have, self.need = have, need


def _first(left: Floats, count: int) -> Floats:
    if not 1 <= count <= left.shape[1]:
        raise UserError(f"this probe has 1 to {left.shape[1]} directions, got {shown(count)}")
    return np.asarray(left.T[:count])


@explained
def fit(
    activations: ArrayLike,
    labels: ArrayLike,
    *,
    model: Any = "logistic",
    groups: ArrayLike | None = None,
    candidates: ArrayLike | None = None,
    embedding: ArrayLike | None = None,
    identities: ArrayLike | None = None,
    control: bool = True,
    test: float | ArrayLike = 1 / 3,
    seed: int = 0,
) -> Fit:
    """Fits a linear probe on some sequences and tests it on others.

    Args:
        activations: [example, feature]; or [batch, pos, …] with labels [batch, pos], one group per row.
        labels: [example]: classes, or token numbers for "embedding" and "candidates"; vectors
            [example, d] for "ridge".
        model: "logistic", "ridge" (vectors, scored by R²), "embedding" (ridge onto the label's
            embedding, nearest candidate), "candidates" (bilinear score, softmax over the candidates); or
            any scikit-learn estimator, which is cloned.
        groups: the sequence of each example. No sequence is both in the training set and in the test set.
        candidates: [example, set] tokens to choose from, negative where empty; by default the vocabulary.
        embedding: [token, d_embed], for "embedding" and "candidates".
        identities: [example], what a control label depends on, usually the token at the position.
        control: whether to fit the control task too. For token labels it is the same task with the rows
            of the embedding shuffled among the tokens in use; otherwise every identity gets the label
            of a random example (without identities, every example gets one).
        test: the share of the groups to test on, or a mask of the examples to test on.
        seed: for the split, the control and the interval.
    """
    X, y, groups = _examples(activations, labels, groups)
    sets = None if candidates is None else _array(candidates)
    who = None if identities is None else _array(identities).reshape(-1)
    E = None if embedding is None else _array(embedding)
    if sets is not None:
        sets = sets.reshape(-1, sets.shape[-1])
    for name, given in {"identities": who, "candidates": sets}.items():
        if given is not None and len(given) != len(X):
            raise UserError(f"{name} are for {len(given)} examples, the activations for {len(X)}")
    rng = np.random.default_rng(seed)
    held = _held_out(test, groups, rng)
    task = _Task(X, y, groups, held, sets)
    estimator = _estimator(model, E)
    _check(task, estimator)
    lost, of, fitted = task.score(estimator)
    low, high = _interval(lost, of, rng)
    other, other_covariance = float("nan"), None
    if control:
        shuffled, same = _control(task, estimator, who, rng)
        control_lost, control_of, _ = shuffled.score(same)
        other, other_covariance = 1 - float(control_lost.sum() / control_of.sum()), shuffled.covariance(same)
    regression = is_regressor(estimator)
    majority, chance = (0.0, 0.0) if regression else _baselines(task, E)
    return Fit(
        metric="r2" if regression else "accuracy",
        accuracy=1 - float(lost.sum() / of.sum()),
        low=low,
        high=high,
        control=other,
        majority=majority,
        chance=chance,
        n_train=int((~held).sum()),
        n_test=int(held.sum()),
        estimator=fitted,
        covariance=task.covariance(estimator),
        control_covariance=other_covariance,
    )


@dataclass(frozen=True)
class _Task:
    """Examples, which of them are held out, and what to choose from."""

    X: Floats
    y: Array
    groups: Ints
    held: Bools
    sets: Ints | None

    def score(self, estimator: Any) -> tuple[Floats, Floats, Pipeline]:
        """Per test sequence the sum of errors and what that sum is a part of; and the fitted pipeline."""
        train, held, sets = ~self.held, self.held, self.sets
        pipeline = Pipeline([("scale", StandardScaler()), ("probe", clone(estimator))])
        at_fit = {} if sets is None or not isinstance(estimator, CandidateSet) else {"probe__candidates": sets[train]}
        choose = isinstance(estimator, CandidateSet | EmbeddingRidge) and sets is not None
        small = 1 if self.X.shape[1] <= _SMALL else None
        with warnings.catch_warnings(), threadpool_limits(limits=small):
            warnings.simplefilter("ignore", ConvergenceWarning)
            pipeline.fit(self.X[train], self.y[train], **at_fit)
        answers = pipeline.predict(self.X[held], **({"candidates": sets[held]} if choose and sets is not None else {}))
        if is_regressor(estimator):
            lost = _squares(self.y[held] - answers)
            of = _squares(self.y[held] - self.y[train].mean(axis=0))
        else:
            lost, of = (answers != self.y[held]).astype(float), np.ones(int(held.sum()))
        sequence = np.unique(self.groups[held], return_inverse=True)[1]
        return np.bincount(sequence, lost).astype(float), np.bincount(sequence, of).astype(float), pipeline

    def covariance(self, estimator: Any) -> Floats:
        """Cov(activation, label) [feature, output] over the training examples; a class is divided by √ of its share."""
        x, y = self.X[~self.held], self.y[~self.held]
        x = x - x.mean(axis=0)
        if isinstance(estimator, EmbeddingRidge | CandidateSet):
            outputs = np.asarray(estimator.embedding)[y]
        elif is_regressor(estimator):
            outputs = y.reshape(len(y), -1)
        else:
            classes, of = np.unique(y, return_inverse=True)
            outputs = np.eye(len(classes))[of] / np.sqrt(np.bincount(of) / len(of))
        return np.asarray(x.T @ (outputs - outputs.mean(axis=0)) / len(x))


def _squares(x: Floats) -> Floats:
    return np.asarray(np.square(x).reshape(len(x), -1).sum(axis=1))


def _examples(activations: ArrayLike, labels: ArrayLike, groups: ArrayLike | None) -> tuple[Floats, Array, Ints]:
    """Activations [example, feature], labels, and the number of each example's group."""
    X, y = _array(activations), _array(labels)
    if X.dtype.kind not in "fiu" or X.ndim < 2:
        raise UserError(f"expected activations [example, feature] as numbers, got {X.dtype} {X.shape}")
    if X.ndim > 2:
        if y.shape[:2] != X.shape[:2]:
            raise UserError(f"activations {X.shape} need labels [{X.shape[0]}, {X.shape[1]}], got {y.shape}")
        if groups is None:
            groups = np.repeat(np.arange(len(X)), X.shape[1])
        X, y = X.reshape(X.shape[0] * X.shape[1], -1), y.reshape(X.shape[0] * X.shape[1], *y.shape[2:])
    of = np.arange(len(X)) if groups is None else _array(groups).reshape(-1)
    for name, given in {"labels": y, "groups": of}.items():
        if len(given) != len(X):
            raise UserError(f"{name} are for {len(given)} examples, the activations for {len(X)}")
    if not len(X):
        raise UserError("there are no examples")
    X = X if X.dtype == np.float32 else X.astype(np.float64)
    if not np.isfinite(X).all():
        raise UserError("the activations hold NaN or infinity; the model has diverged, or the array is not filled")
    return X, y, np.unique(of, return_inverse=True)[1]


def _array(given: Any) -> Array:
    """An array from an array, a list or a tensor."""
    if isinstance(given, torch.Tensor):
        given = given.detach().cpu()
        given = given.float() if given.dtype is torch.bfloat16 else given
    return np.asarray(given)


def _held_out(test: float | ArrayLike, groups: Ints, rng: np.random.Generator) -> Bools:
    """Which examples to test on."""
    n = int(groups.max()) + 1
    chosen = _array(test)
    if chosen.ndim == 0:
        if not 0 < float(chosen) < 1:
            raise UserError(f"test must be a share of the sequences between 0 and 1, or a mask, got {shown(test)}")
        count = max(2, round(float(chosen) * n))
        picked = np.zeros(n, dtype=bool)
        picked[rng.permutation(n)[:count]] = True
        held = picked[groups]
    else:
        if chosen.dtype != bool or chosen.size not in (len(groups), n):
            raise UserError(f"a test mask is true or false for each of {len(groups)} examples, got {chosen.shape}")
        rows = chosen.reshape(-1)
        held = rows if len(rows) == len(groups) else rows[groups]
        shared = np.intersect1d(groups[held], groups[~held])
        if len(shared):
            raise UserError(f"{len(shared)} sequences are in the training set and in the test set; split by sequence")
    for what, part in {"train": ~held, "test": held}.items():
        if len(np.unique(groups[part])) < 2:
            raise UserError(f"a probe needs at least 2 sequences to {what} on; there are {n} in all")
    return np.asarray(held)


def _estimator(model: Any, E: Floats | None) -> Any:
    if not isinstance(model, str):
        return model
    if model in ("embedding", "candidates") and E is None:
        raise UserError(f"the model '{model}' needs the embedding of the labels, [token, d_embed]")
    if model == "logistic":
        return LogisticRegression(max_iter=500)
    if model == "ridge":
        return RidgeCV(alphas=ALPHAS)
    if model == "embedding":
        return EmbeddingRidge(E)
    if model == "candidates":
        return CandidateSet(E)
    raise unknown("model", model, MODELS)


def _check(task: _Task, estimator: Any) -> None:
    """Refuses labels from which a probe can learn nothing."""
    y = task.y[~task.held]
    if is_regressor(estimator):
        if task.y.dtype.kind not in "fiu" or not np.isfinite(task.y).all():
            raise UserError("ridge needs labels that are finite numbers or vectors of them")
        if (y == y[0]).all():
            raise UserError("the label is the same vector in all training examples: there is nothing to decode")
        return
    if y.ndim != 1:
        raise UserError(f"expected one label per example, got labels {task.y.shape}; for vectors use the model 'ridge'")
    if task.y.dtype.kind == "f":
        raise UserError("the labels are real numbers; expected classes, or the model 'ridge'")
    classes = len(np.unique(y))
    if classes == 1:
        raise UserError(f"the label is constant: {shown(y[0].item())} in all training examples; nothing to decode")
    if not isinstance(estimator, EmbeddingRidge | CandidateSet) and len(y) < PER_CLASS * classes:
        need = PER_CLASS * classes
        raise TooFewExamples(
            len(y),
            need,
            f"{len(y)} training examples are too few for {classes} classes: {type(estimator).__name__} needs at least"
            f" {PER_CLASS} per class, {need} in all (for tokens there is the model 'embedding')",
        )
    if task.sets is not None and not (task.sets == task.y[:, None]).any(axis=1).all():
        wrong = int((task.sets == task.y[:, None]).any(axis=1).argmin())
        raise UserError(f"the label of example {wrong} is not among its candidates")


def _control(task: _Task, estimator: Any, identities: Array | None, rng: np.random.Generator) -> tuple[_Task, Any]:
    """The same probe on labels that say nothing about the task; each token keeps one label."""
    if isinstance(estimator, EmbeddingRidge | CandidateSet):
        E = np.array(estimator.embedding)
        used = np.unique(task.y if task.sets is None else task.sets[task.sets >= 0])
        E[used] = E[rng.permutation(used)]
        return task, clone(estimator).set_params(embedding=E)
    who = np.arange(len(task.y)) if identities is None else np.unique(identities, return_inverse=True)[1]
    y = task.y[rng.integers(len(task.y), size=int(who.max()) + 1)[who]]
    if len(np.unique(y[~task.held], axis=0)) == 1:  # there are too few identities: shuffle the labels of all examples
        y = task.y[rng.permutation(len(task.y))]
    return replace(task, y=y), estimator


def _baselines(task: _Task, E: Floats | None) -> tuple[float, float]:
    """What the best constant answer reaches, and what a blind guess reaches."""
    train, held = ~task.held, task.held
    if task.sets is not None:
        place = (task.sets == task.y[:, None]).argmax(axis=1)
        constant = np.bincount(place[train]).argmax()
        return float((place[held] == constant).mean()), float((1 / (task.sets[held] >= 0).sum(axis=1)).mean())
    classes, count = np.unique(task.y[train], return_counts=True)
    return float((task.y[held] == classes[count.argmax()]).mean()), 1 / (len(classes) if E is None else len(E))


def _interval(lost: Floats, of: Floats, rng: np.random.Generator) -> tuple[float, float]:
    """The 95% interval of 1 − Σ lost / Σ of over sequences drawn with replacement."""
    n = len(lost)
    times = rng.multinomial(n, np.full(n, 1 / n), size=_RESAMPLES)
    low, high = np.percentile(1 - (times @ lost) / (times @ of), [2.5, 97.5])
    return float(low), float(high)
