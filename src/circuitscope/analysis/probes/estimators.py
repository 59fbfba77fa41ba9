"""Probes for vocabularies of thousands of tokens, as scikit-learn estimators that know a token by its embedding.

Both predict one token of a candidate set. A set is a row of token numbers, where negative entries are empty places.
Without candidates the set is the whole vocabulary.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.optimize import minimize  # type: ignore[import-untyped]
from scipy.special import logsumexp  # type: ignore[import-untyped]
from sklearn.base import BaseEstimator, ClassifierMixin  # type: ignore[import-untyped]
from sklearn.linear_model import RidgeCV  # type: ignore[import-untyped]
from sklearn.utils.validation import check_is_fitted, validate_data  # type: ignore[import-untyped]

from circuitscope.errors import UserError

Floats = NDArray[np.floating[Any]]
Ints = NDArray[np.int64]

ALPHAS = tuple(10.0**e for e in range(-1, 6))
_CELLS = 2**22  # of candidate embeddings [example, candidate, d_embed] held at once


class EmbeddingRidge(ClassifierMixin, BaseEstimator):  # type: ignore[misc]
    """Ridge regression onto the embedding of the label, read out as the nearest candidate.

    With ē the mean embedding of the training labels, W and b minimize Σ ‖W x + b − (E[y] − ē)‖² + α ‖W‖²,
    α chosen by leave-one-out error; the prediction is the candidate c with the largest
    cos(W x + b, E[c] − ē). The map is learned on some tokens and tested on others, so it can predict a label that
    it never saw in training.

    Args:
        embedding: E [token, d_embed].
        alphas: the values of α to choose from.
    """

    def __init__(self, embedding: Any = None, alphas: Any = ALPHAS):
        self.embedding = embedding
        self.alphas = alphas

    def fit(self, X: ArrayLike, y: ArrayLike) -> "EmbeddingRidge":
        """Learns from X [example, feature] and token numbers y [example]."""
        x, labels = validate_data(self, X, y, dtype=[np.float64, np.float32])
        E, tokens = _embedding(self.embedding), _tokens(labels, self.embedding)
        self.classes_ = np.unique(tokens)
        self.mean_ = E[tokens].mean(axis=0)
        ridge = RidgeCV(alphas=self.alphas).fit(x, E[tokens] - self.mean_)
        self.coef_, self.intercept_, self.alpha_ = ridge.coef_, ridge.intercept_, float(ridge.alpha_)
        return self

    def predict(self, X: ArrayLike, candidates: ArrayLike | None = None) -> Ints:
        """The nearest token among `candidates` [example, candidate]."""
        check_is_fitted(self)
        x = validate_data(self, X, dtype=[np.float64, np.float32], reset=False)
        E = _embedding(self.embedding) - self.mean_
        E = E / np.maximum(np.linalg.norm(E, axis=1, keepdims=True), np.finfo(E.dtype).tiny)
        return _nearest(x @ self.coef_.T + self.intercept_, E, candidates)


class CandidateSet(ClassifierMixin, BaseEstimator):  # type: ignore[misc]
    """A bilinear score for every candidate, trained to tell the label from the others of its set.

        p(c | x) = softmax over the candidates c of xᵀ W (E[c] − ē) / s,

    where ē and s are the mean and the root mean square deviation of the embeddings of the training candidates. W
    minimizes Σ −log p(y | x) + α/2 ‖W‖², which is convex.

    Args:
        embedding: E [token, d_embed].
        alpha: strength of the penalty.
        max_iter: how many steps L-BFGS may take.
    """

    def __init__(self, embedding: Any = None, alpha: float = 10.0, max_iter: int = 200):
        self.embedding = embedding
        self.alpha = alpha
        self.max_iter = max_iter

    def fit(self, X: ArrayLike, y: ArrayLike, candidates: ArrayLike | None = None) -> "CandidateSet":
        """Learns from X [example, feature], token numbers y [example] and candidates [example, candidate]."""
        x, labels = validate_data(self, X, y, dtype=[np.float64, np.float32])
        if candidates is None:
            raise UserError("the model 'candidates' is trained on candidate sets; expected candidates [example, set]")
        E, sets, tokens = _embedding(self.embedding), _sets(candidates, len(x)), _tokens(labels, self.embedding)
        own = sets == tokens[:, None]
        if not own.any(axis=1).all():
            raise UserError(f"the label of example {int(own.any(axis=1).argmin())} is not among its candidates")
        self.classes_ = np.unique(tokens)
        here = E[np.unique(sets[sets >= 0])]
        self.mean_ = here.mean(axis=0)
        self.scale_ = float(np.sqrt(np.square(here - self.mean_).mean())) or 1.0
        offered = ((E - self.mean_) / self.scale_)[np.maximum(sets, 0)]
        absent, right = sets < 0, own.argmax(axis=1)
        shape = (x.shape[1], E.shape[1])

        def loss(flat: Floats) -> tuple[float, Floats]:
            W = flat.reshape(shape)
            scores = np.einsum("nd,nkd->nk", x @ W, offered)
            scores[absent] = -np.inf
            log_p = scores - logsumexp(scores, axis=1, keepdims=True)
            slope = np.exp(log_p)
            slope[np.arange(len(x)), right] -= 1
            gradient = x.T @ np.einsum("nk,nkd->nd", slope, offered) + self.alpha * W
            value = -log_p[np.arange(len(x)), right].sum() + 0.5 * self.alpha * np.square(W).sum()
            return float(value), gradient.ravel().astype(np.float64)

        found = minimize(loss, np.zeros(shape).ravel(), jac=True, method="L-BFGS-B", options={"maxiter": self.max_iter})
        self.coef_, self.n_iter_ = found.x.reshape(shape).T / self.scale_, int(found.nit)
        return self

    def predict(self, X: ArrayLike, candidates: ArrayLike | None = None) -> Ints:
        """The token with the highest score among `candidates` [example, candidate]."""
        check_is_fitted(self)
        x = validate_data(self, X, dtype=[np.float64, np.float32], reset=False)
        return _nearest(x @ self.coef_.T, _embedding(self.embedding) - self.mean_, candidates)


def _nearest(points: Floats, E: Floats, candidates: ArrayLike | None) -> Ints:
    """For each point p the token c of its set with the largest p · E[c]."""
    if candidates is None:
        return np.concatenate([(points[rows] @ E.T).argmax(axis=1) for rows in _chunks(len(points), len(E))])
    sets = _sets(candidates, len(points))
    out = np.empty(len(points), dtype=np.int64)
    for rows in _chunks(len(points), sets.shape[1] * E.shape[1]):
        scores = np.einsum("nd,nkd->nk", points[rows], E[np.maximum(sets[rows], 0)])
        scores[sets[rows] < 0] = -np.inf
        out[rows] = np.take_along_axis(sets[rows], scores.argmax(axis=1)[:, None], axis=1)[:, 0]
    return out


def _chunks(rows: int, cells: int) -> Iterator[slice]:
    step = max(1, _CELLS // max(1, cells))
    return (slice(start, min(start + step, rows)) for start in range(0, rows, step))


def _embedding(embedding: Any) -> Floats:
    E = np.asarray(embedding)
    if embedding is None or E.ndim != 2 or E.dtype.kind != "f":
        raise UserError("expected an embedding [token, d_embed] of floating-point numbers")
    return E


def _tokens(y: Ints, embedding: Any) -> Ints:
    vocabulary = len(_embedding(embedding))
    if y.dtype.kind not in "iu" or y.min() < 0 or y.max() >= vocabulary:
        raise UserError(f"labels must be token numbers from 0 to {vocabulary - 1}, the rows of the embedding")
    return y


def _sets(candidates: ArrayLike, examples: int) -> Ints:
    sets = np.asarray(candidates)
    if sets.ndim != 2 or len(sets) != examples or sets.dtype.kind not in "iu":
        raise UserError(f"expected candidates as token numbers [{examples}, set], got {sets.dtype} {sets.shape}")
    return sets
