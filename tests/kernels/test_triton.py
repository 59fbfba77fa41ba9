"""Triton without a GPU: its interpreter runs every kernel, and its compiler makes machine code of every kernel.

The interpreter accepts what the compiler rejects, and the compiler does not see wrong numbers; so both are asked.
"""

import os
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import circuitscope
from circuitscope.kernels import backends
from triton_kernels import KERNELS

HERE = Path(__file__).parent
GPUS = {"sm_75": 75, "sm_80": 80, "sm_90": 90}
NO_EXTRAS = ["-q", "-p", "no:cacheprovider", "-o", "addopts=--strict-markers"]  # it is slow enough


@pytest.mark.slow
def test_every_kernel_agrees_with_its_reference_in_the_interpreter():
    """In a process of its own: Triton reads the variable when it is imported."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *NO_EXTRAS, str(HERE / "test_triton_kernels.py")],
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        cwd=HERE.parent.parent,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"^\d+ passed in ", done.stdout, re.MULTILINE), done.stdout  # nothing was skipped


class NoGpu:
    """What Triton asks of a driver before it compiles a kernel for the GPU at hand."""

    def __init__(self, capability: int):
        from triton.backends.compiler import GPUTarget

        self.target = GPUTarget("cuda", capability, 32)

    def get_current_target(self):
        return self.target

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0


class Compiling:
    """In place of a kernel: compiles it with the arguments of a call, as if to start it, and runs nothing."""

    def __init__(self, kernel, made: dict[str, dict[str, Any]]):
        self.kernel, self.made = kernel, made

    def __getitem__(self, grid):
        return self.launch

    def launch(self, *args, **keywords):
        compiled = self.kernel.warmup(*args, grid=(1,), **keywords)
        self.made.setdefault(self.kernel.__name__, []).append(compiled.asm)


@pytest.fixture
def compiled_for(monkeypatch, tmp_path):
    """Makes every kernel compile for a GPU; gives what was compiled, by kernel."""
    from triton import knobs
    from triton.runtime import driver

    monkeypatch.setattr(knobs.cache, "dir", str(tmp_path))  # nothing that was compiled before counts
    made: dict[str, list[dict[str, Any]]] = {}

    def begin(capability: int) -> dict[str, list[dict[str, Any]]]:
        monkeypatch.setattr(driver, "_active", NoGpu(capability))
        for file, names in KERNELS.items():
            module = import_module(f"circuitscope.kernels.triton.{file}")
            for name in names:
                kernel = getattr(module, name)
                kernel.device_caches.clear()
                monkeypatch.setattr(module, name, Compiling(kernel, made))
        return made

    return begin


def call_all(dtype: torch.dtype, batch: int, length: int, channels: int, states: int, width: int) -> None:
    """Every call that the public functions make, forward and backward."""
    from circuitscope.kernels.triton import scan_edges, scans, selective_scan, selective_scan_phi, wkv

    def leaf(*shape: int) -> Tensor:
        return torch.ones(shape, dtype=dtype, requires_grad=True)

    x, A, B = leaf(batch, length, channels), leaf(channels, states), leaf(batch, length, states)
    edge = torch.zeros(1, dtype=torch.long)
    selective_scan.scan(x, x, A, B, B).sum().backward()
    selective_scan.scan(*(a.detach() for a in (x, x, A, B, B)))  # saves no states
    selective_scan_phi.phi(x, A, B, B).sum().backward()
    selective_scan_phi.phi_mean(x, A, B, B)
    selective_scan_phi.phi_profile(x, A, B, B)
    selective_scan_phi.phi_on_edges(x, A, B, B, None, edge, edge, edge)
    scan_edges.composed_on_edges(x, A, B, B, x[0, 0], x.mT, x.mT, leaf(channels, width), edge, edge, edge)
    wkv.wkv(x[0, 0], x[0, 0], x, x).sum().backward()
    scans.linear_scan(x, x).sum().backward()
    z = torch.complex(x, x)
    scans.linear_scan(z, z).real.sum().backward()
    k, beta = leaf(batch, length, channels, states), leaf(batch, length, channels)
    scans.delta_scan(k, beta, beta, leaf(batch, length, channels, states, width)).sum().backward()


# batch, pos, channel, state, width. Triton compiles a kernel anew for sizes of 1, and for multiples of 16.
SIZES = {"odd": (2, 20, 6, 5, 3), "one": (1, 1, 1, 1, 1), "round": (16, 32, 16, 16, 16)}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("gpu", "sizes", "dtype"),
    [
        *((gpu, "odd", torch.float32) for gpu in GPUS),
        *(("sm_80", sizes, torch.float64) for sizes in SIZES),
        *(("sm_90", sizes, torch.float32) for sizes in ("one", "round")),
    ],
    ids=str,
)
def test_every_kernel_compiles_for_a_gpu(gpu, sizes, dtype, compiled_for):
    made = compiled_for(GPUS[gpu])
    call_all(dtype, *SIZES[sizes])
    assert made.keys() == set().union(*KERNELS.values())
    assert all(code["cubin"].startswith(b"\x7fELF") for codes in made.values() for code in codes)


@pytest.mark.slow
def test_no_kernel_multiplies_sizes_in_32_bits(compiled_for):
    """batch · pos · channel · state of a large array has no room in 32 bits, and neither has the row of a long one."""
    made = compiled_for(80)
    call_all(torch.float32, *SIZES["odd"])
    product = re.compile(r"arith\.muli .*: (?:i32|tensor<[\dx]+xi32>)")
    for name, codes in made.items():
        for code in codes:
            assert "arith.muli" in code["ttir"]
            assert not product.search(code["ttir"]), name


WITHOUT_TRITON = """
import sys
sys.modules["triton"] = None
import torch
from circuitscope.kernels import backends
from circuitscope.kernels.selective_scan import selective_scan
from circuitscope.kernels.wkv import wkv
x, w = torch.rand(1, 3, 2), torch.rand(2)
assert selective_scan(x, x, -x[0, :2], x, x).isfinite().all() and wkv(w, w, x, x).isfinite().all()
for backend in (backends.TRITON_SCAN, backends.TRITON_PHI, backends.TRITON_WKV, backends.TRITON_LINEAR_STATES):
    print(backend._import()[1])
"""


def test_on_a_cpu_nothing_needs_triton_and_its_backends_say_that_it_is_not_installed():
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TRITON],
        env={**os.environ, "PYTHONPATH": str(Path(circuitscope.__file__).parent.parent)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.splitlines() == ["triton is not installed"] * 4


def test_every_function_that_a_backend_names_is_there():
    """A name that is misspelled would be taken for a kernel that cannot be imported."""
    ours = [value for value in vars(backends).values() if getattr(value, "package", "") == "triton"]
    assert len(ours) == 9
    for backend in ours:
        assert backend._import()[1] == ""
