"""The table of scores on screen: what is shown, where, and in which words."""

import pytest
from made_up_runs import score_table

from circuitscope.analysis.checkpoints.runner import analysis_results
from circuitscope.config import RunConfig
from circuitscope.training.trainer import train
from circuitscope.viz.words.scores import new_period_lines, score_lines, score_words

STEPS = [0, 1000]


def lines(places, repeats=False):
    return list(score_lines(score_table(places, STEPS), repeats))


def test_every_matrix_of_edges_has_a_line_where_it_ends_highest():
    found = lines(
        {
            ("recall", 0, None, "conv"): [0.1, 0.2],
            ("recall", 0, 3, "conv"): [0.1, 0.7],
            ("recall", 0, 5, "conv"): [0.1, 0.6],
            ("recall", 1, 0, "pattern"): [0.1, 0.3],
            ("recall", 1, 1, "pattern"): [0.1, 0.9],
        }
    )
    assert found == [
        ("recall", "L0 conv", "0.20 ± 0.02", "0.10", "", "of 2: 3 0.70, 5 0.60", "at a query, on the bound value"),
        ("recall", "L1H1", "0.90 ± 0.02", "0.10", "", "", "at a query, on the bound value"),
    ]


def test_scores_on_repeated_blocks_have_one_line_that_says_when_they_are_off_distribution():
    places = {("induction", 0, None, "conv"): [0.1, 0.2], ("induction", 0, None, "ssm"): [0.1, 0.5]}
    (line,) = lines(places)
    assert line[:3] == ("induction", "L0 ssm", "0.50 ± 0.02")
    assert line[-1] == "prefix matching on repeated random blocks, off-distribution"
    assert lines(places, repeats=True)[0][-1] == "prefix matching on repeated random blocks"


def new_period(own: float, other: float) -> list[str]:
    places = {("induction", 0, 0, "pattern"): [0.1, own], ("induction_new_period", 0, 0, "pattern"): [0.1, other]}
    return list(new_period_lines(score_table(places, STEPS)))


def test_prefix_matching_that_is_lost_at_another_period_is_said():
    (line,) = new_period(0.9, 0.04)
    assert line.startswith(
        "L0H0 scores 0.90 in prefix matching on blocks of the lengths of training, and 0.04 on blocks"
    )
    assert line.endswith("never had: it copies from a fixed distance more than it matches prefixes")
    (partly,) = new_period(0.9, 0.7)
    assert partly.endswith("and 0.70 on blocks of a length that training never had")
    assert new_period(0.9, 0.88) == []
    assert list(new_period_lines(score_table({("induction", 0, 0, "pattern"): [0.1, 0.9]}, STEPS))) == []


def test_the_score_of_even_weights_is_beside_a_score():
    table = score_table({("recall", 1, 1, "pattern"): [0.1, 0.9]}, STEPS).assign(even=0.0312)
    assert [line[4] for line in score_lines(table, False)] == ["0.03"]


def test_a_head_that_reads_another_is_shown_with_it():
    table = score_table({("k_composition", 1, 0, "L0H1"): [0.0, 0.4], ("copying", 1, 0, "ov"): [0.0, 0.3]}, STEPS)
    table["unit"] = "head"
    assert [line[1] for line in score_lines(table, False)] == ["L1H0", "L1H0 of L0H1"]


@pytest.mark.parametrize(
    ("name", "layers", "factor", "where"), [("based", 2, "linear_attention", "L1H0"), ("deltanet", 1, "delta", "L0H0")]
)
def test_a_factor_with_a_single_head_is_in_the_table_of_a_real_run(tmp_path, name, layers, factor, where):
    config = RunConfig.build(
        name, "mqar", length=16, pairs=2, vocab_size=64, d_model=16, n_layers=layers, steps=2, save_every=2,
        eval_every=1, eval_batches=1, batch_size=4, eval_batch_size=4, device="cpu", threads=1,
    )  # fmt: skip
    run = train(config, root=tmp_path, name="x")
    found = analysis_results(run, ["scores"], sequences=8)
    frame = found["scores"]
    assert set(frame[frame.factor == factor]["head"]) == {0}
    (table,) = score_words(found)
    for score in ("binding", "recall", "value", "previous token"):
        assert (score, where) in [row[:2] for row in table.rows]
