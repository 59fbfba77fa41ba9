"""Triton without a GPU: its interpreter runs every kernel, and its compiler makes machine code of every kernel.

The interpreter accepts what the compiler rejects, and the compiler does not see wrong numbers; so both are asked.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

import circuitscope
from circuitscope.kernels import backends

HERE = Path(__file__).parent
GPUS = {"sm_75": 75, "sm_80": 80, "sm_90": 90}
NO_EXTRAS = ["-q", "-p", "no:cacheprovider", "-o", "addopts=--strict-markers"]  # it is slow enough
POINTERS = {torch.float32: "*fp32", torch.float64: "*fp64", torch.int32: "*i32"}


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


class Compiling:
    """In place of a kernel: compiles it for one GPU with the arguments of a call, and runs nothing."""

    def __init__(self, kernel, capability: int, made: dict[str, bytes]):
        self.kernel, self.capability, self.made = kernel, capability, made

    def __getitem__(self, grid):
        return self.launch

    def launch(self, *args, **keywords):
        import triton
        from triton.backends.compiler import GPUTarget
        from triton.compiler import ASTSource

        kernel = self.kernel
        constants = {name: value for name, value in keywords.items() if name in kernel.arg_names}
        given = dict(zip(kernel.arg_names, args, strict=False))
        assert given.keys() | constants.keys() == set(kernel.arg_names)
        signature = {
            name: "constexpr" if name in constants else POINTERS[a.dtype] if isinstance(a, Tensor) else "i32"
            for name, a in (given | constants).items()
        }
        compiled = triton.compile(
            ASTSource(kernel, {name: signature[name] for name in kernel.arg_names}, constants),
            target=GPUTarget("cuda", self.capability, 32),
            options={name: value for name, value in keywords.items() if name not in constants},
        )
        self.made[kernel.__name__] = compiled.asm["cubin"]


@pytest.mark.slow
@pytest.mark.parametrize("gpu", GPUS)
def test_every_kernel_compiles_for_a_gpu_in_both_precisions(gpu, monkeypatch, tmp_path):
    """Every call that the public functions make, forward and backward."""
    from triton import knobs
    from triton.runtime.jit import JITFunction

    from circuitscope.kernels.triton import scan_edges, scans, selective_scan, selective_scan_phi, wkv

    monkeypatch.setattr(knobs.cache, "dir", str(tmp_path))  # nothing that was compiled before counts
    modules = (selective_scan, selective_scan_phi, scan_edges, wkv, scans)
    made: dict[str, bytes] = {}
    for module in modules:
        for name, kernel in list(vars(module).items()):
            # one without constants is a part of others and is never started
            if isinstance(kernel, JITFunction) and any(p.is_constexpr for p in kernel.params):
                monkeypatch.setattr(module, name, Compiling(kernel, GPUS[gpu], made))
    for dtype in (torch.float32, torch.float64) if gpu == "sm_80" else (torch.float32,):
        made.clear()

        def leaf(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
            return torch.ones(shape, dtype=dtype, requires_grad=True)

        x, A, B = leaf(2, 20, 6), leaf(6, 16), leaf(2, 20, 16)
        edge = torch.zeros(1, dtype=torch.long)
        selective_scan.scan(x, x, A, B, B).sum().backward()
        selective_scan.scan(*(a.detach() for a in (x, x, A, B, B)))  # saves no states
        selective_scan_phi.phi(x, A, B, B).sum().backward()
        selective_scan_phi.phi_mean(x, A, B, B)
        selective_scan_phi.phi_profile(x, A, B, B)
        selective_scan_phi.phi_on_edges(x, A, B, B, None, edge, edge, edge)
        scan_edges.composed_on_edges(x, A, B, B, x[0, 0], x.mT, x.mT, A[:, :4], edge, edge, edge)
        wkv.wkv(x[0, 0], x[0, 0], x, x).sum().backward()
        scans.linear_scan(x, x).sum().backward()
        z = torch.complex(x, x)
        scans.linear_scan(z, z).real.sum().backward()
        k, beta = leaf(2, 20, 3, 5), leaf(2, 20, 3)
        scans.delta_scan(k, beta, beta, leaf(2, 20, 3, 5, 7)).sum().backward()
        started = {name for module in modules for name, held in vars(module).items() if isinstance(held, Compiling)}
        assert made.keys() == started
        assert all(code.startswith(b"\x7fELF") for code in made.values())


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
