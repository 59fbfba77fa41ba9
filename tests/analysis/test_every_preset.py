"""Every analysis runs on every preset, on weights as they start, and gives finite numbers."""

import math

import pytest

import circuitscope as cs
from circuitscope.analysis.causal.battery import causal_rows
from circuitscope.analysis.causal.circuit import find_circuit
from circuitscope.analysis.decay.rows import decay_rows
from circuitscope.analysis.scores.held_out import HeldOut, check_scores
from circuitscope.analysis.scores.rows import score_rows

pytestmark = pytest.mark.slow

TASK = cs.task("mqar", length=16, pairs=2, vocab_size=64)
DATA = HeldOut(TASK, longest=16, sequences=4)


@pytest.fixture(params=cs.models.names())
def model(request):
    return cs.model(request.param, d_model=32, vocab_size=64, max_length=16).eval()


def test_scores(model):
    rows = list(score_rows(model, DATA, check_scores(None, TASK)))
    assert all(math.isfinite(row["value"]) for row in rows)
    with_phi = {i for i, block in enumerate(model.layers) if hasattr(block.mixer, "hook_phi")}
    assert {row["layer"] for row in rows if row["score"] == "recall"} == with_phi
    shares = [row["value"] for row in rows if row["weighting"] in ("raw", "abs")]
    assert all(-1e-6 <= value <= 1 + 1e-4 for value in shares)


def test_circuit(model):
    found = find_circuit(model, DATA.own)
    assert not found.found  # nothing is learned yet
    assert "no recall to explain" in found.sentences()[0] or not found.tried
    layers = {part.layer for part in found.tried}
    assert layers == {i for i, block in enumerate(model.layers) if hasattr(block.mixer, "hook_phi")}


def test_decay(model):
    rows = decay_rows(model, DATA.own.tokens)
    assert {row["layer"] for row in rows} == set(range(model.config.n_layers))
    profiles = [row["value"] for row in rows if row["quantity"] == "profile"]
    assert all(math.isfinite(value) and value >= 0 for value in profiles)


def test_causal(model):
    rows = causal_rows(model, DATA.own)
    ablated = {row["layer"] for row in rows if row["intervention"].startswith("mean ablation")}
    assert ablated == set(range(len(model.layers)))
    assert all(math.isfinite(row["value"]) for row in rows if row["unit"] != "effect")  # no effect of equal answers
    cut = {row["layer"] for row in rows if row["intervention"] == "knockout in Φ"}
    assert cut == {i for i, block in enumerate(model.layers) if hasattr(block.mixer, "hook_phi")}
