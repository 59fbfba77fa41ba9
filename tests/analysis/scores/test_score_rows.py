"""Rows of scores: every head, channel and whole layer, each with what it counts."""

from dataclasses import replace

import pandas as pd
import pytest

import circuitscope as cs
from circuitscope.analysis.scores.held_out import HeldOut
from circuitscope.analysis.scores.rows import COLUMNS, score_rows

DATA = HeldOut(cs.task("mqar", length=16, pairs=2, vocab_size=64), longest=16, sequences=4)


def recall(name: str, **options) -> pd.DataFrame:
    model = cs.model(name, **{"d_model": 16, "n_layers": 1, "vocab_size": 64, "max_length": 16} | options).eval()
    return pd.DataFrame(score_rows(model, DATA, ["recall"]))[list(COLUMNS)].astype(COLUMNS)


@pytest.mark.parametrize(("name", "factor"), [("based", "linear_attention"), ("deltanet", "delta"), ("mamba2", "ssd")])
def test_a_matrix_with_one_head_has_rows_of_the_head_which_is_the_layer(name, factor):
    rows = recall(name, **{"headdim": 32} if name == "mamba2" else {})
    rows = rows[rows.factor == factor]
    assert set(rows.unit) == {"head"}
    assert rows["head"].tolist() == [0] * len(rows)
    assert len(rows) == rows.weighting.nunique() > 0


@pytest.mark.parametrize(
    ("name", "options", "factor"),
    [
        ("attention", {"n_heads": 2}, "pattern"),
        ("deltanet", {"n_heads": 2}, "delta"),
        ("mamba2", {"headdim": 16}, "ssd"),
        ("based", {"n_heads": 2}, "linear_attention"),
    ],
)
def test_several_heads_have_rows_of_each_and_of_the_layer(name, options, factor):
    rows = recall(name, **options)
    rows = rows[rows.factor == factor]
    assert set(rows.unit) == {"head"}
    assert set(rows["head"].dropna()) == {0, 1}
    assert rows["head"].isna().sum() == 1


def test_channels_say_so():
    rows = recall("mamba")
    assert set(rows.factor) == {"ssm", "conv", "composed"}
    assert set(rows.unit) == {"channel"}
    for _, part in rows.groupby("factor"):
        assert set(part["head"].dropna()) == set(range(32))
        assert part["head"].isna().sum() == 1


def test_rows_that_are_shares_are_weighted_as_they_are_and_others_by_size_and_sign():
    assert set(recall("based").weighting) == {"raw"}
    assert set(recall("attention").weighting) == {"raw"}
    rows = recall("rwkv")
    assert set(rows[(rows.factor == "wkv") & rows["head"].notna()].weighting) == {"raw"}
    assert set(rows[(rows.factor == "phi") & rows["head"].notna()].weighting) == {"abs", "signed"}
    assert set(rows[rows["head"].isna()].weighting) == {"abs"}


def test_the_model_as_a_whole_has_no_unit():
    model = cs.model("attention", d_model=16, n_layers=1, vocab_size=64, max_length=16).eval()
    rows = pd.DataFrame(score_rows(model, DATA, ["model"]))
    assert rows.unit.isna().all()
    assert rows.layer.isna().all()


def test_values_that_occur_twice_have_no_copying_of_values_and_the_other_rows_stay():
    data = HeldOut(DATA.task, longest=16, sequences=4)
    data.own = replace(data.own, inputs=data.own.tokens.scatter(1, data.own.layout.value_pos, 40))
    model = cs.model("attention", d_model=16, n_layers=1, vocab_size=64, max_length=16).eval()
    assert {row["score"] for row in score_rows(model, data, ["recall", "copying"])} == {"recall", "copying"}
