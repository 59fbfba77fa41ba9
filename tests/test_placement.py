"""Every preset computes where its model is: on a device that is not the CPU, has no float64 and does not like to wait.

`second_device.py` is that device. It has values, so what comes out must equal what the CPU computes, up to rounding: on
the CPU other kernels serve. Values come to the CPU at once for a whole batch, and not head by head.
"""

import math

import numpy as np
import pytest
import torch

import circuitscope as cs
from circuitscope import devices
from circuitscope.analysis.causal.circuit import find_circuit
from circuitscope.analysis.causal.interventions import ablate, knock_out
from circuitscope.analysis.causal.patching import attribution_patching, interchange
from circuitscope.analysis.decay.rows import decay_rows
from circuitscope.analysis.probes.activations import collect
from circuitscope.analysis.probes.targets import ProbeExamples
from circuitscope.analysis.scores.held_out import HeldOut, check_scores
from circuitscope.analysis.scores.rows import score_rows
from circuitscope.tasks.generated import generated_answers
from second_device import OnSecond, second_device

TASK = cs.task("mqar", length=12, pairs=2, vocab_size=32)
DATA = HeldOut(TASK, longest=12, sequences=3)
NAMES = check_scores(None, TASK)


# On a device torch computes an LSTM by a fused kernel, which the CPU behind the second device does not have.
@pytest.fixture(params=[name for name in cs.models.names() if name != "lstm"])
def models(request):
    """The model of a preset on the CPU, and the same on a second device without float64."""
    here = cs.model(request.param, d_model=32, vocab_size=32, max_length=12).eval()
    there = cs.model(request.param, d_model=32, vocab_size=32, max_length=12).eval()
    before = set(devices.WITHOUT_FLOAT64)
    devices.WITHOUT_FLOAT64.add("second")
    with second_device(float64=False) as crossed:
        yield here, there.to("second"), crossed
    devices.WITHOUT_FLOAT64 &= before


def close(ours, theirs):
    """Whether numbers agree as far as float32 goes, also where nothing is known."""
    a, b = np.array(ours, dtype=float), np.array(theirs, dtype=float)
    return np.allclose(a, b, rtol=2e-3, atol=2e-4, equal_nan=True)


def test_a_training_step_crosses_never_and_an_evaluation_once(models):
    here, there, crossed = models
    expected, _ = TASK.loss(here, DATA.own)
    expected.backward()
    batch = DATA.own.to("second")
    crossed.reset()
    loss, metric = TASK.loss(there, batch)
    loss.backward()
    metric()
    assert crossed.total == 0
    found = TASK.evaluate(there, batch)
    assert (crossed.to_cpu, crossed.waits.total()) == (1, 0)
    assert close(found, TASK.evaluate(here, DATA.own))
    assert close(loss.item(), expected.item())
    for ours, theirs in zip(there.parameters(), here.parameters(), strict=True):
        assert isinstance(ours, OnSecond)
        assert theirs.grad is None or close(ours.grad.tolist(), theirs.grad.tolist())


def test_generation_never_crosses_and_generated_answers_cross_once(models):
    here, there, crossed = models
    prompt = DATA.own.tokens[:, :4]
    expected, asked = here.generate(prompt, 5), generated_answers(here, DATA.own)
    there_prompt = prompt.to("second")
    crossed.reset()
    found = there.generate(there_prompt, 5)
    assert crossed.total == 0
    assert found.tolist() == expected.tolist()
    crossed.reset()
    assert generated_answers(there, DATA.own).tolist() == asked.tolist()
    assert crossed.to_cpu == 1


def test_scores_cross_once_for_each_set_of_sequences(models):
    here, there, crossed = models
    expected = list(score_rows(here, DATA, NAMES))
    crossed.reset()
    found = list(score_rows(there, DATA, NAMES))
    assert crossed.waits.total() == 0
    assert crossed.to_cpu <= 5  # own sequences, repeated blocks, copying on both, and the weights of all heads
    assert [(r["layer"], r["head"], r["score"]) for r in found] == [
        (r["layer"], r["head"], r["score"]) for r in expected
    ]
    assert close([row["value"] for row in found], [row["value"] for row in expected])


def test_decay_crosses_once_for_each_matrix_transition_and_gradient(models):
    here, there, crossed = models
    expected = decay_rows(here, DATA.own.tokens)
    crossed.reset()
    found = decay_rows(there, DATA.own.tokens)
    assert crossed.waits.total() == 0
    assert crossed.to_cpu <= 4 * there.config.n_layers
    rates = ("profile", "transition_norm", "gradient_reach", "mean_distance")
    values = [[row["value"] for row in rows if row["quantity"] in rates] for rows in (found, expected)]
    assert close(*values)


@pytest.mark.slow
def test_circuit_interventions_patching_and_activations_compute_where_the_model_is(models):
    here, there, crossed = models
    crossed.reset()
    found = find_circuit(there, DATA.own)
    assert crossed.waits.total() == 0
    tried = found.tried
    assert crossed.to_cpu <= 2 * 4 + len(tried) + 1  # weights at each offset, one for each knockout, the composition
    expected = find_circuit(here, DATA.own).tried
    assert close([part.weight for part in tried], [part.weight for part in expected])
    for how in ("mean", "resample"):
        crossed.reset()
        effect = ablate(there, DATA.own, layer=0, how=how, frozen=False)
        assert (crossed.to_cpu, crossed.waits.total()) == (1, 0)
        assert math.isfinite(effect.lost)
    if tried:
        crossed.reset()
        knock_out(there, DATA.own, "recall", layer=tried[0].layer)
        assert (crossed.to_cpu, crossed.waits.total()) == (1, 0)
    for patching in (interchange, attribution_patching):
        crossed.reset()
        table = patching(there, DATA.own)
        assert (crossed.to_cpu, crossed.waits.total()) == (1, 0)
        assert close(table.moved, patching(here, DATA.own).moved)
    at = np.arange(3)
    examples = {"query": ProbeExamples(sequence=at, pos=at + 4, anchor=at + 4, label=at, identity=at)}
    hooks = ["blocks.0.hook_resid_pre", "blocks.0.hook_mixer_out"]
    crossed.reset()
    features = collect(there, DATA.own.tokens, hooks, examples)
    assert (crossed.to_cpu, crossed.waits.total()) == (1, 0)
    for place, expected in collect(here, DATA.own.tokens, hooks, examples).items():
        assert close(features[place], expected)


def test_the_second_device_refuses_what_a_gpu_refuses():
    with second_device() as crossed:
        x = torch.ones(3, device="second")
        with pytest.raises(RuntimeError, match="second device"):
            x + torch.ones(3)
        assert (x.sum().item(), crossed.waits.total()) == (3.0, 1)
        assert torch.equal(x.cpu(), torch.ones(3))
        assert crossed.to_cpu == 1
        x[torch.tensor([0, 2], device="second")] = 0
        assert x.nonzero().tolist() == [[1]]
        assert crossed.waits["aten.nonzero"] == 1
    with second_device(float64=False), pytest.raises(TypeError, match="float64"):
        torch.ones(3, device="second").double()


def test_everything_comes_to_the_cpu_by_one_transfer():
    given = [torch.tensor(2.5), torch.arange(6).view(2, 3), torch.tensor([True, False]), torch.zeros(0), torch.ones(2)]
    with second_device() as crossed:
        found = devices.on_cpu([x.to("second") for x in given])
        assert crossed.to_cpu == 1
    assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(found, given, strict=True))
