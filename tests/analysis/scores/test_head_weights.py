"""Scores from weights: copying and composition of heads whose weights are set by hand."""

import pytest
import torch

import circuitscope as cs
from circuitscope.analysis.scores.head_weights import compositions, copying_score, copying_scores
from circuitscope.errors import UserError
from planted import planted_induction

TOKENS = torch.stack([torch.randperm(64, generator=torch.Generator().manual_seed(i))[:10] for i in range(8)])


def test_a_head_that_moves_tokens_to_the_answer_copies():
    score = copying_score(planted_induction(), 1, TOKENS)
    assert score[:, 0] == pytest.approx([1.0] * 8)
    assert score[:, 1] == pytest.approx([0.0] * 8)  # writes where nothing reads


def test_a_head_that_lowers_the_token_it_reads_scores_minus_one():
    model = planted_induction()
    model.layers[1].mixer.out.weight.neg_()
    assert copying_score(model, 1, TOKENS)[:, 0] == pytest.approx([-1.0] * 8)


def test_a_random_head_copies_about_as_much_as_chance():
    model = cs.model("attention", n_layers=1, vocab_size=64, max_length=16).eval()
    assert copying_score(model, 0, TOKENS).mean().item() == pytest.approx(2 / 10 - 1, abs=0.1)


def test_all_layers_in_one_pass_score_as_the_definition_says():
    model = cs.model("attention", n_layers=3, n_heads=2, d_model=16, vocab_size=64, max_length=16).eval()
    scores = copying_scores(model, TOKENS)
    assert list(scores) == [0, 1, 2]
    _, cache = model.run_with_cache(TOKENS)
    for layer, score in scores.items():
        written = cache[f"blocks.{layer}.mixer.hook_v"][2, :, 1] @ model.layers[layer].mixer.W_O[1]
        written = (written - written.mean(dim=1, keepdim=True)) * model.ln_final.weight
        logits = written @ model.W_U[:, TOKENS[2]]  # [position read, token of the sequence]
        raised = (logits - logits.mean(dim=1, keepdim=True)).relu()
        assert score[2, 1] == pytest.approx((2 * raised.diag() / raised.sum(dim=1) - 1).mean().item(), abs=1e-5)
        assert torch.equal(score, copying_score(model, layer, TOKENS))


def test_random_heads_do_not_compose():
    torch.manual_seed(0)
    model = cs.model("attention", n_layers=2, n_heads=4, d_model=64, vocab_size=64, max_length=16)
    found = list(compositions(model))
    assert len(found) == 4 * 4 * 3
    assert abs(sum(c.value for c in found) / len(found)) < 0.01
    assert max(abs(c.value) for c in found) < 6 * found[0].spread


def test_a_head_that_reads_exactly_what_another_writes_composes():
    model = cs.model("attention", n_layers=2, n_heads=4, d_model=64, vocab_size=64, max_length=16)
    writer, reader = model.layers[0].mixer, model.layers[1].mixer
    with torch.no_grad():
        reader.W_K[2].copy_(writer.W_O[1].T)  # the keys of L1H2 read the output of L0H1
    values = {(c.earlier, c.later, c.through): c.value for c in compositions(model)}
    best = max(values, key=lambda key: values[key])
    assert best == ((0, 1), (1, 2), "k")
    assert values[best] > 0.1


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: copying_score(cs.model("mamba", vocab_size=64), 0, TOKENS), "layer 0 is mamba"),
        (lambda: copying_score(planted_induction(), 0, torch.zeros(2, 4, dtype=torch.long)), "distinct tokens"),
    ],
)
def test_bad_input(call, says):
    with pytest.raises(UserError, match=says):
        call()
