"""A circuit's sentences name the matrices that the layer has: no mixer is said to have a scan that has none."""

import pytest

from circuitscope.analysis.causal.circuit import find_circuit
from circuitscope.analysis.causal.interventions import Effect
from circuitscope.analysis.causal.parts import Circuit, Part
from circuitscope.viz.words.circuit import circuit_lines
from planted import (
    planted_conv_attention,
    planted_conv_mamba,
    planted_conv_q_induction,
    planted_rwkv,
    planted_task,
)

BATCH = planted_task().batch(0, split="test", size=32)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("plant", "binding", "recall", "says"),
    [
        (
            planted_conv_mamba,
            "L0 conv",
            "L0 ssm",
            "by the conv, not by ssm: removing the edges of ssm to the key costs at most 0.0",
        ),
        (
            planted_rwkv,
            "L0 shift",
            "L0 phi",
            "by the shift, not by phi: removing the edges of phi to the key costs at most 0.0",
        ),
        (
            planted_conv_attention,
            "L0 conv_k",
            "L0H0",
            "by the conv_k, not by pattern: removing the edges of pattern to the key costs at most 0.0",
        ),
    ],
)
def test_what_brings_the_key_to_the_value_is_named_beside_the_mixers_own_matrix(plant, binding, recall, says):
    found = find_circuit(plant(), BATCH)
    assert found.found
    assert (found.binding.place, found.recall.place) == (binding, recall)
    assert says in found.sentences()[-1]
    assert not any("scan" in line for line in found.sentences())


@pytest.mark.slow
def test_a_head_whose_shift_is_the_conv_on_its_queries_is_named_and_so_is_the_conv():
    found = find_circuit(planted_conv_q_induction(), BATCH)
    assert (found.binding.place, found.recall.place) == ("L0H0", "L1H0")
    (needed,) = [line for line in found.sentences() if "is needed for it too" in line]
    assert needed.startswith("L0 conv_q is needed for it too: removing the same edges there costs")
    tried = {(p.step, p.place): p.effect.share for p in found.tried}
    assert tried["binding", "L0 conv_q"] > 0.8
    assert max(abs(tried["binding", "L1 conv_q"]), abs(tried["recall", "L1 conv_q"])) < 0.05


def test_where_nothing_is_found_the_sentences_say_what_was_tried_and_what_was_not():
    effect = Effect(before=1.0, after=0.95, lost=0.05, stderr=0.01, n=256)
    tried = [
        Part(step, f"{step}{after}", 0, None, factor, False, 0.3, 0.01, (0, 0.3), effect)
        for step in ("binding", "recall")
        for factor in ("conv_k", "conv_q")
        for after in ("", "+1")
    ]
    found = Circuit(tried, None, None, None, 0.25, untried=("L0 matched (it cannot be cut by itself)",))
    nothing, account, *_ = found.sentences()
    assert nothing.startswith("no place found where binding is done: removing its edges costs at most 0.05")
    assert account == (
        "tried one at a time: L0 conv_k, L0 conv_q, at the value and up to 1 positions after it;"
        " not tried: several places at once, L0 matched (it cannot be cut by itself)"
    )


def circuit(accuracy):
    """A circuit whose two knockouts cost all of the accuracy."""
    effect = Effect(before=accuracy, after=0.0, lost=accuracy, stderr=0.0011, n=256)
    parts = [
        Part(step, step, layer, 0, "pattern", True, 0.3, 0.01, (0, 0.3), effect)
        for layer, step in enumerate(("binding", "recall"))
    ]
    return Circuit(parts, *parts, composition=0.2, chance=0.25)


def test_where_there_is_no_recall_to_explain_no_accuracy_is_attributed_to_any_place():
    found = circuit(0.02)
    assert found.sentences() == [
        "no recall to explain: accuracy 0.02, and answering with any value of the context gives 0.25"
    ]
    assert (found.parts, found.found) == ((), False)
    assert [line[0] for line in circuit_lines(found)] == ["  binding", "  recall"]  # no star


def test_where_there_is_recall_each_part_is_told_with_the_loss_and_its_error():
    found = circuit(0.9)
    assert found.sentences()[1:] == [
        "L1H0 moves 0.30 of its weight at a query to the bound value; removing those edges costs 1.00 of the accuracy"
        " (0.90 to 0.00, a loss of 0.900 ± 0.001)",
        "the second reads the first through its keys: K-composition +0.20 above that of random weights",
    ]
    assert [line[0] for line in circuit_lines(found)] == ["* binding", "* recall"]
