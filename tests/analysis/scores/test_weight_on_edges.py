"""Scores of hand-made matrices whose answers are known."""

import pytest
import torch

import circuitscope as cs
from circuitscope.analysis.scores.edges import between_roles, named_edges
from circuitscope.analysis.scores.weight_on_edges import (
    binding_score,
    default_weighting,
    duplicate_score,
    induction_score,
    previous_token_score,
    recall_score,
    score,
    summarize,
    value_score,
)
from circuitscope.errors import UserError

MQAR = cs.task("mqar", length=32, pairs=4, vocab_size=64).batch(0, size=6)
REPEATS = cs.task("induction", block=5, repeats=3, vocab_size=32, varied=False).batch(0, size=4)


def put_on(edges, total=1.0):
    """A one-head matrix with all weight of each destination spread evenly over its edges."""
    mask = edges.mask().float()
    count = mask.sum(dim=2, keepdim=True)
    return (total * mask / count.clamp(min=1))[:, None]


def uniform(batch, length):
    """Causal attention that looks everywhere equally."""
    return (torch.ones(length, length).tril() / torch.arange(1, length + 1)[:, None]).expand(batch, 1, -1, -1)


@pytest.mark.parametrize("name", ["recall", "value", "binding", "previous_token"])
def test_a_perfect_head_on_the_task_scores_one(name):
    matrix = put_on(named_edges(name, MQAR.layout))
    assert score(matrix, name, MQAR.layout).flatten() == pytest.approx([1.0] * 6)


@pytest.mark.parametrize("name", ["induction", "duplicate"])
def test_a_perfect_head_on_repeats_scores_one_however_it_spreads_over_earlier_repeats(name):
    edges = named_edges(name, REPEATS.layout)
    assert score(put_on(edges), name, REPEATS.layout).flatten() == pytest.approx([1.0] * 4)
    nearest_only = put_on(edges).clone()
    length = REPEATS.tokens.shape[1]
    distance = torch.arange(length)[:, None] - torch.arange(length)[None, :]
    nearest_only[:, :, distance > 5] = 0
    nearest_only = nearest_only / nearest_only.sum(-1, keepdim=True).clamp(min=1e-9)
    assert score(nearest_only, name, REPEATS.layout).flatten() == pytest.approx([1.0] * 4)


def test_edges_point_at_the_tokens_they_are_named_for():
    tokens, layout = MQAR.tokens, MQAR.layout
    binding = named_edges("binding", layout)
    assert torch.equal(binding.src, binding.dest - 1)
    assert binding.dests.tolist() == [4] * 6
    recall = named_edges("recall", layout)
    assert torch.equal(tokens[recall.sequence, recall.src], MQAR.labels[recall.sequence, recall.dest])
    induction, duplicate = named_edges("induction", REPEATS.layout), named_edges("duplicate", REPEATS.layout)
    seen = REPEATS.tokens
    assert torch.equal(seen[duplicate.sequence, duplicate.src], seen[duplicate.sequence, duplicate.dest])
    assert torch.equal(seen[induction.sequence, induction.src - 1], seen[induction.sequence, induction.dest])
    # repeats 2 and 3 of 5 tokens, with 1 and 2 earlier occurrences
    assert len(induction.src) == 4 * (5 + 10)
    assert induction.dests.tolist() == [10] * 4


def test_previous_token_takes_a_layout_as_the_other_scores_do():
    matrix = uniform(len(MQAR.tokens), MQAR.tokens.shape[1])
    expected = previous_token_score(matrix)
    assert torch.equal(previous_token_score(matrix, MQAR.layout), expected)
    assert torch.equal(previous_token_score(matrix, weighting="abs"), previous_token_score(matrix, MQAR.layout, "abs"))


@pytest.mark.usefixtures("without_type_checks")
def test_a_batch_where_a_layout_is_meant_is_refused_in_one_line():
    with pytest.raises(UserError, match=r"^expected a Layout, such as batch.layout, got Batch\("):
        recall_score(uniform(len(MQAR.tokens), MQAR.tokens.shape[1]), MQAR)


def test_uniform_attention_scores_its_known_value():
    length = 32
    matrix = uniform(6, length)
    expected = sum(1 / (i + 1) for i in range(1, length)) / (length - 1)
    assert previous_token_score(matrix)[0, 0].item() == pytest.approx(expected, rel=1e-5)
    queries = MQAR.layout.query_pos
    at_queries = (1 / (queries + 1).float()).mean(dim=1)
    assert torch.allclose(recall_score(matrix, MQAR.layout)[:, 0], at_queries)
    assert torch.allclose(value_score(matrix, MQAR.layout)[:, 0], 4 * at_queries)
    assert binding_score(matrix, MQAR.layout)[0, 0].item() == pytest.approx((1 / 2 + 1 / 4 + 1 / 6 + 1 / 8) / 4)


def test_values_found_but_not_matched_is_the_one_layer_signature():
    matrix = put_on(named_edges("value", MQAR.layout))
    assert value_score(matrix, MQAR.layout).mean().item() == pytest.approx(1)
    assert recall_score(matrix, MQAR.layout).mean().item() == pytest.approx(1 / 4)


def test_signed_matrices_are_shares_of_their_absolute_rows():
    edges = named_edges("recall", MQAR.layout)
    signed = torch.zeros(6, 1, 32, 32)
    signed[edges.sequence, 0, edges.dest, edges.src] = -3.0
    signed[:, 0, :, 0] += torch.where(edges.mask().any(-1), 1.0, 0.0)  # one more entry in each of those rows
    assert recall_score(signed, MQAR.layout, "abs").mean().item() == pytest.approx(0.75)
    assert recall_score(signed, MQAR.layout, "signed").mean().item() == pytest.approx(-0.75)
    assert recall_score(signed, MQAR.layout).mean().item() == pytest.approx(0.75)  # abs is the default
    assert recall_score(10 * signed, MQAR.layout).mean().item() == pytest.approx(0.75)
    with pytest.raises(UserError, match="negative entries"):
        recall_score(signed, MQAR.layout, "raw")


def test_rows_of_zeros_count_as_no_weight():
    zero = torch.zeros(6, 2, 32, 32)
    assert recall_score(zero, MQAR.layout, "abs").eq(0).all()
    assert recall_score(zero, MQAR.layout, "signed").eq(0).all()


def test_attention_is_taken_raw_and_unnormalized_matrices_as_shares():
    assert default_weighting(uniform(2, 8)) == "raw"
    assert default_weighting(3 * uniform(2, 8)) == "abs"
    assert default_weighting(-uniform(2, 8)) == "abs"


def test_heads_are_scored_apart():
    good, idle = put_on(named_edges("recall", MQAR.layout)), uniform(6, 32)
    both = recall_score(torch.cat([idle, good], dim=1), MQAR.layout)
    assert both[:, 1].mean().item() == pytest.approx(1)
    assert torch.equal(both[:, :1], recall_score(idle, MQAR.layout))


def test_a_matrix_shared_by_all_sequences_scores_as_its_copies():
    shared = torch.randn(1, 3, 32, 32).tril().expand(6, -1, -1, -1)
    for name in ("recall", "previous_token"):
        assert torch.allclose(score(shared, name, MQAR.layout, "abs"), score(shared.clone(), name, MQAR.layout, "abs"))


def test_edges_by_role():
    edges = between_roles(MQAR.layout, "query", "value")
    assert torch.equal(edges.mask(), named_edges("value", MQAR.layout).mask())
    assert named_edges("query<-filler", MQAR.layout).mask().any()
    with pytest.raises(UserError, match="did you mean 'query'"):
        named_edges("qeury<-value", MQAR.layout)
    with pytest.raises(UserError, match="no key of this layout has an earlier query"):
        named_edges("key<-query", MQAR.layout)


def test_the_mean_comes_with_its_standard_error():
    value, stderr, n = summarize(torch.tensor([[1.0, 0.0], [3.0, 0.0]]))
    assert (value.tolist(), stderr.tolist(), n) == ([2.0, 0.0], [1.0, 0.0], 2)


@pytest.mark.usefixtures("without_type_checks")
@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: induction_score(uniform(6, 32), MQAR.layout), "induction needs repeated blocks"),
        (lambda: duplicate_score(uniform(6, 32), MQAR.layout), "duplicate needs repeated blocks"),
        (lambda: recall_score(uniform(4, 16), REPEATS.layout), "recall needs a task with keys"),
        (lambda: recall_score(uniform(6, 30), MQAR.layout), "the layout has 6 sequences of length 32"),
        (lambda: previous_token_score(torch.zeros(4, 4)), "a mixing matrix is"),
        (lambda: recall_score(uniform(6, 32) > 0, MQAR.layout), "has floating-point entries, got torch.bool"),
        (lambda: score(uniform(6, 32), "recal", MQAR.layout), "did you mean 'recall'"),
        (lambda: score(uniform(6, 32), "recall", MQAR.layout, "rows"), "unknown weighting"),
    ],
)
def test_bad_input_is_one_clear_line(call, says):
    with pytest.raises(UserError, match=says) as error:
        call()
    assert "\n" not in str(error.value)


@pytest.mark.usefixtures("without_type_checks")
def test_an_array_is_a_matrix_and_a_model_is_none():
    matrix = uniform(len(MQAR.tokens), MQAR.tokens.shape[1])
    assert torch.equal(recall_score(matrix.numpy(), MQAR.layout), recall_score(matrix, MQAR.layout))
    with pytest.raises(UserError, match=r"^a mixing matrix is \[batch, head, dest, src\], got 'attention'$"):
        recall_score("attention", MQAR.layout)
