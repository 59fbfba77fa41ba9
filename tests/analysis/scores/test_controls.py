"""What a score is compared with: even weights, and blocks of a length that training never had."""

import math

import pytest
import torch
from torch import nn
from transformer_lens import HookedRootModule
from transformer_lens.hook_points import HookPoint

import circuitscope as cs
from circuitscope.analysis.reading.opened import opened
from circuitscope.analysis.scores.edges import Edges, named_edges
from circuitscope.analysis.scores.held_out import HeldOut, check_scores
from circuitscope.analysis.scores.rows import score_rows
from circuitscope.analysis.scores.weight_on_edges import score
from circuitscope.errors import UserError
from planted import planted_induction, planted_task

BATCH = planted_task().batch(0, split="test", size=16)
LENGTH = BATCH.tokens.shape[1]


def even_matrix(reach: int = LENGTH) -> torch.Tensor:
    """[batch, 1, dest, src]: every row has the same weight on the last `reach` positions up to its own."""
    lag = torch.arange(LENGTH)[:, None] - torch.arange(LENGTH)
    allowed = ((lag >= 0) & (lag < reach)).double()
    return (allowed / allowed.sum(1, keepdim=True)).expand(len(BATCH), 1, -1, -1)


@pytest.mark.parametrize("name", ["binding", "recall", "value", "match", "previous_token", "recall+1", "query<-value"])
@pytest.mark.parametrize("reach", [None, 1, 2, 4])
def test_the_baseline_is_what_a_matrix_with_even_rows_scores(name, reach):
    edges = named_edges(name, BATCH.layout)
    measured = score(even_matrix(reach or LENGTH), name, BATCH.layout).mean().item()
    assert edges.even(reach) == pytest.approx(measured, abs=1e-6)


def test_the_baseline_by_hand():
    """Position 3 reads 2 and 1 of its 4 positions, position 1 reads 0 of its 2: (2/4 + 1/2) / 2."""
    mask = torch.zeros(1, 4, 4, dtype=torch.bool)
    mask[0, 3, [1, 2]] = mask[0, 1, 0] = True
    edges = Edges.of("mine", mask)
    assert edges.even() == pytest.approx(0.5)
    assert edges.even(reach=2) == pytest.approx((1 / 2 + 1 / 2) / 2)


def test_rows_have_the_baseline_of_their_matrix_and_other_rows_none():
    data = HeldOut(planted_task(), longest=LENGTH, sequences=8)
    model = cs.model("mamba", d_model=16, n_layers=1, vocab_size=64).eval()
    rows = list(score_rows(model, data, ["previous_token", "model"]))
    of = {row["factor"]: row["even"] for row in rows if row["score"] == "previous_token"}
    full = sum(1 / (i + 1) for i in range(1, LENGTH)) / (LENGTH - 1)
    narrow = sum(1 / min(4, i + 1) for i in range(1, LENGTH)) / (LENGTH - 1)
    assert of["ssm"] == of["composed"] == pytest.approx(full)
    assert of["conv"] == pytest.approx(narrow)
    assert all(math.isnan(row["even"]) for row in rows if row["score"] == "loss")


@pytest.mark.parametrize("name", ["attention_conv_k", "deltanet", "mamba2", "hyena", "rwkv", "h3", "based"])
def test_no_matrix_reads_beyond_its_reach(name):
    model = cs.model(name, d_model=32, vocab_size=64, max_length=LENGTH).eval()
    known = 0
    for _, reading in opened(model).walk(BATCH.tokens[:2]):
        for factor in (*reading.factors, *reading.beside):
            if factor.reach is not None and not factor.diagonal:
                known += 1
                lag = torch.arange(LENGTH)[:, None] - torch.arange(LENGTH)
                matrix = factor.build(slice(0, factor.size))
                assert (matrix[..., lag >= factor.reach] == 0).all()
                if factor.reach < LENGTH:
                    assert (matrix[..., lag == factor.reach - 1] != 0).any()
    assert known


class FixedDistance(HookedRootModule):
    """Another's model that reads from `back` positions back, whatever the tokens are."""

    def __init__(self, back: int):
        super().__init__()
        self.back = back
        self.blocks = nn.ModuleList([nn.ModuleDict({"attn": nn.ModuleDict({"hook_pattern": HookPoint()})})])
        self.setup()

    def forward(self, tokens):
        i = torch.arange(tokens.shape[1])
        pattern = torch.zeros(len(i), len(i))
        pattern[i, (i - self.back).clamp(min=0)] = 1
        return self.blocks[0]["attn"]["hook_pattern"](pattern.expand(len(tokens), 1, -1, -1))


def prefix_matching(model, data, layer: int) -> dict[str, float]:
    """The scores of head 0 of a layer."""
    rows = score_rows(model, data, ["induction", "induction_new_period"])
    return {row["score"]: row["value"] for row in rows if (row["layer"], row["head"]) == (layer, 0)}


def test_a_copier_from_a_fixed_distance_scores_only_at_the_length_of_its_blocks():
    task = cs.task("induction", block=5, repeats=4, vocab_size=64, varied=False)
    found = prefix_matching(FixedDistance(4), HeldOut(task, longest=task.max_length, sequences=16), layer=0)
    assert found == pytest.approx({"induction": 1, "induction_new_period": 0}, abs=1e-6)


def test_a_head_that_matches_prefixes_scores_at_every_length():
    task = cs.task("induction", block=5, repeats=4, vocab_size=64, varied=False)
    data = HeldOut(task, longest=32, sequences=16)
    found = prefix_matching(planted_induction(), data, layer=1)
    assert found["induction"] > 0.9
    assert found["induction_new_period"] > 0.9


@pytest.mark.parametrize(
    ("block", "repeats", "varied", "period"), [(6, 3, True, 7), (6, 3, False, 7), (6, 2, False, 5), (12, 2, True, 3)]
)
def test_the_new_period_is_one_that_training_never_has(block, repeats, varied, period):
    task = cs.task("induction", block=block, repeats=repeats, vocab_size=64, varied=varied)
    batch = HeldOut(task, longest=task.max_length, sequences=8).new_period
    assert batch.tokens.shape[1] <= task.max_length
    assert batch.layout.period.unique().tolist() == [period]
    trained = task.batch(0, size=512).layout.period
    assert period not in trained
    assert set(trained.tolist()) == set(task.periods)


def test_where_no_other_period_fits_there_is_no_control_and_other_tasks_have_none():
    task = cs.task("induction", block=2, repeats=2, vocab_size=8)
    data = HeldOut(task, longest=task.max_length, sequences=8)
    assert data.new_period is None
    model = cs.model("attention", d_model=16, n_layers=1, vocab_size=8, max_length=5).eval()
    assert {row["score"] for row in score_rows(model, data, ["induction", "induction_new_period"])} == {"induction"}
    assert "induction_new_period" not in check_scores(None, planted_task())
    with pytest.raises(UserError, match="needs a task with repeated blocks, and mqar has none"):
        check_scores("induction_new_period", planted_task())
