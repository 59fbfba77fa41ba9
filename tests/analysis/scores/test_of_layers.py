"""Weights of all units of a layer: from sums in a kernel, they are those of the matrices."""

import pytest
import torch

import circuitscope as cs
from circuitscope.analysis.reading.opened import opened
from circuitscope.analysis.scores.edges import named_edges
from circuitscope.analysis.scores.of_layers import EdgeSets, layer_weights
from circuitscope.analysis.scores.weight_on_edges import weightings_of, weights_on
from circuitscope.mixers import mamba

BATCH = cs.task("mqar", length=16, pairs=2, vocab_size=64).batch(0, split="test", size=6)
SETS = tuple(named_edges(name, BATCH.layout) for name in ("recall", "previous_token", "value"))


def built(name: str, **options):
    torch.manual_seed(0)
    return cs.model(name, **{"d_model": 16, "n_layers": 2, "vocab_size": 64, "max_length": 16} | options).eval()


def same(model) -> set[str]:
    """Compares every weight with that of the matrix; gives the names of the matrices."""
    found = list(layer_weights(opened(model).walk(BATCH.tokens), EdgeSets(SETS)))
    for layer, product, of_units, whole in found:
        matrix = cs.phi(model, BATCH.tokens, layer, product.name).detach()
        expected = weights_on(SETS, matrix, weightings_of(product))
        assert of_units.keys() == expected.keys()
        for key, weight in expected.items():
            torch.testing.assert_close(of_units[key], weight, rtol=0, atol=2e-6)
        if product.size > 1:
            for (name, _), weight in weights_on(SETS, matrix.abs().sum(1, keepdim=True), ["abs"]).items():
                torch.testing.assert_close(whole[name], weight, rtol=0, atol=2e-6)
        else:
            assert not whole or product.unit == "channel"
    return {product.name for _, product, _, _ in found}


@pytest.mark.parametrize("name", ["attention", "mamba", "s6", "s4_mamba", "h3", "hyena", "rwkv", "mamba2", "deltanet"])
def test_weights_are_those_of_the_matrices(name):
    assert same(built(name, **{"headdim": 16} if name == "mamba2" else {}))


@pytest.mark.parametrize(
    "options",
    [{"conv": False}, {"gate": False}, {"activation": False}, {"conv": False, "gate": False}, {"rotary": True}],
)
def test_weights_of_a_block_with_parts_left_out(options):
    names = same(built("mamba", **options))
    assert "composed" in names


def test_no_matrix_of_the_scan_is_built(monkeypatch):
    def refused(*_):
        raise AssertionError("a matrix is built")

    model = built("mamba")
    monkeypatch.setattr(mamba, "selective_scan_phi", refused)
    found = {weights.product.name for weights in layer_weights(opened(model).walk(BATCH.tokens), EdgeSets(SETS))}
    assert found == {"ssm", "conv", "composed"}


def test_an_edited_conv_is_the_conv_that_is_read():
    model = built("mamba", n_layers=1)

    def halve(matrix, hook):
        return matrix * torch.linspace(0, 1, matrix.shape[2])[:, None]

    with model.hooks(fwd_hooks=[("blocks.0.mixer.hook_phi_conv", halve)]):
        edited = list(layer_weights(opened(model).walk(BATCH.tokens), EdgeSets(SETS)))
        same(model)
    plain = list(layer_weights(opened(model).walk(BATCH.tokens), EdgeSets(SETS)))
    of = [{w.product.name: w.whole["recall"] for w in weights}["composed"] for weights in (edited, plain)]
    assert not torch.allclose(*of, atol=1e-3)
