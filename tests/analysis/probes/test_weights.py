"""w is read point by point: a stream that holds least squares' estimate shows it, one that holds nothing does not."""

import pytest
import torch

import circuitscope as cs
from circuitscope.analysis.probes import weights_by_point
from circuitscope.tasks.baselines import least_squares_weights

TASK = cs.task("linear_regression", dims=3, points=6)


def model_of():
    return cs.model("attention", d_model=16, n_layers=1, **TASK.needs()).eval()


def test_least_squares_knows_w_from_as_many_points_as_coordinates_on():
    table = weights_by_point(model_of(), TASK.batch(0, size=300), "hook_embed")
    assert table.points.tolist() == [1, 2, 3, 4, 5, 6]
    assert table.least_squares[:2].to_list() == pytest.approx([1 / 3, 2 / 3], abs=0.1)
    assert table.least_squares[2:].min() > 1 - 1e-6
    assert table.weights.max() < 0.2  # y alone says little of w


def test_a_stream_that_holds_the_estimate_is_read(monkeypatch):
    """The estimate of least squares is written into the stream in place of what the model computes."""
    model, batch = model_of(), TASK.batch(0, size=300)
    x, y = batch.inputs[:, ::2].double().numpy(), batch.inputs[:, 1::2, 0].double().numpy()
    estimates = {i: torch.from_numpy(least_squares_weights(x[:, : i + 1], y[:, : i + 1])).float() for i in range(6)}
    written = torch.zeros(300, 12, 16)
    for i, estimate in estimates.items():
        written[:, 2 * i + 1, :3] = estimate
    by_input = {tuple(row.flatten().tolist()): i for i, row in enumerate(batch.inputs)}

    def write(value, hook):
        return written[[by_input[key] for key in now["keys"]]]

    now = {}
    forward = model.embedded

    def embedded(inputs):
        now["keys"] = [tuple(row.flatten().tolist()) for row in inputs]
        return forward(inputs)

    monkeypatch.setattr(model, "embedded", embedded)
    model.hook_dict["blocks.0.hook_resid_post"].add_hook(write, is_permanent=True)
    table = weights_by_point(model, batch, "blocks.0.hook_resid_post")
    assert table.estimate.min() > 0.95
    assert table.weights[2:].min() > 0.95
    assert table.weights.to_list()[0] == pytest.approx(1 / 3, abs=0.15)


def test_other_tasks_and_roles_are_refused():
    with pytest.raises(cs.UserError, match="needs sequences of a linear regression"):
        weights_by_point(model_of(), cs.task("sparse_parity", dims=3, points=4).batch(0), "hook_embed")
    with pytest.raises(cs.UserError, match="no position has the role 'query'"):
        weights_by_point(model_of(), TASK.batch(0), "hook_embed", role="query")
