"""One probe on arrays: what it reads, what it must not read, its baselines, its interval, its refusals."""

import numpy as np
import pytest
import torch
from sklearn.base import clone
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import GroupKFold, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from circuitscope.analysis.probes import CandidateSet, EmbeddingRidge, fit
from circuitscope.analysis.probes.fitting import _interval
from circuitscope.errors import UserError


def rng(seed=0):
    return np.random.default_rng(seed)


def classes(n=600, noise=0.3, features=8, seed=0):
    """Three classes that stand in three directions, four examples a sequence."""
    r = rng(seed)
    y = r.integers(3, size=n)
    return np.eye(features)[y] + noise * r.normal(size=(n, features)), y, np.arange(n) // 4


def tokens(n=900, vocabulary=500, d=16, noise=0.1, seed=0, k=4):
    """A rotated copy of the embedding of the label; the candidates are k distinct tokens, the label among them."""
    r = rng(seed)
    E = r.normal(size=(vocabulary, d))
    sets = np.array([r.choice(vocabulary, k, replace=False) for _ in range(n)])
    y = sets[np.arange(n), r.integers(k, size=n)]
    rotation = np.linalg.qr(r.normal(size=(d, d)))[0]
    return E[y] @ rotation + noise * r.normal(size=(n, d)), y, sets, E


def test_a_class_that_stands_in_a_direction_is_read():
    X, y, groups = classes()
    found = fit(X, y, groups=groups)
    assert found.accuracy > 0.95
    assert found.low <= found.accuracy <= found.high
    assert (found.n_train, found.n_test) == (400, 200)
    assert found.chance == pytest.approx(1 / 3)
    assert found.majority == pytest.approx(1 / 3, abs=0.1)
    assert found.selectivity == found.accuracy - found.control
    assert found.selectivity > 0.5


def test_what_is_not_there_is_not_read():
    X, y, groups = classes(n=1200)
    found = fit(rng(1).normal(size=X.shape), y, groups=groups)
    assert found.accuracy == pytest.approx(1 / 3, abs=0.08)  # 400 test examples: three standard errors are 0.07


def test_a_probe_cannot_learn_sequences_by_heart():
    """Every sequence has its own mark and its own label: known sequences would give it away, new ones do not."""
    r = rng(2)
    mark, label = r.normal(size=(100, 128)), r.integers(2, size=100)
    groups = np.repeat(np.arange(100), 10)
    X, y = mark[groups] + 0.01 * r.normal(size=(1000, 128)), label[groups]
    assert fit(X, y, groups=groups).accuracy < 0.75  # 33 test sequences: three standard errors above a half
    assert fit(X, y).accuracy > 0.95  # every example its own group


def test_a_control_that_can_be_learned_leaves_no_selectivity():
    """Features that name the token let the probe learn any labelling of tokens; those of the class alone do not."""
    r = rng(3)
    token = r.integers(20, size=1000)
    y = token % 2
    named = fit(np.eye(20)[token], y, identities=token)
    assert named.accuracy == 1
    assert named.control > 0.95
    of_class = fit(np.eye(2)[y] + 0.05 * r.normal(size=(1000, 2)), y, identities=token)
    assert of_class.accuracy == 1
    assert of_class.control < 0.9


def test_the_control_keeps_one_label_for_each_identity():
    """With one feature an identity, a control that gave a token two labels could not be learned."""
    token = np.repeat(np.arange(10), 60)
    groups = np.tile(np.arange(60), 10)
    found = fit(np.eye(10)[token], token % 3, identities=token, groups=groups)
    assert found.control == 1


def test_no_control_is_nan():
    X, y, groups = classes()
    found = fit(X, y, groups=groups, control=False)
    assert np.isnan(found.control)
    assert np.isnan(found.selectivity)


def test_embedding_ridge_reads_tokens_it_was_never_trained_on():
    X, y, sets, E = tokens()
    held = y >= 250
    assert not set(y[held]) & set(y[~held])
    found = fit(X, y, candidates=sets, embedding=E, model="embedding", test=held)
    assert found.accuracy > 0.98
    assert found.chance == 0.25
    assert found.control < 0.4


@pytest.mark.parametrize("model", ["embedding", "candidates"])
def test_chance_is_one_over_the_candidates_where_nothing_is_read(model):
    X, y, sets, E = tokens(n=2400)
    found = fit(rng(4).normal(size=X.shape), y, candidates=sets, embedding=E, model=model)
    assert found.accuracy == pytest.approx(0.25, abs=0.05)  # 800 test examples: three standard errors are 0.046


def test_without_candidates_the_vocabulary_is_the_set():
    X, y, _, E = tokens(noise=0.02)
    found = fit(X, y, embedding=E, model="embedding")
    assert found.accuracy > 0.95
    assert found.chance == 1 / 500


def test_negative_candidates_are_empty_places():
    X, y, sets, E = tokens()
    padded = np.where((sets == y[:, None]) | (np.arange(4) == 0), sets, -1)  # one or two are left
    found = fit(X, y, candidates=padded, embedding=E, model="embedding")
    size = (padded >= 0).sum(axis=1)
    assert found.chance == pytest.approx((1 / size).mean(), abs=0.05)
    assert found.accuracy > 0.98
    answers = found.estimator.predict(X, candidates=padded)
    assert (answers >= 0).all()
    assert (answers == padded.T).any(axis=0).all()


def test_majority_of_a_candidate_set_is_the_best_place():
    X, y, sets, E = tokens()
    first = np.stack([y, *[np.where(sets[:, i] == y, sets[:, 0], sets[:, i]) for i in (1, 2, 3)]], axis=1)
    assert fit(X, y, candidates=first, embedding=E, model="embedding").majority == 1


def test_candidate_set_of_two_is_logistic_regression():
    """p(a) = σ(xᵀ W (E_a − E_b)/s): with W = w dᵀ/‖d‖² a logistic regression with C = ‖d‖²/α and no intercept."""
    r = rng(5)
    E = r.normal(size=(2, 3))
    X = r.normal(size=(400, 5))
    y = (X @ r.normal(size=5) + 0.5 * r.normal(size=400) < 0).astype(int)
    ours = CandidateSet(E, alpha=2.0, max_iter=2000).fit(X, y, candidates=np.tile([0, 1], (400, 1)))
    d = (E[1] - E[0]) / ours.scale_
    oracle = LogisticRegression(C=d @ d / 2.0, fit_intercept=False, tol=1e-8, max_iter=2000).fit(X, y)
    np.testing.assert_allclose(ours.coef_.T @ (E[1] - E[0]), oracle.coef_[0], rtol=1e-3, atol=1e-4)
    np.testing.assert_array_equal(ours.predict(X, candidates=np.tile([0, 1], (400, 1))), oracle.predict(X))


def test_candidate_set_reads_what_is_there():
    X, y, sets, E = tokens()
    assert fit(X, y, candidates=sets, embedding=E, model="candidates").accuracy > 0.95


@pytest.mark.parametrize("kind", [EmbeddingRidge, CandidateSet])
def test_estimators_are_clonable_and_follow_scikit_learn(kind):
    X, y, sets, E = tokens()
    original = kind(E)
    copy = clone(original)
    assert copy is not original
    np.testing.assert_array_equal(copy.get_params()["embedding"], E)
    more = {"candidates": sets} if kind is CandidateSet else {}
    one, two = original.fit(X, y, **more), copy.fit(X, y, **more)
    assert one is original
    np.testing.assert_array_equal(one.predict(X, candidates=sets), two.predict(X, candidates=sets))
    assert not hasattr(clone(one), "coef_")
    other = clone(original).set_params(embedding=E[::-1].copy())
    assert other.embedding is not original.embedding


def test_embedding_ridge_works_in_a_pipeline_and_in_cross_validation():
    X, y, _, E = tokens(noise=0.02)
    model = make_pipeline(StandardScaler(), EmbeddingRidge(E))
    found = cross_val_score(model, X, y, groups=np.arange(len(X)) // 3, cv=GroupKFold(3))
    assert found.min() > 0.9


def test_any_scikit_learn_model_is_taken_and_left_alone():
    X, y, groups = classes()
    mine = LogisticRegression(C=0.5)
    assert fit(X, y, model=mine, groups=groups).accuracy > 0.95
    assert not hasattr(mine, "coef_")


def test_ridge_reads_vectors_by_r2():
    r = rng(6)
    w = r.normal(size=(300, 5))
    X = w @ r.normal(size=(5, 12)) + 0.05 * r.normal(size=(300, 12))
    found = fit(X, w, model="ridge")
    assert found.metric == "r2"
    assert found.accuracy > 0.95
    assert (found.majority, found.chance) == (0, 0)
    assert found.control < 0.1
    held = fit(X, w, model="ridge", test=np.arange(300) >= 200)
    answers = held.estimator.predict(X[200:])
    by_hand = 1 - ((w[200:] - answers) ** 2).sum() / ((w[200:] - w[:200].mean(axis=0)) ** 2).sum()
    assert held.accuracy == pytest.approx(by_hand, abs=1e-12)


def test_the_interval_covers_the_truth():
    """Sequences of four questions that stand or fall together: intervals over examples would be half as wide."""
    inside = 0
    for seed in range(300):
        r = rng(seed)
        lost = 4.0 * (r.random(100) < 0.3)
        low, high = _interval(lost, np.full(100, 4.0), r)
        inside += low <= 0.7 <= high
    assert 0.90 <= inside / 300 <= 0.98


def test_arrays_by_batch_and_position_and_tensors_are_taken():
    X, y, groups = classes()
    flat = fit(X, y, groups=groups)
    shaped = fit(torch.tensor(X).reshape(150, 4, 2, 4), torch.tensor(y).reshape(150, 4))
    assert (shaped.accuracy, shaped.control, shaped.low) == (flat.accuracy, flat.control, flat.low)


def test_the_same_call_gives_the_same_numbers():
    X, y, sets, E = tokens()
    one, two = (fit(X, y, candidates=sets, embedding=E, model="embedding", seed=7) for _ in range(2))
    assert (one.accuracy, one.low, one.control) == (two.accuracy, two.low, two.control)
    other = fit(X, y, candidates=sets, embedding=E, model="embedding", seed=8)
    assert one.control != other.control


def test_without_its_directions_nothing_is_read_and_without_the_rows_of_w_it_still_is():
    """The label in two coordinates, one noisier: w leans to the clear one, and the other still tells."""
    r = rng(8)
    y = r.integers(2, size=6000)
    X = (2 * y - 1)[:, None] + r.normal(size=(6000, 2)) * [0.5, 1.0]
    found = fit(X, y)
    assert found.accuracy > 0.95

    def left(U):
        return fit(X - (X - X.mean(axis=0)) @ U.T @ U, y).accuracy

    U = found.directions(1)
    np.testing.assert_allclose(np.abs(U), [[0.5**0.5, 0.5**0.5]], atol=0.03)
    assert left(U) == pytest.approx(0.5, abs=0.04)
    w = found.estimator["probe"].coef_ / found.estimator["scale"].scale_
    assert left(w / np.linalg.norm(w)) > 0.7


def test_as_many_directions_as_hold_the_covariance():
    X, y, sets, E = tokens(n=3000, d=16, noise=0.01)
    X = np.concatenate([X[:, :3], 0.01 * rng(9).normal(size=(3000, 5))], axis=1)
    found = fit(X, y, candidates=sets, embedding=E, model="embedding")
    assert len(found.directions()) == 3
    np.testing.assert_allclose(np.linalg.norm(found.directions()[:, :3], axis=1), 1, atol=1e-3)
    assert found.control_directions(2).shape == (2, 8)
    with pytest.raises(UserError, match="1 to 8 directions, got 9"):
        found.directions(9)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"labels": np.zeros(600, dtype=int)}, "the label is constant: 0"),
        ({"labels": np.arange(600)}, "400 training examples are too few for 400 classes: .* 5 per class, 2000 in all"),
        ({"labels": np.zeros(10, dtype=int)}, "labels are for 10 examples, the activations for 600"),
        ({"labels": np.linspace(0, 1, 600)}, "real numbers"),
        ({"model": "logistik"}, "unknown model 'logistik'; did you mean 'logistic'"),
        ({"model": "embedding"}, "needs the embedding"),
        ({"test": 1.5}, "between 0 and 1"),
        ({"test": np.arange(600) % 2 == 0}, "150 sequences are in the training set and in the test set"),
        ({"groups": np.zeros(600)}, "at least 2 sequences"),
        ({"activations": np.full((600, 8), np.nan)}, "NaN"),
        ({"activations": np.zeros(600)}, r"\[example, feature\]"),
        ({"activations": np.zeros((0, 8)), "labels": np.zeros(0), "groups": None}, "no examples"),
        ({"model": "embedding", "embedding": np.zeros((2, 4))}, "token numbers from 0 to 1"),
        (
            {"model": "embedding", "embedding": np.ones((3, 4)), "candidates": np.full((600, 2), 9)},
            "not among its candidates",
        ),
        ({"candidates": np.zeros((5, 2), dtype=int)}, "candidates are for 5 examples"),
        ({"labels": np.ones((600, 2)), "model": "ridge"}, "the same vector"),
        ({"labels": np.ones((600, 2), dtype=int)}, "one label per example"),
    ],
)
def test_bad_input_is_one_line(change, message):
    X, y, groups = classes()
    given = {"activations": X, "labels": y, "groups": groups, **change}
    with pytest.raises(UserError, match=message) as error:
        fit(given.pop("activations"), given.pop("labels"), **given)
    assert "\n" not in str(error.value)


def test_a_fit_shows_itself_in_one_line():
    X, y, groups = classes()
    found = fit(X, y, groups=groups)
    assert repr(found).startswith(f"Fit(accuracy {found.accuracy:.3f}, {found.low:.3f} to {found.high:.3f}; control 0.")
    assert "no control" in repr(fit(X, y, groups=groups, control=False))
    assert "\n" not in repr(found)
    assert len(repr(found)) < 160
