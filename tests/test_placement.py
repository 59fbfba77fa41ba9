"""Every preset computes where its model is: on a device that is not the CPU, has no float64 and does not like to wait.

So do models that read vectors, of which some presets stand for all: they differ in what stands before and behind the
layers.

`second_device.py` is that device. It has values, so what comes out must equal what the CPU computes, up to rounding: on
the CPU other kernels serve. Values come to the CPU at once for a whole batch, and not head by head: READ says how often
for each way of reading a model. A new one is a line there.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

import circuitscope as cs
from circuitscope import devices
from circuitscope.analysis.causal.battery import causal_rows
from circuitscope.analysis.causal.circuit import find_circuit
from circuitscope.analysis.causal.interventions import ablate, knock_out
from circuitscope.analysis.causal.patching import attribution_patching, interchange
from circuitscope.analysis.decay.rows import decay_rows
from circuitscope.analysis.probes.activations import collect
from circuitscope.analysis.probes.targets import ProbeExamples
from circuitscope.analysis.reading.opened import opened
from circuitscope.analysis.scores.held_out import HeldOut, check_scores
from circuitscope.analysis.scores.rows import score_rows
from circuitscope.tasks import TASKS
from circuitscope.tasks.generated import generated_answers
from circuitscope.tasks.ginc import SHOTS
from second_device import OnSecond, second_device


class Given(NamedTuple):
    """What models are trained and read on."""

    task: cs.tasks.Task
    data: HeldOut

    @property
    def batch(self) -> cs.Batch:
        return self.data.own


def given_by(task: cs.tasks.Task) -> Given:
    return Given(task, HeldOut(task, longest=16, sequences=3))


TOKENS = given_by(cs.task("mqar", length=16, pairs=2, updates=1, vocab_size=32))
VECTORS = given_by(cs.task("vector_mqar", dims=4, pairs=3, queries=2))
ON_VECTORS = {f"{name} on vectors": name for name in ("attention", "mamba", "gated_deltanet", "rwkv", "lstm")}
EXAMPLES = np.arange(3)
HOOKS = ["blocks.0.hook_resid_pre", "blocks.0.hook_mixer_out"]


class Way(NamedTuple):
    """A way of reading a model: what it finds, and how often that may come to the CPU."""

    numbers: Callable[[Any, Given], list[float]]
    crossings: int = 1


def measures(model, given):
    return [measure.mean() for measure in given.task.measures(model, given.batch).values()]


def scores(model, given):
    return [row["value"] for row in score_rows(model, given.data, check_scores(None, given.task))]


def decay(model, given):
    """Without what a fit makes of entries so small that rounding decides about them."""
    rates = ("profile", "transition_norm", "gradient_reach", "mean_distance")
    return [row["value"] for row in decay_rows(model, given.batch.inputs) if row["quantity"] in rates]


def interventions(model, given):
    found = [ablate(model, given.batch, layer=0, how=how, frozen=False) for how in ("zero", "mean", "resample")]
    if not any(reading.no_phi for _, reading in opened(model).walk(given.batch.inputs[:1])):
        found.append(knock_out(model, given.batch, "recall", layer=0))
    return [number for effect in found for number in (effect.before, effect.after)]


def patches(model, given):
    found = [interchange(model, given.batch, by="all"), attribution_patching(model, given.batch)]
    return [moved for table in found for moved in table.moved]


def activations(model, given):
    at = ProbeExamples(sequence=EXAMPLES, pos=EXAMPLES + 4, anchor=EXAMPLES + 4, label=EXAMPLES, identity=EXAMPLES)
    return [x for part in collect(model, given.batch.inputs, HOOKS, {"query": at}).values() for x in part.flatten()]


READ = {
    "evaluation": Way(lambda model, given: [*given.task.evaluate(model, given.batch)]),
    "measures": Way(measures),
    "scores": Way(scores, 5),  # own sequences, repeated blocks, copying on both, and the weights of all heads
    "decay": Way(decay),
    "interventions": Way(interventions, 4),  # one for each
    "patching": Way(patches, 2),  # one for each
    "activations": Way(activations),
}


@pytest.fixture(scope="module", params=[*cs.models.names(), *ON_VECTORS])
def models(request):
    """The model of a preset on the CPU, the same on a second device without float64, and what they read."""
    given = VECTORS if request.param in ON_VECTORS else TOKENS
    preset = ON_VECTORS.get(request.param, request.param)
    sizes = {"vocab_size": 32} if given is TOKENS else {"d_input": given.task.d_input, "d_output": given.task.d_output}
    here, there = (cs.model(preset, d_model=32, max_length=16, **sizes).eval() for _ in range(2))
    before = set(devices.WITHOUT_FLOAT64)
    devices.WITHOUT_FLOAT64.add("second")
    with second_device(float64=False) as crossed:
        yield here, there.to("second"), crossed, given
    devices.WITHOUT_FLOAT64 &= before


def close(ours, theirs):
    """Whether numbers agree as far as float32 goes, also where nothing is known."""
    a, b = np.array(ours, dtype=float), np.array(theirs, dtype=float)
    return np.allclose(a, b, rtol=2e-3, atol=2e-4, equal_nan=True)


def test_a_training_step_never_crosses(models):
    here, there, crossed, given = models
    expected, _ = given.task.loss(here, given.batch)
    expected.backward()
    batch = given.batch.to("second")
    crossed.reset()
    loss, metric = given.task.loss(there, batch)
    loss.backward()
    metric()
    assert crossed.total == 0
    assert close(loss.item(), expected.item())
    for ours, theirs in zip(there.parameters(), here.parameters(), strict=True):
        assert isinstance(ours, OnSecond)
        assert theirs.grad is None or close(ours.grad.tolist(), theirs.grad.tolist())


def test_generation_never_crosses_and_generated_answers_cross_once(models):
    here, there, crossed, given = models
    if given is VECTORS:
        pytest.skip("models that read vectors generate nothing")
    batch = given.batch
    prompt = batch.tokens[:, :4]
    expected, asked = here.generate(prompt, 5), generated_answers(here, batch)
    there_prompt = prompt.to("second")
    crossed.reset()
    found = there.generate(there_prompt, 5)
    assert crossed.total == 0
    assert found.tolist() == expected.tolist()
    crossed.reset()
    assert generated_answers(there, batch).tolist() == asked.tolist()
    assert crossed.to_cpu == 1


@pytest.mark.parametrize("way", READ)
def test_what_is_read_is_that_of_the_cpu_and_crosses_once_for_a_batch(models, way):
    here, there, crossed, given = models
    crossed.reset()
    found = READ[way].numbers(there, given)
    assert not crossed.waits
    assert crossed.to_cpu <= READ[way].crossings
    assert close(found, READ[way].numbers(here, given))


@pytest.mark.slow
@pytest.mark.parametrize(
    "models", ["attention", "mamba", "gated_deltanet", "lstm", "attention on vectors"], indirect=True
)
def test_a_battery_of_interventions_crosses_once(models):
    """With heads, with channels and without Φ. Effects of patches divide by a gap that these models hardly have."""
    here, there, crossed, given = models
    crossed.reset()
    found = causal_rows(there, given.batch)
    assert (crossed.to_cpu, crossed.waits.total()) == (1, 0)
    for ours, theirs in zip(found, causal_rows(here, given.batch), strict=True):
        assert (ours["intervention"], ours["where"]) == (theirs["intervention"], theirs["where"])
        assert ours["unit"] == "effect" or close(ours["value"], theirs["value"])


@pytest.mark.slow
def test_a_circuit_crosses_once_for_each_of_its_decisions(models):
    """For each step and place after the value: which layers cost enough, then which of their heads do."""
    here, there, crossed, given = models
    crossed.reset()
    found = find_circuit(there, given.batch).tried
    assert not crossed.waits
    assert crossed.to_cpu <= 2 * len({part.edges for part in found}) + 1  # at last, whether two heads compose
    assert close([part.weight for part in found], [part.weight for part in find_circuit(here, given.batch).tried])


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


def test_what_is_handed_to_a_transfer_comes_at_once_and_in_order():
    used = []
    with second_device() as crossed:
        with devices.Transfer() as transfer:
            for number in range(3):
                transfer.then([torch.full((2,), float(number), device="second")], used.extend)
            transfer.then([], lambda _: used.append("all that came before"))
            transfer.then([torch.tensor(7.0)], used.extend)
            assert not used
        assert (crossed.to_cpu, crossed.waits.total()) == (1, 0)
    assert used[3] == "all that came before"
    assert [x.tolist() for x in (*used[:3], used[4])] == [[0.0, 0.0], [1.0, 1.0], [2.0, 2.0], 7.0]


def test_a_transfer_does_not_pile_up_what_is_on_the_cpu_nor_more_than_it_may_hold():
    used = []
    with devices.Transfer() as transfer:
        transfer.then([torch.ones(2)], used.extend)
        assert len(used) == 1
    with second_device() as crossed, devices.Transfer(most=10) as transfer:
        transfer.then([torch.ones(2, device="second")], used.extend)
        assert (len(used), crossed.to_cpu) == (1, 0)
        transfer.then([torch.ones(1, device="second")], used.extend)
        assert (len(used), crossed.to_cpu) == (3, 1)


def test_a_transfer_uses_nothing_after_an_error():
    used = []

    def fails():
        with devices.Transfer() as transfer:
            transfer.then([torch.ones(2, device="second")], used.extend)
            raise ZeroDivisionError

    with second_device(), pytest.raises(ZeroDivisionError):
        fails()
    assert not used


# How often the measures of a task cross over; each pass of the model ends in one transfer.
PASSES = {"copy": 2, "chain_of_thought": 2, "ginc": 1 + len(SHOTS)}


@pytest.mark.parametrize("name", cs.tasks.names())
def test_every_task_computes_its_loss_and_its_measures_where_the_model_is(name, monkeypatch):
    """Also the metric that a row of training logs, which crosses over with the rest of the row."""
    monkeypatch.setattr(devices, "WITHOUT_FLOAT64", {*devices.WITHOUT_FLOAT64, "second"})
    task = cs.task(name, **TASKS[name].small)
    batch = task.batch(0, size=4, split="test")
    here, there = (cs.model("attention", d_model=16, n_heads=2, **task.needs()).eval() for _ in range(2))
    expected = task.measures(here, batch)
    with second_device(float64=False) as crossed:
        there, moved = there.to("second"), batch.to("second")
        crossed.reset()
        loss, metric = task.loss(there, moved)
        loss.backward()
        metric()
        assert crossed.total == 0
        found = task.measures(there, batch)
        assert not crossed.waits
        assert crossed.to_cpu <= PASSES.get(name, 1)
    assert found.keys() == expected.keys()
    for measure, theirs in expected.items():
        assert close(found[measure].mean(), theirs.mean()), measure
