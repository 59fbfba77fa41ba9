"""Matrices in 8 bits: what comes back is what went in, within the error that the report states."""

import base64
import zlib

import numpy as np
import pandas as pd
import pytest
import torch

import circuitscope as cs
from circuitscope.analysis.scores.rows import Data, score_rows
from circuitscope.viz.report import pictures
from circuitscope.viz.report.pictures import (
    Examples,
    Need,
    Pictures,
    Source,
    View,
    highest,
    packed,
    plan,
    sources,
    spread,
    unpacked,
    views,
)

PATTERN = View(Source(0, "pattern", 1, "head", shared=False), 0)
PHI = View(Source(0, "ssm", 16, "channel", shared=False), 3)
MEAN = View(PHI.source, None)


def lower(matrix: torch.Tensor) -> np.ndarray:
    rows, columns = np.tril_indices(len(matrix))
    return matrix.numpy()[rows, columns]


def wide(size: int = 40) -> torch.Tensor:
    """Entries of either sign over six orders of magnitude."""
    generator = torch.Generator().manual_seed(0)
    signs = torch.randn(size, size, generator=generator)
    return (torch.exp(-6 * 2.3 * torch.rand(size, size, generator=generator)) * signs).tril()


@pytest.mark.parametrize("view", [PATTERN, PHI, MEAN], ids=["attention", "signed", "mean"])
def test_an_entry_is_off_by_no_more_than_is_said(view):
    matrix = wide().softmax(-1).tril() if view is PATTERN else wide() if view is PHI else wide().abs()
    scale, codes, error = packed(matrix, view)
    back = unpacked(scale, codes, view)
    assert scale == pytest.approx(matrix.abs().max().item())
    assert np.abs(back - lower(matrix)).max() == pytest.approx(error * scale, rel=1e-6)
    steps = view.levels
    assert error <= 1 - (1 - 0.5 / steps) ** view.power + 1e-12  # half a code at the top of the range
    assert error <= 0.008


def test_small_entries_of_phi_keep_their_size():
    matrix = wide()
    scale, codes, _ = packed(matrix, PHI)
    small = (np.abs(lower(matrix)) > 1e-3 * scale) & (np.abs(lower(matrix)) < 1e-2 * scale)
    assert small.sum() > 50
    relative = np.abs(unpacked(scale, codes, PHI) - lower(matrix))[small] / np.abs(lower(matrix))[small]
    assert relative.max() < 0.3  # linear codes would lose all of these below 1/254


def test_entries_that_are_not_finite_are_told_apart_from_numbers():
    matrix = torch.eye(4)
    matrix[2, 1], matrix[3, 0] = float("nan"), float("inf")
    for view in (PATTERN, PHI, MEAN):
        scale, codes, _ = packed(matrix, view)
        back = unpacked(scale, codes, view)
        np.testing.assert_array_equal(np.isnan(back), ~np.isfinite(lower(matrix)))
        np.testing.assert_array_equal(back[np.isfinite(back)], lower(matrix)[np.isfinite(lower(matrix))])


def test_a_matrix_of_zeros_comes_back_as_zeros():
    for view in (PATTERN, PHI, MEAN):
        scale, codes, error = packed(torch.zeros(5, 5), view)
        assert (scale, error) == (0.0, 0.0)
        assert not unpacked(scale, codes, view).any()


@pytest.fixture(scope="module")
def mamba():
    torch.manual_seed(0)
    return cs.model("mamba", d_model=16, n_layers=1, vocab_size=64, max_length=16).eval()


@pytest.fixture(scope="module")
def data():
    return Data(cs.task("mqar", length=16, pairs=2, vocab_size=64), longest=16, sequences=8)


@pytest.fixture(scope="module")
def scores(mamba, data):
    rows = [{"run": "x", "step": 5, **row} for row in score_rows(mamba, data, ["recall", "binding", "induction"])]
    return pd.DataFrame(rows)


def test_what_is_stored_is_the_matrix_of_that_checkpoint(mamba, data, scores):
    shown = Pictures(Examples.of(data, 3), views(sources(mamba, data.own.tokens), scores, 4))
    shown.add(0, mamba)
    shown.add(5, mamba)
    lengths = shown.examples.lengths
    assert lengths == [16, 16, 16, data.repeats.tokens.shape[1]]
    halves = [n * (n + 1) // 2 for n in lengths]
    for view, text in zip(shown.views, shown.stored(), strict=True):
        raw = zlib.decompress(base64.b64decode(text))
        scales = np.frombuffer(raw, "<f4", count=2 * 4).reshape(2, 4)
        codes = np.frombuffer(raw, np.uint8, offset=2 * 4 * 4)
        assert len(codes) == 2 * sum(halves)
        factors = view.source.factor
        phi = cs.phi(mamba, data.own.tokens[:3], layer=0, factors=factors).detach()
        expected = phi.abs().mean(dim=1) if view.head is None else phi[:, view.head]
        for example in range(3):
            start = sum(halves) + sum(halves[:example])  # of the second checkpoint
            back = unpacked(scales[1, example], codes[start : start + halves[example]], view)
            largest = expected[example].abs().max().item()
            np.testing.assert_allclose(back, lower(expected[example]), atol=0.0081 * largest)


def test_channels_are_those_that_score_highest(mamba, data, scores):
    source = Source(0, "ssm", 32, "channel", shared=False)
    chosen = highest(scores, source, 5)
    assert len(set(chosen)) == 5
    own = scores[(scores.factor == "ssm") & (scores.weighting == "abs") & scores["head"].notna()]
    best = {s: own[own.score == s].set_index("head").value.idxmax() for s in ("recall", "binding", "induction")}
    assert set(best.values()) <= set(chosen)


def test_few_heads_are_all_there_without_a_mean_of_one(mamba, data, scores):
    attention = cs.model("attention", d_model=16, n_layers=2, vocab_size=64, max_length=16).eval()
    found = views(sources(attention, data.own.tokens), scores, 4)
    assert [v.label for v in found] == ["L0H0", "L1H0"]
    shared = {s.factor: s.shared for s in sources(mamba, data.own.tokens)}
    assert shared == {"ssm": False, "conv": True, "composed": False}


def test_a_plan_gives_up_examples_then_channels_then_checkpoints(monkeypatch):
    many = Need([Source(0, "ssm", 128, "channel", shared=False)], 64, 0, 40)
    assert plan([many], 2, 12) == pictures.Plan(2, 12, 40)
    fits = []
    for budget in (3e6, 1e6, 2e5, 5e3):
        monkeypatch.setattr(pictures, "BUDGET", budget)
        fits.append(plan([many], 8, 12))
        assert many.bytes(fits[-1].examples, fits[-1].channels, fits[-1].steps) <= budget
    sizes = [(p.examples, p.channels, p.steps) for p in fits]
    assert sizes == sorted(sizes, reverse=True)
    assert fits[0].channels == 12
    assert fits[-1] == pictures.Plan(1, 1, 1)
    monkeypatch.setattr(pictures, "BUDGET", 1e3)
    with pytest.raises(cs.UserError, match="report fewer runs"):
        plan([many], 8, 12)


def test_thinned_checkpoints_keep_both_ends():
    steps = list(range(0, 1000, 10))
    for most in (2, 3, 7, 99):
        kept = spread(steps, most)
        assert len(set(kept)) == most
        assert (kept[0], kept[-1]) == (0, 990)
    assert spread(steps, 1) == [990]
    assert spread(steps, 500) == steps
