"""What a run sets on its device, and CPUs that announce a matrix unit and trap on it."""

import os

import pytest
import torch

from circuitscope.devices import choose_device
from circuitscope.errors import UserError
from circuitscope.memory import out_of_memory_in_words
from circuitscope.training import matrix_unit
from circuitscope.training.device import precision_on, set_up
from tiny_run import tiny


def test_bfloat16_is_the_default_on_cuda_alone():
    devices = [torch.device(name) for name in ("cpu", "cuda", "mps")]
    assert [precision_on(device, "auto") for device in devices] == ["float32", "bfloat16", "float32"]
    assert {precision_on(device, "bfloat16") for device in devices} == {"bfloat16"}


@pytest.mark.parametrize(("asked", "mode"), [(False, 1), (True, 2)])
def test_on_a_gpu_only_deterministic_asks_for_errors(asked, mode):
    with set_up(torch.device("mps"), tiny(deterministic=asked).train):
        assert torch.get_deterministic_debug_mode() == mode
    assert torch.get_deterministic_debug_mode() == 0


def test_float32_is_whole_while_a_run_trains():
    """cuDNN computes an LSTM in TF32 by itself."""
    before = torch.backends.cudnn.rnn.fp32_precision
    with set_up(torch.device("cpu"), tiny().train):
        assert torch.backends.cudnn.rnn.fp32_precision == "ieee"
    assert torch.backends.cudnn.rnn.fp32_precision == before


def test_deterministic_changes_no_digest():
    assert tiny(deterministic=True).digest == tiny().digest


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_a_device_that_is_not_there_is_refused_in_one_line():
    with pytest.raises(UserError, match=r"^device 'cuda' is not available; this machine has: cpu"):
        choose_device("cuda")


def test_out_of_memory_on_a_gpu_says_how_much_was_asked_for():
    said = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 8.00 GiB\nof which 1."
    assert out_of_memory_in_words(torch.OutOfMemoryError(said)) == "2.00 GiB were asked for at once"
    assert out_of_memory_in_words(MemoryError()) == "no more can be had"


@pytest.fixture
def virtual_machine(tmp_path, monkeypatch):
    """A CPU that announces AMX; the product of matrices is what the test says."""
    (tmp_path / "cpuinfo").write_text("flags : fpu avx512_bf16 amx_bf16 amx_tile\n")
    monkeypatch.setattr(matrix_unit, "_CPU", tmp_path / "cpuinfo")
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "")
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA")
    matrix_unit.traps.cache_clear()
    yield monkeypatch
    matrix_unit.traps.cache_clear()


def test_a_trap_is_found_and_avoided(virtual_machine):
    virtual_machine.setattr(matrix_unit, "_PRODUCT", "import os, signal; os.kill(os.getpid(), signal.SIGILL)")
    assert matrix_unit.traps()
    assert "traps on it" in matrix_unit.in_words()
    matrix_unit.avoid_trap()
    assert os.environ["ONEDNN_MAX_CPU_ISA"] == "AVX512_CORE_BF16"


def test_a_unit_that_works_is_used(virtual_machine):
    virtual_machine.setattr(matrix_unit, "_PRODUCT", "pass")
    matrix_unit.avoid_trap()
    assert not matrix_unit.traps()
    assert matrix_unit.in_words() == ""
    assert "ONEDNN_MAX_CPU_ISA" not in os.environ
