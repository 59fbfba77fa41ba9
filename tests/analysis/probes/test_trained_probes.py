"""What probes say of models that were really trained. The runs are shared with tests/learning."""

import pytest

from circuitscope.analysis.probes import probe

pytestmark = pytest.mark.slow

CHANCE = 1 / 4


def at(run, name, step, **options):
    """Rows of one checkpoint by layer."""
    return probe(run, name, steps=step, **options).set_index("layer")


def test_two_layers_know_the_bound_key_at_a_value_after_the_first(default_run):
    """At the start a bag of the tokens so far reaches (1 + 1/2 + 1/3 + 1/4) / 4 = 0.52 at most."""
    first, last = at(default_run, "bound-key", 0), at(default_run, "bound-key", default_run.steps[-1])
    assert last.accuracy[0] > 0.9
    assert first.accuracy[0] < 0.55
    assert last.selectivity[0] > 0.5
    assert last.chance[0] == CHANCE


def test_and_the_value_to_recall_at_a_query_after_the_second_alone(default_run):
    last = at(default_run, "bound-value", default_run.steps[-1])
    assert last.accuracy[0] == pytest.approx(CHANCE, abs=0.05)
    assert last.accuracy[1] > 0.9


def test_the_bound_key_is_used(default_run):
    last = at(default_run, "bound-key", default_run.steps[-1], causal=True)
    assert last.lost[0] > 0.5
    assert last.lost[0] > last.lost_control[0] + 0.2
    assert last.lost_random[0] < 0.1
    assert last.left[0] < 0.5
    assert last.lost[1] == 0  # after the last layer no query looks there


def test_one_layer_of_attention_never_knows_the_value_to_recall(one_layer_run):
    found = probe(one_layer_run, "bound-value", steps="0:600:200")
    assert (found.accuracy - CHANCE).abs().max() < 0.05


def test_mamba_knows_the_bound_key_better_after_the_value_than_at_it(mamba_run):
    last = mamba_run.steps[-1]
    hooks = ["blocks.*.hook_mixer_out"]
    own, after = (at(mamba_run, name, last, hooks=hooks).accuracy[0] for name in ("bound-key", "bound-key+1"))
    assert after > own + 0.2


def test_one_layer_of_mamba_knows_it_and_its_state_held_it_before_the_query(mamba_run):
    last = mamba_run.steps[-1]
    assert at(mamba_run, "bound-value", last).accuracy[0] > 0.9
    assert at(mamba_run, "bound-value", 0).accuracy[0] == pytest.approx(CHANCE, abs=0.05)
    assert at(mamba_run, "bound-value-in-state", last).accuracy[0] > 0.8
    raw = at(mamba_run, "bound-value", last, hooks=["blocks.*.mixer.hook_state"], sequences=768)
    assert raw.accuracy[0] < 0.5  # all pairs are in it, and nothing says which one is asked for
