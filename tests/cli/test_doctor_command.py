"""`circuitscope doctor` says what is half installed, refuses a device that is not there, and finds a wrong kernel."""

import re

import pytest
import torch

from circuitscope.checkup import kernels
from circuitscope.checkup.findings import Finding, as_markdown
from circuitscope.checkup.training import check_training
from circuitscope.cli import doctor as command
from circuitscope.errors import RunFailed, UserError

CPU = torch.device("cpu")


def test_a_package_without_a_version_is_called_half_installed(tmp_path, monkeypatch, capsys):
    (tmp_path / "flash_attn").mkdir()
    (tmp_path / "flash_attn" / "__init__.py").write_text("raise ImportError('no kernels')")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("COLUMNS", "200")
    command.doctor()
    said = capsys.readouterr().out
    assert re.search(r"^flash-attn +half installed: files without a version; install it again *$", said, re.MULTILINE)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_a_device_that_is_not_there_is_refused():
    with pytest.raises(UserError, match="device 'cuda' is not available"):
        command.doctor(device="cuda")


def test_a_device_of_another_name_is_refused_with_the_nearest():
    with pytest.raises(UserError, match=r"^unknown device 'cudda'; did you mean 'cuda'\? valid: auto, cpu, cuda, mps"):
        command.doctor(device="cudda")


@pytest.mark.parametrize("case", kernels.CASES, ids=lambda case: case.name)
def test_every_kernel_agrees_with_its_reference(case):
    found = kernels.check_kernel(case, CPU, torch.float32)
    assert found.right, found


def test_a_wrong_output_a_wrong_gradient_and_an_error_are_found():
    case = kernels.CASES[0]
    off = case._replace(fast=lambda q, k, v: case.fast(q, k, v) * 1.01)
    assert kernels.check_kernel(off, CPU, torch.float32).right is False
    no_gradient = case._replace(fast=lambda q, k, v: case.fast(q, k.detach() * 0.9 + k * 0.1, v))
    assert kernels.check_kernel(no_gradient, CPU, torch.float32).right is False
    broken = case._replace(fast=lambda *heads: torch.zeros(1) @ torch.zeros(2))
    found = kernels.check_kernel(broken, CPU, torch.float32)
    assert (found.right, found.result.partition(":")[0]) == (False, "RuntimeError")


def test_findings_make_a_table_and_a_wrong_one_makes_the_command_fail(monkeypatch, capsys):
    good, bad = Finding("scan", "numba", "off by 1e-7", True), Finding("SSD", "torch", "off by 1", False)
    assert as_markdown([good, Finding("step", "cpu", "3 ms", None)]).splitlines()[1:] == [
        "|---------|-------------|-------------|-------|",
        "| scan    | numba       | off by 1e-7 | ok    |",
        "| step    | cpu         | 3 ms        |       |",
    ]
    for name, rows in (("check_kernels", [good, bad]), ("check_training", []), ("check_speed", [])):
        room = "kernels" if name == "check_kernels" else "training"
        monkeypatch.setattr(f"circuitscope.checkup.{room}.{name}", lambda device, rows=rows: iter(rows))
    with pytest.raises(RunFailed, match=r"^1 of 2 checks went wrong"):
        command.doctor(check=True)
    said = capsys.readouterr().out
    assert "| SSD     | torch       | off by 1    | WRONG |" in said
    assert "1 of 2 checks are right; the 0 rows without a verdict only say how long" in said
    assert re.search(r"^mamba-ssm .+, flash-attn .+, flash-linear-attention ", said, re.MULTILINE)


@pytest.mark.slow
def test_the_checkup_trains_kills_and_resumes():
    trained, resumed = check_training(CPU)
    assert trained.right
    assert resumed.right
    assert "the same bits" in resumed.result
