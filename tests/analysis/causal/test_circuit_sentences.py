"""A circuit's sentences name the matrices that the layer has: no mixer is said to have a scan that has none."""

import pytest

from circuitscope.analysis.causal.circuit import find_circuit
from planted import planted_conv_attention, planted_conv_mamba, planted_rwkv, planted_task

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
    ],
)
def test_what_brings_the_key_to_the_value_is_named_beside_the_mixers_own_matrix(plant, binding, recall, says):
    found = find_circuit(plant(), BATCH)
    assert found.found
    assert (found.binding.place, found.recall.place) == (binding, recall)
    assert says in found.sentences()[-1]
    assert not any("scan" in line for line in found.sentences())


def test_a_conv_on_the_keys_is_inside_the_pattern_and_nothing_is_said_of_a_scan():
    found = find_circuit(planted_conv_attention(), BATCH)
    assert (found.binding, found.recall.place) == (None, "L0H0")
    assert found.recall.effect.share > 0.9
    nothing, recall = found.sentences()
    assert nothing.startswith("no place found where binding is done")
    assert recall.startswith("L0H0 moves 1.00 of its weight at a query to the bound value")
