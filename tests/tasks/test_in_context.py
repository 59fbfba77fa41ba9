"""In-context learning tasks make what they say: labels are the function of the inputs, and rules do what they must."""

import numpy as np
import pytest
import torch
from scipy import stats

import circuitscope as cs
from circuitscope.tasks import TASKS, Role, VectorTask
from circuitscope.tasks.baselines import averaging, fitted, least_squares, least_squares_weights, nearest, network
from circuitscope.tasks.streams import normal, stream_key, words

VECTORS = sorted(name for name in TASKS.own() if issubclass(TASKS[name], VectorTask))
EXAMPLES = np.arange(40)


def small(name, **options):
    return cs.task(name, **{**TASKS[name].small, **options})


def points(batch):
    """x [example, point, coordinate] and y [example, point] of a prompt x1 y1 x2 y2 …, in float64."""
    inputs = batch.inputs.double().numpy()
    return inputs[:, ::2], inputs[:, 1::2, 0]


@pytest.mark.parametrize("name", VECTORS)
def test_a_batch_is_a_function_of_its_arguments(name):
    task = small(name)
    one, again, other = task.batch(3, size=5), task.batch(3, size=5), task.batch(3, size=5, seed=1)
    assert torch.equal(one.inputs, again.inputs)
    assert torch.equal(one.labels.nan_to_num(9), again.labels.nan_to_num(9))
    assert not torch.equal(one.inputs, other.inputs)
    held_out = task.batch(3, size=5, split="test")
    assert not torch.equal(one.inputs, held_out.inputs)
    assert torch.equal(task.batch(0, size=20, split="test").inputs[15:], held_out.inputs)
    assert one.inputs.dtype == one.labels.dtype == torch.float32
    assert one.inputs.shape == (5, task.max_length, task.d_input)
    assert one.labels.shape == (5, task.max_length, task.d_output)
    assert {Role(int(r)) for r in one.layout.roles.unique()} <= set(task.roles)
    assert bool(one.has_label().any(dim=1).all())


@pytest.mark.parametrize("name", VECTORS)
def test_answering_zero_has_the_error_that_the_task_says(name):
    """So that explained variance is 0 for answering 0; the mean of 4,000 sequences is within 5 standard errors."""
    task = small(name)
    batch = task.batch(0, size=4000)
    zero = batch.losses(torch.zeros(batch.label_count, task.d_output)).double()
    if name == "vector_mqar":
        assert zero.numpy() == pytest.approx(1, abs=1e-5)
    elif name != "sparse_parity":
        per_sequence = [float(part.mean()) for part in zero.split(batch.has_label().sum(dim=1).tolist())]
        far = abs(np.mean(per_sequence) - task.zero_error) / stats.sem(per_sequence)
        assert far < (5 if "outlier" not in name else 6)


def test_normal_variates_are_standard_normal():
    drawn = normal(words(stream_key("a test"), np.arange(200), 100))
    assert stats.kstest(drawn.ravel(), "norm").pvalue > 1e-3
    assert stats.kstest(drawn[:, 0], "norm").pvalue > 1e-3


def test_the_label_of_a_linear_regression_is_its_weights_times_x():
    batch = cs.task("linear_regression").batch(0, size=8)
    x, y = points(batch)
    assert np.einsum("npd,nd->np", x, batch.weights.double().numpy()) == pytest.approx(y, abs=1e-4)
    assert torch.equal(batch.labels[:, 2::2, 0], batch.inputs[:, 3::2, 0])
    assert bool(batch.labels[:, 1::2].isnan().all())
    assert bool(batch.labels[:, 0].isnan().all())  # no zero-shot term
    assert not batch.inputs[:, 1::2, 1:].any()
    assert stats.kstest(x.ravel(), "norm").pvalue > 1e-3


def test_sparse_weights_keep_so_many_coordinates_at_uniform_places():
    weights = cs.task("sparse_linear", points=2).batch(0, size=4000).weights.numpy()
    assert ((weights != 0).sum(axis=1) == 3).all()
    assert stats.chisquare((weights != 0).sum(axis=0)).pvalue > 1e-3
    assert stats.kstest(weights[weights != 0], "norm").pvalue > 1e-3


def test_least_squares_has_no_error_after_as_many_points_as_coordinates():
    task = cs.task("linear_regression", dims=6, points=12)
    batch = task.batch(0, size=30)
    errors = task.baselines["least squares"](batch).view(30, 11)
    assert errors[:, 5:].max() < 1e-4
    assert errors[:, :5].mean() > 0.1
    expected = 6 * (1 - np.arange(1, 6) / 6)  # w is known in i of d directions
    many = task.baselines["least squares"](task.batch(0, size=3000)).view(3000, 11)[:, :5].mean(dim=0)
    assert many.numpy() == pytest.approx(expected, rel=0.15)


def test_least_squares_is_that_of_numpy():
    x, y, new = np.random.default_rng(0).normal(size=(3, 4, 7, 5)), np.random.default_rng(1).normal(size=(4, 7)), None
    for count in (3, 5, 7):
        found = least_squares_weights(x[0][:, :count], y[:, :count])
        for row in range(4):
            expected = np.linalg.lstsq(x[0][row, :count], y[row, :count], rcond=None)[0]
            assert found[row] == pytest.approx(expected, abs=1e-8)
    new = x[1][:, 0]
    assert least_squares(x[0], y, new) == pytest.approx(np.einsum("nd,nd->n", least_squares_weights(x[0], y), new))
    assert averaging(x[0], y, new)[2] == pytest.approx(np.mean([y[2, i] * x[0][2, i] @ new[2] for i in range(7)]))


def test_nearest_neighbours_are_those_of_scikit_learn():
    from sklearn.neighbors import KNeighborsRegressor

    draw = np.random.default_rng(0)
    x, y, new = draw.normal(size=(6, 9, 4)), draw.normal(size=(6, 9)), draw.normal(size=(6, 4))
    expected = fitted(lambda: KNeighborsRegressor(3))(x, y, new)
    assert nearest(3)(x, y, new) == pytest.approx(expected)
    assert nearest(3)(x[:, :2], y[:, :2], new) == pytest.approx(y[:, :2].mean(axis=1))


def test_lasso_beats_least_squares_where_weights_are_sparse_and_points_few():
    task = cs.task("sparse_linear", dims=12, nonzero=1, points=9)
    batch = task.batch(0, size=60)
    errors = {name: baseline(batch).view(60, 8)[:2, 5:] for name, baseline in task.baselines.items()}
    assert errors["lasso"].mean() < 0.5 * errors["least squares"].mean()
    assert bool(task.baselines["lasso"](batch).view(60, 8)[2:].isnan().all())  # slow, so it is asked of two prompts


def test_a_network_fits_a_network_better_than_a_line_does():
    task = cs.task("two_layer_network", dims=2, hidden=4, points=61)
    x, y = points(task.batch(0, size=6))
    found, line = (rule(x[:, :-1], y[:, :-1], x[:, -1]) - y[:, -1] for rule in (network, least_squares))
    assert np.square(found).mean() < 0.3 * np.square(line).mean()


@pytest.mark.parametrize("scaled", [False, True])
def test_a_two_layer_network_is_linear_along_a_ray(scaled):
    """relu(c z) = c relu(z) for c > 0, so y(c x) = c y(x)."""
    from circuitscope.tasks.two_layer_network import forward

    x = np.random.default_rng(0).normal(size=(40, 3, 5))
    s, y = forward(7, EXAMPLES, x, 8, scaled)
    _, twice = forward(7, EXAMPLES, 2 * x, 8, scaled)
    _, back = forward(7, EXAMPLES, -x, 8, scaled)
    assert twice == pytest.approx(2 * y)
    assert not np.allclose(back, -y)
    assert (s >= 0).all()
    assert (s > 0).any()


@pytest.mark.parametrize("scaled", [False, True])
def test_the_label_of_a_two_layer_network_is_that_of_its_own_weights(scaled):
    """Unit by unit, with weights that are standard normal and drawn for each sequence."""
    from circuitscope.tasks.two_layer_network import layers

    task = cs.task("two_layer_network", dims=3, hidden=5, points=4, scaled=scaled)
    batch = task.batch(2, size=6)
    first, second = layers(*task.address(2, "train", 6), 3, 5)
    x, y = points(batch)
    for row in range(6):
        for point in range(4):
            s = [max(0.0, sum(first[row, i, unit] * x[row, point, i] for i in range(3))) for unit in range(5)]
            expected = sum(w * value for w, value in zip(second[row], s, strict=True)) * (
                (2 / 5) ** 0.5 if scaled else 1
            )
            assert y[row, point] == pytest.approx(expected, abs=1e-5)
    assert torch.equal(batch.labels[:, 2::2, 0], batch.inputs[:, 3::2, 0])
    many = layers(7, np.arange(500), 3, 5)
    assert all(stats.kstest(part.ravel(), "norm").pvalue > 1e-3 for part in many)


def test_the_thought_of_a_chain_is_max_0_w_x_for_one_w_per_sequence():
    """W is found from the points where a unit is positive, and then gives the unit at every point."""
    batch = cs.task("chain_of_thought", dims=3, hidden=4, points=40).batch(0, size=8)
    x, s = (batch.inputs[:, i::3].double().numpy() for i in range(2))
    for row in range(8):
        for unit in range(4):
            positive = s[row, :, unit] > 0
            assert positive.sum() > 3
            w, *_ = np.linalg.lstsq(x[row, positive, :3], s[row, positive, unit], rcond=None)
            assert np.maximum(0, x[row, :, :3] @ w) == pytest.approx(s[row, :, unit], abs=1e-4)


def test_a_tree_goes_right_where_a_coordinate_is_above_zero():
    task = small("decision_tree", depth=3, dims=4, points=30)
    x = task.inputs_of(5, EXAMPLES)
    coordinates, leaves = task.nodes(5, EXAMPLES)
    y = task.outputs(5, EXAMPLES, x)
    for row in range(5):
        for point in range(30):
            node = 0
            while node < 7:
                node = 2 * node + (2 if x[row, point, coordinates[row, node]] > 0 else 1)
            assert y[row, point] == leaves[row, node - 7]
    every = task.nodes(5, np.arange(3000))
    assert stats.chisquare(np.bincount(every[0].ravel(), minlength=4)).pvalue > 1e-3
    assert stats.kstest(every[1].ravel(), "norm").pvalue > 1e-3


def test_a_greedy_tree_finds_a_tree_of_one_comparison():
    task = cs.task("decision_tree", dims=1, depth=1, points=60)
    errors = task.baselines["a tree fitted greedily"](task.batch(0, size=4)).view(4, 59)[:2]
    assert errors[:, 30:].mean() < 0.1 * errors[:, :3].mean() + 1e-9


@pytest.mark.parametrize("plane", ["sequence", "pair"])
def test_orthogonal_outliers_are_orthogonal_to_the_weights_of_their_own_sequence(plane):
    batch = cs.task("orthogonal_outlier", outliers=0.5, plane=plane).batch(0, size=50)
    w, out = batch.weights.double(), batch.layout.roles == Role.OUTLIER
    along = torch.einsum("npd,nd->np", batch.inputs.double(), w) / (
        batch.inputs.double().norm(dim=2) * w.norm(dim=1)[:, None]
    )
    assert along[out].abs().max() < 1e-4
    assert along[:, ::2][~out[:, ::2]].abs().mean() > 0.1
    other = torch.einsum("npd,nd->np", batch.inputs.double(), w.roll(1, 0)) / w.norm(dim=1).roll(1, 0)[:, None]
    assert other[out].abs().median() > 0.01  # to another sequence's weights they are not
    ranks = [int(torch.linalg.matrix_rank(batch.inputs[i][out[i]].double(), rtol=1e-5)) for i in range(10)]
    assert set(ranks) == ({2} if plane == "sequence" else {19})
    assert float(out.double().mean()) == pytest.approx(0.5, abs=0.03)


def test_outliers_have_no_label_and_all_other_points_but_the_first_do():
    for name in ("orthogonal_outlier", "many_outlier"):
        batch = cs.task(name, points=60).batch(0, size=40)
        inlier = batch.layout.roles == Role.INPUT
        expected = inlier.clone()
        expected[:, 0] = False
        assert torch.equal(batch.has_label(), expected)
        x, y = points(batch)
        found = np.einsum("npd,nd->np", x, batch.weights.double().numpy())
        assert found[inlier[:, ::2].numpy()] == pytest.approx(y[inlier[:, ::2].numpy()], abs=1e-4)


def test_many_outliers_are_all_the_same_pair():
    batch = cs.task("many_outlier").batch(0, size=20)
    out = batch.layout.roles == Role.OUTLIER
    assert bool((batch.inputs[:, ::2][out[:, ::2]] == 1).all())
    assert torch.equal(batch.inputs[:, 1::2][out[:, 1::2]].unique(dim=0), torch.eye(1, 20))
    assert float(out.double().mean()) == pytest.approx(0.9, abs=0.01)


def test_least_squares_on_the_inliers_is_not_misled():
    task = cs.task("orthogonal_outlier", dims=4, points=40, outliers=0.3)
    batch = task.batch(0, size=10)
    where = batch.labelled()[0] % 80
    errors = task.baselines["least squares on the inliers"](batch)
    assert errors[where > 40].max() < 1e-3


def test_parity_is_the_product_of_coordinates_that_are_drawn_for_each_sequence():
    task = cs.task("sparse_parity", points=30)
    batch = task.batch(0, size=400)
    x, y = points(batch)
    assert set(np.unique(x)) == set(np.unique(y)) == {-1, 1}
    products = x[:, :, :, None] * x[:, :, None, :]
    fits = (products == y[:, :, None, None]).all(axis=1)  # [example, coordinate, coordinate]
    assert (fits.sum(axis=(1, 2)) >= 2).all()
    only = fits.sum(axis=(1, 2)) == 2
    pairs = np.array([tuple(np.argwhere(fits[i])[0]) for i in np.flatnonzero(only)])
    counts = np.bincount(pairs[:, 0] * 10 + pairs[:, 1])
    assert (counts > 0).sum() == 45  # all pairs of coordinates occur
    assert stats.chisquare(counts[counts > 0]).pvalue > 1e-3
    assert stats.binomtest(int((x > 0).sum()), x.size).pvalue > 1e-3


def test_a_chain_of_thought_shows_the_hidden_layer_of_its_network():
    task = cs.task("chain_of_thought", dims=3, hidden=5, points=9)
    batch = task.batch(0, size=6)
    x, s, y = (batch.inputs[:, i::3].double().numpy() for i in range(3))
    assert task.d_input == 5
    assert not x[:, :, 3:].any()
    for row in range(6):
        # y = s · v exactly, for one v; and s is max(0, x W): linear in x where it is positive
        v, *_ = np.linalg.lstsq(s[row], y[row, :, 0], rcond=None)
        assert s[row] @ v == pytest.approx(y[row, :, 0], abs=1e-4)
    assert (s >= 0).all()
    assert torch.equal(batch.labels[:, 3::3], batch.inputs[:, 4::3])
    assert torch.equal(batch.labels[:, 4::3, 0], batch.inputs[:, 5::3, 0])
    assert bool(batch.labels[:, 2::3].isnan().all())


def test_the_last_step_of_a_chain_of_thought_is_measured_from_the_models_own_thought():
    """A model that answers s with 0 and y with the first entry of what it reads: its own s is 0, so is its y."""
    task = cs.task("chain_of_thought", dims=3, hidden=3, points=4)

    class Reads(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.nothing = torch.nn.Parameter(torch.zeros(()))

        def forward(self, inputs, at=None):
            out = torch.zeros_like(inputs)
            out[:, 1::3, 0] = inputs[:, 1::3, 0]
            return out.flatten(0, 1)[at] + self.nothing

    batch = task.batch(0, size=20)
    found = task.measures(Reads(), batch)
    y = batch.labels[:, -2, 0].double()
    assert found["error of the last y from the model's own s"].mean() == pytest.approx(float((y**2).mean()))
    read = batch.inputs[:, -2, 0].double()
    assert found["error of the last y"].mean() == pytest.approx(float(((y - read) ** 2).mean()))
    s = batch.labels[:, 3::3].double()
    assert found["error of s"].mean() == pytest.approx(float(s.square().sum(dim=2).mean()))


def test_keys_and_values_of_vector_mqar_are_uniform_on_the_sphere_and_queries_ask_for_them():
    task = cs.task("vector_mqar")
    batch, layout = task.batch(0, size=30), task.batch(0, size=30).layout
    assert batch.inputs.norm(dim=2).numpy() == pytest.approx(1, abs=1e-5)
    rows = torch.arange(30)[:, None]
    assert torch.equal(
        batch.inputs[rows, layout.query_pos], batch.inputs[rows, layout.key_pos][rows, layout.query_pair]
    )
    assert torch.equal(batch.labels[rows, layout.query_pos], batch.inputs[rows, layout.answer_pos()])
    assert all(len(set(pairs)) == 16 for pairs in layout.query_pair.tolist())
    # in d dimensions, (first coordinate)² of a uniform unit vector is Beta(1/2, (d − 1)/2)
    first = batch.inputs[:, : 2 * 32, 0].double().square().flatten().numpy()
    assert stats.kstest(first, "beta", args=(0.5, 9.5)).pvalue > 1e-3
    asked = task.batch(0, size=600).layout.query_pair.flatten().numpy()
    assert stats.chisquare(np.bincount(asked, minlength=32)).pvalue > 1e-3


def test_an_answer_of_vector_mqar_is_right_if_the_value_asked_for_is_nearest():
    batch = cs.task("vector_mqar", pairs=6, queries=3).batch(0, size=50)
    target = batch.labelled()[1]
    assert bool((batch.right(target) == 1).all())
    assert bool((batch.right(0.3 * target) == 1).all())
    others = batch.right(torch.nn.functional.normalize(torch.randn_like(target), dim=1)).mean()
    assert float(others) == pytest.approx(1 / 6, abs=0.1)
    wrong = batch.inputs[torch.arange(50)[:, None], batch.layout.value_pos]  # [50, 6, d]
    not_asked = (batch.layout.query_pair + 1) % 6
    assert not batch.right(wrong[torch.arange(50)[:, None], not_asked].flatten(0, 1)).any()


def test_baselines_of_vector_mqar_are_what_they_are_called():
    task = cs.task("vector_mqar", pairs=8, queries=8)
    batch = task.batch(0, size=400)
    found = {name: float(baseline(batch).mean()) for name, baseline in task.baselines.items()}
    assert found["answering 0"] == pytest.approx(1, abs=1e-5)
    assert found["the mean of the values"] == pytest.approx(1 - 1 / 8, abs=0.02)
    assert not task.larger_is_better
    chain = cs.task("chain_of_thought", dims=3, hidden=4, points=5)
    answered = chain.batch(0, size=9)
    zero = chain.baselines["answering 0"](answered)
    assert zero == pytest.approx(answered.labelled()[1].square().sum(dim=1))


def test_a_curriculum_grows_with_the_step_and_leaves_held_out_examples_alone():
    task = cs.task("linear_regression", curriculum=10)
    plain = cs.task("linear_regression")
    for step, dims, count in ((0, 5, 11), (9, 5, 11), (10, 6, 13), (150, 20, 41), (10_000, 20, 41)):
        batch = task.batch(step, size=3)
        assert batch.length == 2 * count
        assert bool((batch.inputs[:, ::2, :dims] != 0).all())
        assert not batch.inputs[:, ::2, dims:].any()
    for split in ("validation", "test"):
        assert torch.equal(task.batch(0, split=split).inputs, plain.batch(0, split=split).inputs)
    assert torch.equal(task.batch(200).inputs, plain.batch(200).inputs)
    public = cs.task("sparse_linear", curriculum=1)  # 26 points, and 5 more in each stage
    assert [public.batch(step, size=1).length // 2 for step in (0, 1, 15)] == [26, 31, 101]


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("sparse_linear", {"dims": 2}, "nonzero must be at most dims = 2, got 3"),
        ("orthogonal_outlier", {"dims": 1}, "dims must be at least 2, or nothing but 0 is orthogonal to w, got 1"),
        ("sparse_parity", {"dims": 3, "factors": 4}, "factors must be at most dims = 3, got 4"),
        ("vector_mqar", {"pairs": 4, "queries": 5}, "queries must be at most pairs = 4, got 5"),
        ("linear_regression", {"first_dims": 21, "curriculum": 5}, "first_dims must be at most dims = 20, got 21"),
    ],
)
def test_sizes_that_are_impossible_are_refused_with_the_inequality(name, options, said):
    with pytest.raises(cs.UserError, match=said):
        cs.task(name, **options)


def test_a_task_may_be_named_with_hyphens():
    assert cs.task("linear-regression") == cs.task("linear_regression")
    assert cs.RunConfig.build(task="vector-mqar").task.name == "vector_mqar"


def test_measures_by_place_cover_the_labels_of_that_place():
    task = cs.task("linear_regression", dims=3, points=9)
    model = cs.model("attention", d_model=8, n_layers=1, d_input=3, d_output=1)
    batch = task.batch(0, size=12, split="test")
    found = task.measures(model, batch)
    assert list(found) == ["loss", "error", *(f"error after {n}" for n in (1, 2, 3, 4, 8))]
    with torch.no_grad():
        error = (model(batch.inputs)[:, 6, 0] - batch.labels[:, 6, 0]).square().mean()
    assert found["error after 3"].mean() == pytest.approx(float(error), rel=1e-4)
    assert found["loss"].mean() == pytest.approx(task.evaluate(model, batch)[0], rel=1e-4)
