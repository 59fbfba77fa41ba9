"""Matrices in 8 bits: what comes back is what went in, within the error that the report states."""

import base64
import dataclasses
import zlib

import numpy as np
import pandas as pd
import pytest
import torch

import circuitscope as cs
from circuitscope.analysis.pictures.at_checkpoints import snapshot
from circuitscope.analysis.pictures.choice import Source, View, highest, leading_score, sources, sources_of, views
from circuitscope.analysis.pictures.examples import ShownExamples
from circuitscope.analysis.scores.edges import named_edges
from circuitscope.analysis.scores.held_out import HeldOut
from circuitscope.analysis.scores.rows import score_rows
from circuitscope.viz.report import budget, shown
from circuitscope.viz.report.budget import Need, Plan, plan, spread
from circuitscope.viz.report.packing import CODES, PackedMatrices, packed, unpacked

SSM = Source(0, "ssm", "channel", 16)
KINDS = ("shares", "signed", "sizes")


def lower(matrix: torch.Tensor) -> np.ndarray:
    rows, columns = np.tril_indices(len(matrix))
    return matrix.numpy()[rows, columns]


def wide(size: int = 40) -> torch.Tensor:
    """Entries of either sign over six orders of magnitude."""
    generator = torch.Generator().manual_seed(0)
    signs = torch.randn(size, size, generator=generator)
    return (torch.exp(-6 * 2.3 * torch.rand(size, size, generator=generator)) * signs).tril()


@pytest.mark.parametrize("entries", KINDS)
def test_an_entry_is_off_by_no_more_than_is_said(entries):
    matrix = {"shares": wide().softmax(-1).tril(), "signed": wide(), "sizes": wide().abs()}[entries]
    scale, codes, error = packed(matrix, entries)
    back = unpacked(scale, codes, entries)
    assert scale == pytest.approx(matrix.abs().max().item())
    assert np.abs(back - lower(matrix)).max() == pytest.approx(error * scale, rel=1e-6)
    code = CODES[entries]
    assert error <= 1 - (1 - 0.5 / code.levels) ** code.power + 1e-12  # half a code at the top of the range
    assert error <= 0.008


def test_small_entries_of_phi_keep_their_size():
    matrix = wide()
    scale, codes, _ = packed(matrix, "signed")
    small = (np.abs(lower(matrix)) > 1e-3 * scale) & (np.abs(lower(matrix)) < 1e-2 * scale)
    assert small.sum() > 50
    relative = np.abs(unpacked(scale, codes, "signed") - lower(matrix))[small] / np.abs(lower(matrix))[small]
    assert relative.max() < 0.3  # linear codes would lose all of these below 1/254


def test_entries_that_are_not_finite_are_told_apart_from_numbers():
    matrix = torch.eye(4)
    matrix[2, 1], matrix[3, 0] = float("nan"), float("inf")
    for entries in KINDS:
        scale, codes, _ = packed(matrix, entries)
        back = unpacked(scale, codes, entries)
        np.testing.assert_array_equal(np.isnan(back), ~np.isfinite(lower(matrix)))
        np.testing.assert_array_equal(back[np.isfinite(back)], lower(matrix)[np.isfinite(lower(matrix))])


def test_a_matrix_of_zeros_comes_back_as_zeros():
    for entries in KINDS:
        scale, codes, error = packed(torch.zeros(5, 5), entries)
        assert (scale, error) == (0.0, 0.0)
        assert not unpacked(scale, codes, entries).any()


@pytest.fixture(scope="module")
def mamba():
    torch.manual_seed(0)
    return cs.model("mamba", d_model=16, n_layers=1, vocab_size=64, max_length=16).eval()


@pytest.fixture(scope="module")
def data():
    return HeldOut(cs.task("mqar", length=16, pairs=2, vocab_size=64), longest=16, sequences=8)


@pytest.fixture(scope="module")
def scores(mamba, data):
    rows = [{"run": "x", "step": 5, **row} for row in score_rows(mamba, data, ["recall", "binding", "induction"])]
    return pd.DataFrame(rows)


def test_what_is_stored_is_the_matrix_of_that_checkpoint(mamba, data, scores):
    examples = ShownExamples.of(data, 3)
    matrices = PackedMatrices(views(sources(mamba, data.own.tokens), scores, 4))
    for step in (0, 5):
        matrices.add(snapshot(mamba, step, examples, matrices.views))
    lengths = examples.lengths
    assert lengths == [16, 16, 16, data.repeats.tokens.shape[1]]
    halves = [n * (n + 1) // 2 for n in lengths]
    for view, text in zip(matrices.views, matrices.stored(), strict=True):
        raw = zlib.decompress(base64.b64decode(text))
        scales = np.frombuffer(raw, "<f4", count=2 * 4).reshape(2, 4)
        codes = np.frombuffer(raw, np.uint8, offset=2 * 4 * 4)
        assert len(codes) == 2 * sum(halves)
        factors = view.source.factor
        phi = cs.phi(mamba, data.own.tokens[:3], layer=0, factors=factors).detach()
        expected = phi.abs().mean(dim=1) if view.head is None else phi[:, view.head]
        for example in range(3):
            start = sum(halves) + sum(halves[:example])  # of the second checkpoint
            back = unpacked(float(scales[1, example]), codes[start : start + halves[example]], view.entries)
            largest = expected[example].abs().max().item()
            np.testing.assert_allclose(back, lower(expected[example]), atol=0.0081 * largest)


def test_channels_are_those_that_score_highest(mamba, data, scores):
    chosen = highest(scores, Source(0, "ssm", "channel", 32), 5)
    assert len(set(chosen)) == 5
    own = scores[(scores.factor == "ssm") & (scores.weighting == "abs") & scores["head"].notna()]
    best = {s: own[own.score == s].set_index("head").value.idxmax() for s in ("recall", "binding", "induction")}
    assert set(best.values()) <= set(chosen)


def test_few_heads_are_all_there_without_a_mean_of_one(mamba, data, scores):
    attention = cs.model("attention", d_model=16, n_layers=2, vocab_size=64, max_length=16).eval()
    found = views(sources(attention, data.own.tokens), scores, 4)
    assert [shown.label(v) for v in found] == [shown.title(v) for v in found] == ["L0H0", "L1H0"]
    shared = {s.factor: s.shared for s in sources(mamba, data.own.tokens)}
    assert shared == {"ssm": False, "conv": True, "composed": False}


def test_a_plan_gives_up_examples_then_channels_then_checkpoints(monkeypatch):
    many = Need([Source(0, "ssm", "channel", 128)], 64, 0, 40)
    assert plan([many], 2, 12) == Plan(2, 12, 40)
    fits = []
    for size in (3e6, 1e6, 2e5, 5e3):
        monkeypatch.setattr(budget, "BUDGET", size)
        fits.append(plan([many], 8, 12))
        assert many.bytes(fits[-1].examples, fits[-1].channels, fits[-1].steps) <= size
    sizes = [(p.examples, p.channels, p.steps) for p in fits]
    assert sizes == sorted(sizes, reverse=True)
    assert fits[0].channels == 12
    assert fits[-1] == Plan(1, 1, 1)
    monkeypatch.setattr(budget, "BUDGET", 1e12)
    assert plan([many], 10**18, 10**18).channels == 128  # found without trying, or listing, every number
    monkeypatch.setattr(budget, "BUDGET", 1e3)
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


def test_labels_say_unit_layer_and_matrix():
    several = Source(1, "ssd", "head", 4)
    assert shown.title(View(several, 2)) == "L1H2 ssd"
    assert shown.title(View(SSM, 3)) == "L0 ssm channel 3"
    assert shown.title(View(SSM, None)) == "L0 ssm, all 16 channels: mean |Φ|"
    assert shown.title(View(Source(0, "any", "head", 2, shares=True, alone=True), None)) == "L0, all 2 heads: mean"


@pytest.mark.parametrize(
    ("mixer", "unit", "of", "shares", "entries"),
    [
        ("attention", "head", 1, True, "shares"),
        ("based", "head", 1, True, "shares"),
        ("s6", "channel", 16, False, "signed"),
    ],
)
def test_a_matrix_is_what_its_layer_says_it_is(mixer, unit, of, shares, entries, data):
    model = cs.model(mixer, d_model=16, n_layers=1, vocab_size=64, max_length=16)
    (source,) = [s for s in sources_of(model.config, data.own.tokens) if s.layer == model.config.n_layers - 1]
    assert (source.unit, source.of, source.shares) == (unit, of, shares)
    assert View(source, 0).entries == entries


def test_the_edges_of_an_example_are_those_of_the_scores(data):
    examples = ShownExamples.of(data, 3)
    told = shown.examples(examples, ("recall+1",))
    assert set(told[0]["edges"]) == {"binding", "recall", "value", "match", "previous_token", "recall+1"}
    assert set(told[-1]["edges"]) == {"induction", "duplicate"}
    for row, example in enumerate(told[:3]):
        for name, flat in example["edges"].items():
            edges = named_edges(name, data.own.layout)
            here = edges.sequence == row
            assert flat[::2] == edges.dest[here].tolist()
            assert flat[1::2] == edges.src[here].tolist()
    words = shown.edge_sets(told)
    assert words["recall"] == {"score": "recall", "words": "at a query, on the bound value"}
    assert words["recall+1"]["score"] == "recall"


def test_roles_are_told_with_their_looks_and_unknown_ones_by_number(data):
    told = shown.examples(ShownExamples.of(data, 1), ())
    told[0]["roles"][0] = 99
    looks = shown.roles(told)
    assert {look["name"] for look in looks.values()} == {"filler", "key", "value", "query", "start", "block", "role 99"}
    assert [look["name"] for look in looks.values() if look["quiet"]] == ["filler"]


def test_pictures_are_led_by_the_last_step_of_the_tasks_circuit(data):
    assert leading_score(data.own.layout).name == "recall"
    assert leading_score(data.repeats.layout).name == "induction"
    plain = dataclasses.replace(data.repeats.layout, period=None)
    assert leading_score(plain).name == "previous_token"
