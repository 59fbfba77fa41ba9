"""The recall circuit found automatically: in models that have it by construction, and not where it is not."""

import pandas as pd
import pytest
import torch

import circuitscope as cs
from circuitscope.analysis.causal.circuit import circuit_of, circuit_rows, find_circuit
from circuitscope.analysis.causal.interventions import Effect
from circuitscope.analysis.causal.parts import Circuit, Part
from circuitscope.analysis.scores.head_weights import compositions
from circuitscope.errors import UserError
from circuitscope.tasks import NO_LABEL, Batch
from planted import VOCAB, planted_conv_mamba, planted_induction, planted_task

pytestmark = pytest.mark.slow

BATCH = planted_task().batch(0, split="test", size=64)


def convs(*names):
    """Places that are no Φ."""
    return {(f"L0 {name}", False) for name in names}


@pytest.fixture(scope="module")
def induction():
    return find_circuit(planted_induction(), BATCH)


def test_the_planted_induction_circuit_is_found_head_by_head(induction):
    assert induction.found
    assert (induction.binding.place, induction.recall.place) == ("L0H0", "L1H0")
    for part in (induction.binding, induction.recall):
        assert part.weight > 0.95
        assert part.effect.share > 0.9


def test_the_two_heads_compose_through_the_keys_and_no_other_pair_does(induction):
    through_keys = {(c.earlier, c.later): c.value for c in compositions(planted_induction()) if c.through == "k"}
    assert induction.composition == through_keys.pop(((0, 0), (1, 0))) > 0.05
    assert max(through_keys.values()) < 0


def test_its_sentences_name_score_and_knockout(induction):
    binding, recall, together = induction.sentences()
    assert binding.startswith("L0H0 moves 1.00 of its weight at a context value to the key; removing those edges costs")
    assert recall.startswith("L1H0 moves 1.00 of its weight at a query to the bound value; removing those edges costs")
    assert "K-composition" in together


def test_on_repeated_blocks_the_same_heads_are_the_previous_token_head_and_the_induction_head():
    blocks = cs.task("induction", block=7, repeats=3, vocab_size=VOCAB).batch(0, split="test", size=32)
    found = find_circuit(planted_induction(), blocks)
    assert (found.binding.place, found.recall.place) == ("L0H0", "L1H0")
    assert (found.binding.edges, found.recall.edges) == ("previous_token", "induction")
    assert 1 / 7 < found.chance < 1 / 3
    binding, recall, together = found.sentences()
    assert "L0H0 moves 1.00 of its weight to the position before; removing those edges costs" in binding
    assert "at a repeated token to the token after its earlier occurrences; removing those edges costs" in recall
    assert "K-composition" in together


def test_sequences_without_pairs_and_without_blocks_have_no_circuit():
    plain = Batch(BATCH.tokens, BATCH.labels, cs.Layout(BATCH.layout.roles))
    with pytest.raises(UserError, match="repeated blocks, such as induction"):
        find_circuit(planted_induction(), plain)


def test_idle_heads_are_tried_and_not_chosen(induction):
    idle = [p for p in induction.tried if p.head == 1]
    assert len(idle) == 2
    assert all(abs(p.effect.lost) < 0.05 for p in idle)


def test_a_head_that_only_looks_like_recall_is_not_named():
    found = find_circuit(planted_induction(mimic=True), BATCH)
    mimic = next(p for p in found.tried if p.step == "recall" and p.head == 1)
    assert mimic.weight > 0.95
    assert not mimic.used
    assert found.recall.head == 0


def test_the_planted_shift_of_a_conv_is_found_as_borne_by_the_conv():
    found = find_circuit(planted_conv_mamba(), BATCH)
    assert (found.binding.place, found.binding.edges) == ("L0 conv", "binding")
    assert (found.recall.place, found.recall.edges) == ("L0 ssm", "recall")
    assert found.binding.effect.share > 0.9
    assert found.recall.effect.share > 0.9
    assert "the key gets there by the conv, not by ssm" in found.sentences()[-1]


def test_labels_that_mean_nothing_show_no_circuit():
    labels = BATCH.labels.clone()
    where = labels != NO_LABEL
    labels[where] = labels[where][torch.randperm(int(where.sum()), generator=torch.Generator().manual_seed(0))]
    found = find_circuit(planted_induction(), Batch(BATCH.tokens, labels, BATCH.layout))
    # answers still come true for one label in about as many as there are values
    assert max(p.effect.lost for p in found.tried) < 0.1


def test_a_model_that_knows_nothing_has_no_circuit():
    model = cs.model("mamba", n_layers=1, d_model=16, vocab_size=64, max_length=32).eval()
    found = find_circuit(model, BATCH)
    assert not found.found
    (nothing,) = found.sentences()
    assert nothing.startswith("no recall to explain: accuracy 0.0")


def test_rows_bring_the_circuit_back(induction):
    rows = pd.DataFrame(circuit_rows(planted_induction(), BATCH))
    again = circuit_of(rows)
    assert again.sentences() == induction.sentences()
    assert len(again.tried) == len(induction.tried)


@pytest.mark.parametrize(
    ("name", "options", "places"),
    [
        ("deltanet", {}, {("L0H0", True), *convs("conv", "conv_q", "conv_k")}),
        ("deltanet", {"n_heads": 2}, {("L0 delta", True), *convs("conv", "conv_q", "conv_k")}),
        ("attention_conv_qkv", {}, {("L0H0", True), *convs("conv", "conv_q", "conv_k")}),
        ("hyena", {}, {("L0 phi", True), *convs("conv", "conv_x1", "conv_x2")}),
        ("h3", {}, {("L0 phi", True), *convs("shift_k")}),
        ("based", {}, {("L0H0", True)}),
        ("mamba2", {"headdim": 16, "d_state": 8}, {("L0 ssd", True), *convs("conv", "conv_B", "conv_C")}),
        ("rwkv", {}, {("L0 phi", True), *convs("shift", "shift_k", "shift_r")}),
    ],
)
def test_what_can_be_cut_is_tried_and_a_lone_head_is_called_so(name, options, places):
    model = cs.model(name, n_layers=1, d_model=16, vocab_size=64, max_length=32, **options).eval()
    assert {(part.place, part.core) for part in find_circuit(model, BATCH).tried} == places


@pytest.mark.parametrize(("shift", "core"), [("conv", "ssm"), ("conv", "pattern"), ("shift", "phi")])
def test_the_last_sentence_names_the_matrices_that_the_layer_has(shift, core):
    def part(step, factor, is_core, lost):
        effect = Effect(1.0, 1 - lost, lost, 0.0, 8)
        return Part(step, step, 0, None, factor, is_core, 0.9, 0.0, (0, 0.9), effect)

    binding, other = part("binding", shift, False, 0.9), part("binding", core, True, 0.1)
    recall = part("recall", core, True, 0.9)
    *_, last = Circuit([binding, other, recall], binding, recall, None, 0.25).sentences()
    assert last.startswith(
        f"the key gets there by the {shift}, not by {core}: removing the edges of {core} to the key costs at most"
    )
