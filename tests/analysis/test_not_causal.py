"""Analyses of a run whose conv reads later positions: each gives the numbers of the whole matrix, or says why not."""

import numpy as np
import pytest
import torch

import circuitscope as cs
from circuitscope.analysis import analysis_results, find_circuit, knock_out
from circuitscope.analysis.checkpoints.runner import held_out
from circuitscope.analysis.decay.gradient_reach import gradient_reach
from circuitscope.analysis.decay.layer_decay import layer_decay
from circuitscope.analysis.decay.rows import decay_rows
from circuitscope.analysis.probes import probe
from circuitscope.analysis.registry import ANALYSES
from circuitscope.analysis.scores.edges import Edges
from circuitscope.training.trainer import train
from circuitscope.viz.phi_figure import phi_figure
from circuitscope.viz.report import report
from tiny_run import tiny


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    config = tiny(
        mixers=[{"name": "attention", "conv_on": "v", "conv_mode": "centred"}],
        n_layers=2,
        lr=0.05,
        embed_std=1.0,
        init="native",
    )
    return train(config, root=tmp_path_factory.mktemp("runs"), name="centred")


@pytest.fixture(scope="module")
def model(run):
    return run.load(run.steps[-1])


@pytest.fixture(scope="module")
def batch(run):
    return held_out(run, 8).own


def test_every_analysis_of_the_run_is_done_or_refused_with_a_sentence(run):
    for name, one in ANALYSES.items():
        if why := one.refuses(run):
            assert name == "circuit"
            assert "conv of layer 0 also brings a value to positions before it" in why
            continue
        found = analysis_results(run, [name], sequences=8)[name]
        assert len(found) or name == "phases"  # so short a run has no transitions


def test_a_circuit_is_not_looked_for(model, batch):
    with pytest.raises(cs.UserError, match=r"^a recall circuit is looked for at the values and after them, and conv"):
        find_circuit(model, batch)


def test_scores_take_shares_of_whole_rows(run, model, batch):
    """The weight of the conv on the position before is w₋₁ / Σ|w|, with the taps ahead in the sum."""
    rows = analysis_results(run, ["scores"], sequences=8)["scores"]
    rows = rows[(rows.layer == 0) & (rows.factor == "conv") & (rows.score == "previous_token")]
    rows = rows[(rows.weighting == "abs") & (rows.step == run.steps[-1]) & rows["head"].notna()].sort_values("head")
    matrix = cs.phi(model, batch.tokens, layer=0, factors="conv").detach().abs()[0]
    assert (matrix.triu(1).sum((1, 2)) > 0).all()
    before = matrix.diagonal(-1, -2, -1) / matrix.sum(-1)[:, 1:]
    np.testing.assert_allclose(rows.value, before.mean(-1).numpy(), rtol=1e-4)


def test_edges_ahead_can_be_knocked_out(model, batch):
    """Cutting key ← value, one position ahead, changes the logits as an edit of the conv's matrix does."""
    mask = torch.zeros(len(batch), *batch.tokens.shape[1:] * 2, dtype=torch.bool)
    mask[:, torch.arange(15), torch.arange(1, 16)] = True
    effect = knock_out(model, batch, Edges.of("next", mask), layer=0, factor="conv")
    assert effect.n == len(batch)

    def cut(matrix, hook):
        return matrix * ~mask[:, None]

    hooks = [("blocks.0.mixer.hook_phi_conv", cut)]
    with torch.no_grad():
        plain, edited = model(batch.tokens), model.run_with_hooks(batch.tokens, fwd_hooks=hooks)
    where, labels = batch.labelled()
    right = edited.flatten(0, 1)[where].argmax(-1) == labels
    assert effect.after == pytest.approx(right.float().mean().item(), abs=1e-6)
    assert not torch.allclose(plain, edited)


def test_decay_refuses_the_conv_and_measures_the_pattern(model, batch):
    said = "conv of layer 0 reads later positions, and m.* ask for a causal matrix: pattern"
    with pytest.raises(cs.UserError, match=said):
        layer_decay(model, batch.tokens, 0, "conv")
    with pytest.raises(cs.UserError, match=said):
        decay_rows(model, batch.tokens, factors=["conv"])
    assert layer_decay(model, batch.tokens, 0).whole.profile.shape == (1, 16)


def test_gradients_reach_back_exactly_where_a_layer_also_sees_ahead(model, batch):
    tokens = batch.tokens[:2, :6]
    reach = gradient_reach(model, tokens, 0, probes=None)
    block = model.layers[0]
    resid = model.stream_before(tokens, 0).detach()
    for lag in (0, 1, 5):
        squares = []
        for b in range(len(tokens)):
            jacobian = torch.autograd.functional.jacobian(lambda x: block(x)[0], resid[b : b + 1])[:, :, 0]
            assert jacobian[0, :, 1].abs().max() > 0  # position 0 reads position 1
            squares += [jacobian[i, :, i - lag].square().sum().item() for i in range(lag, 6)]
        assert reach.squared[lag].item() == pytest.approx(np.mean(squares), rel=1e-4)


def test_the_figure_and_its_data_show_entries_ahead(run, model, batch):
    figure = phi_figure(run, 0, factors="conv", heads=[0])
    data = figure.data
    assert len(data) == 16 * 16
    ahead = data[data.src > data.dest]
    assert (ahead.value != 0).any()
    assert ahead.drawn.notna().all()
    image = next(a.images[0] for a in figure.axes if a.images and not a.get_label().startswith("colours"))
    assert not np.ma.getmaskarray(image.get_array()).any()
    causal = phi_figure(run, 0, factors="pattern").data
    assert (causal.src <= causal.dest).all()


def test_the_report_leaves_the_conv_out_and_says_so(run):
    text = report(run, sequences=8).html
    assert "The matrix conv of layer 0 reads later positions and is not drawn here" in text
    assert "phi --layer 0 --factors conv" in text


def test_probes_read_such_a_run(run):
    assert len(probe(run, "bound-value", steps=[run.steps[-1]], sequences=32))
