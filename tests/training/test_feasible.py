"""A run that cannot be trained here is refused before it exists; one that runs out of memory says what to reduce."""

import os

import pytest
import torch

import circuitscope as cs
from circuitscope import memory
from circuitscope.errors import RunFailed, UserError
from circuitscope.models.hooked_lm import HookedLM
from circuitscope.training.feasible import check_feasible
from circuitscope.training.trainer import train
from tiny_run import tiny


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"batch_size": 2**30}, "a batch of 1,073,741,824 sequences of length 16"),
        ({"eval_batch_size": 2**30}, "use fewer or shorter sequences"),
        ({"examples": 2**39}, "use fewer examples, or none"),
        ({"vocab_size": 2**30}, "use a smaller model"),
        ({"d_model": 2**20, "n_layers": 4}, "use a smaller model"),
        ({"mlp_ratio": 1024, "d_model": 2**20, "n_layers": 2}, "use a smaller model"),
    ],
)
def test_what_no_memory_holds_is_refused_before_there_is_a_run(tmp_path, options, words):
    with pytest.raises(UserError, match=words):
        train(tiny(**options), root=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_activations_and_logits_count(monkeypatch):
    """With a megabyte free, weights and tokens of this run fit, and what a batch makes in the model does not."""
    check_feasible(tiny(batch_size=512))
    free = type("Free", (), {"available": 1 << 20})
    monkeypatch.setattr(memory.psutil, "virtual_memory", lambda: free)
    check_feasible(tiny(batch_size=8))
    with pytest.raises(UserError, match=r"a batch of 512 sequences .* use a smaller train\.batch_size"):
        check_feasible(tiny(batch_size=512))


def test_far_more_threads_than_the_machine_has_are_refused(tmp_path, monkeypatch):
    with pytest.raises(UserError, match=r"train\.threads"):
        tiny(threads=4096)
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    with pytest.raises(UserError, match=r"this machine has 2 CPUs.*got 65"):
        train(tiny(threads=65), root=tmp_path)
    assert check_feasible(tiny(threads=64)).type == "cpu"
    monkeypatch.setattr(os, "cpu_count", lambda: 32)
    assert check_feasible(tiny(threads=65)).type == "cpu"


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("[enforce fail at alloc_cpu.cpp:124] DefaultCPUAllocator: can't allocate memory"),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 8 GiB"),
        RuntimeError("MPS backend out of memory (MPS allocated: 7 GB, max allowed: 9 GB). Tried to allocate 2 GB"),
    ],
    ids=["CPU", "CUDA", "MPS"],
)
def test_training_that_runs_out_of_memory_says_what_to_reduce(tmp_path, monkeypatch, error):
    def hidden(*args: object) -> torch.Tensor:
        raise error

    monkeypatch.setattr(HookedLM, "hidden", hidden)
    with pytest.raises(RunFailed, match=r"^out of memory: .*batch_size.*last checkpoint: step 0"):
        train(tiny(), root=tmp_path, name="one")
    assert cs.Run(tmp_path / "one").status["state"] == "failed"


def test_a_caller_in_inference_mode_can_train(tmp_path):
    with torch.inference_mode():
        run = train(tiny(steps=2), root=tmp_path, name="one")
    assert run.status["state"] == "finished"
