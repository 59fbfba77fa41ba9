"""Who computes a kernel: a backend says before the call whether it serves, and what it raises after that is seen.

Tensors here only say that they are on a GPU, the packages are stand-ins, and torch's own path is one that counts.
"""

import logging
import re
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor

from circuitscope.cli.doctor import doctor
from circuitscope.kernels import backends, scan_edges
from circuitscope.kernels.attention import fused_attention
from circuitscope.kernels.delta_rule import delta_rule, delta_with_state_edit
from circuitscope.kernels.edge_sums import EdgeList
from circuitscope.kernels.linear_scan import linear_scan_reference
from circuitscope.kernels.s4d import S4DParams, s4d_with_state_edit
from circuitscope.kernels.selective_scan import (
    selective_scan,
    selective_scan_phi,
    selective_scan_phi_profile,
    selective_scan_phi_reference,
    selective_scan_reference,
    selective_scan_with_state_edit,
)
from circuitscope.kernels.selective_scan_sums import selective_scan_phi_mean, selective_scan_phi_on_edges
from circuitscope.kernels.ssd import ssd, ssd_with_state_edit
from circuitscope.kernels.wkv import wkv, wkv_reference

CUDA, CPU = torch.device("cuda"), torch.device("cpu")


class OnGPU(Tensor):
    device = CUDA


def ones(*shape: int, dtype: torch.dtype = torch.float32, on: type[Tensor] = OnGPU) -> Tensor:
    return torch.ones(shape, dtype=dtype).as_subclass(on)


def attention(dtype=torch.bfloat16, on=OnGPU, d_head=8, bias=False, batch=2):
    q = ones(batch, 5, 3, d_head, dtype=dtype, on=on)
    return fused_attention(q, q, q, ones(3, 5, 5, on=on) if bias else None)


def scan(dtype=torch.bfloat16, on=OnGPU, state=4, initial=False, batch=2):
    x, B = (ones(batch, 5, size, dtype=dtype, on=on) for size in (3, state))
    return selective_scan(x, x, ones(3, state, on=on), B, B, initial=ones(batch, 3, state) if initial else None)


def ssd_of_heads(dtype=torch.bfloat16, on=OnGPU, d_head=8, state=4, batch=2):
    x, B = (ones(batch, 5, *size, dtype=dtype, on=on) for size in ((3, d_head), (1, state)))
    return ssd(x, ones(batch, 5, 3, on=on), ones(3, on=on), B, B)


def delta(dtype=torch.bfloat16, on=OnGPU, d_key=8, gated=False, batch=2):
    k, beta = (ones(batch, 5, 3, *size, dtype=dtype, on=on) for size in ((d_key,), ()))
    return delta_rule(k, k, k, beta, beta if gated else None)


def gated_delta(**options):
    return delta(gated=True, **options)


KERNELS = {
    attention: backends.FLASH_ATTN,
    scan: backends.MAMBA_SSM,
    ssd_of_heads: backends.FLA_SSD,
    delta: backends.FLA_DELTA,
    gated_delta: backends.FLA_GATED_DELTA,
}
IN_TORCH = {
    attention: "torch.nn.functional.scaled_dot_product_attention",
    scan: "circuitscope.kernels.selective_scan.selective_scan_reference",
    ssd_of_heads: "circuitscope.kernels.ssd._ssd_chunked",
    delta: "circuitscope.kernels.delta_rule._delta_chunked",
    gated_delta: "circuitscope.kernels.delta_rule._delta_chunked",
}
NOR_BY_TRITON = {kernel: ["triton is not installed"] if kernel is scan else [] for kernel in KERNELS}
EVERY = pytest.mark.parametrize("kernel", KERNELS)


@pytest.fixture(autouse=True)
def as_on_a_new_machine(monkeypatch):
    """An Ampere GPU without Triton; nothing imported, nothing said."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (8, 0))
    for name in [name for name in sys.modules if name.startswith("circuitscope.kernels.triton.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.setattr(backends, "_said", set())
    backends._import.cache_clear()
    yield
    backends._import.cache_clear()


@pytest.fixture
def torch_calls(monkeypatch):
    """How often torch computed, in place of a backend; it gives back its first tensor."""
    calls = []
    for name in set(IN_TORCH.values()):
        monkeypatch.setattr(name, lambda x, *args, **options: calls.append(1) or x)
    return calls


@pytest.fixture
def said(caplog):
    """What was logged about kernels."""
    return lambda: [record.getMessage() for record in caplog.records if record.name == "circuitscope.kernels"]


def install(monkeypatch, kernel, function=None):
    """A package whose function is counted; by default it gives back a tensor of the right shape."""
    calls = []

    def count(*args, **options):
        calls.append(1)
        if function is not None:
            return function(*args, **options)
        return args[0] if args else (options["v"], None)

    module, _, name = KERNELS[kernel].function.rpartition(".")
    monkeypatch.setitem(sys.modules, module, SimpleNamespace(**{name: count}))
    return calls


@EVERY
def test_a_backend_that_serves_is_called_and_says_nothing(kernel, monkeypatch, torch_calls, said):
    calls = install(monkeypatch, kernel)
    kernel()
    assert calls == [1]
    assert torch_calls == []
    assert said() == []


@EVERY
@pytest.mark.parametrize("error", [RuntimeError("a bug in the package"), torch.OutOfMemoryError()])
def test_what_a_backend_raises_after_it_said_yes_is_seen(kernel, error, monkeypatch, torch_calls):
    def fail(*args, **options):
        raise error

    install(monkeypatch, kernel, fail)
    with pytest.raises(type(error)) as seen:
        kernel()
    assert seen.value is error
    assert torch_calls == []


@pytest.mark.parametrize(
    ("kernel", "options", "reason"),
    [
        (attention, {"bias": True}, "flash-attn takes no bias"),
        (attention, {"d_head": 264}, "flash-attn takes a d_head of at most 256, not 264"),
        (attention, {"dtype": torch.float32}, "flash-attn takes float16 or bfloat16, not float32"),
        (scan, {"initial": True}, "mamba-ssm takes no initial state"),
        (scan, {"state": 257}, "mamba-ssm takes a state of at most 256, not 257"),
        (scan, {"dtype": torch.float64}, "mamba-ssm takes float32 or float16 or bfloat16, not float64"),
        (ssd_of_heads, {"d_head": 7}, "flash-linear-attention takes an even d_head and an even state, not 7 and 4"),
        (ssd_of_heads, {"state": 5}, "flash-linear-attention takes an even d_head and an even state, not 8 and 5"),
        (ssd_of_heads, {"dtype": torch.float32}, "flash-linear-attention takes float16 or bfloat16, not float32"),
        (delta, {"d_key": 257}, "flash-linear-attention takes a d_key of at most 256, not 257"),
        (gated_delta, {"d_key": 257}, "flash-linear-attention takes a d_key of at most 256, not 257"),
        (gated_delta, {"dtype": torch.float32}, "flash-linear-attention takes float16 or bfloat16, not float32"),
    ],
)
def test_a_backend_that_says_no_is_not_called_and_says_why_once(
    kernel, options, reason, monkeypatch, torch_calls, said, caplog
):
    calls = install(monkeypatch, kernel)
    kernel(**options)
    kernel(**options)
    assert calls == []
    assert torch_calls == [1, 1]
    assert said()[0] == f"{reason}; torch computes instead"
    assert len(said()) == 1 + len(NOR_BY_TRITON[kernel])
    assert caplog.records[0].levelno == logging.WARNING


class NotInstalled:
    """Finds no module of a package, although it may be there."""

    def __init__(self, package: str):
        self.package = package

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == self.package:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


@EVERY
def test_a_package_that_is_not_installed_is_named(kernel, monkeypatch, torch_calls, said):
    package = KERNELS[kernel].function.partition(".")[0]
    for name in [name for name in sys.modules if name.partition(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [NotInstalled(package), *sys.meta_path])
    kernel()
    assert torch_calls == [1]
    reasons = (f"{KERNELS[kernel].package} is not installed", *NOR_BY_TRITON[kernel])
    assert said() == [f"{why}; torch computes instead" for why in reasons]


@EVERY
def test_an_import_that_fails_is_tried_once_and_its_error_is_named(kernel, monkeypatch, torch_calls, said):
    tried = []

    def fail(name):
        tried.append(name)
        raise OSError("libcuda.so.1: cannot open shared object file\nand more")

    monkeypatch.setattr(backends, "import_module", fail)
    kernel()
    kernel()
    assert torch_calls == [1, 1]
    reason = "cannot be imported (OSError: libcuda.so.1: cannot open shared object file)"
    packages = [KERNELS[kernel].package, *("triton" for _ in NOR_BY_TRITON[kernel])]
    assert said() == [f"{package} {reason}; torch computes instead" for package in packages]
    assert len(tried) == len(packages)


@EVERY
def test_empty_tensors_are_left_to_torch_without_a_word(kernel, monkeypatch, torch_calls, said):
    calls = install(monkeypatch, kernel)
    kernel(batch=0)
    assert calls == []
    assert torch_calls == [1]
    assert said() == []


@EVERY
def test_nothing_is_said_or_called_on_a_cpu(kernel, monkeypatch, said):
    calls = install(monkeypatch, kernel)
    kernel(on=Tensor, dtype=torch.float32)
    assert calls == []
    assert said() == []
    assert KERNELS[kernel].refuses(CPU, torch.float32) == f"{KERNELS[kernel].package} needs a CUDA device, not CPU"


def test_an_old_gpu_is_no_device_for_flash_attn(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (7, 5))
    reason = backends.FLASH_ATTN.refuses(CUDA, torch.float16)
    assert reason == "flash-attn needs a GPU of compute capability 8.0 or more, not 7.5"


@pytest.mark.parametrize(("triton", "wrong"), [("3.3.1", False), ("3.4.0", True), ("3.7.0", True), ("3.7.1", False)])
def test_the_tritons_that_are_wrong_on_hopper_keep_gated_kernels_out(triton, wrong, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(backends.metadata, "version", lambda name: triton)
    for kernel in (ssd_of_heads, gated_delta, delta):
        install(monkeypatch, kernel)
        reason = KERNELS[kernel].refuses(CUDA, torch.bfloat16)
        assert ("on Hopper GPUs under Triton" in reason) == (wrong and kernel is not delta)


def test_on_a_cpu_numba_computes_what_it_can_and_torch_the_rest():
    found = {kernel: backends.who_serves(kernel, CPU, torch.float32) for kernel in backends.KERNELS}
    assert found["attention"] == ("torch", ["flash-attn needs a CUDA device, not CPU"])
    no_gpu = [f"{package} needs a CUDA device, not CPU" for package in ("mamba-ssm", "triton")]
    assert found["selective scan"] == ("numba", no_gpu)
    assert found["WKV"] == ("numba", no_gpu[1:])
    assert found["short and long convolution"] == ("numba", [])
    assert found["states that are read or edited"] == ("torch", no_gpu[1:])


def test_on_a_gpu_the_package_that_serves_is_named_and_numba_is_not(monkeypatch):
    install(monkeypatch, scan)
    assert backends.who_serves("selective scan", CUDA, torch.bfloat16) == (
        "mamba-ssm",
        ["numba needs a CPU device, not CUDA", "triton is not installed"],
    )


# -- our own kernels in Triton ------------------------------------------------------------------------


def random(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(len(shape)), dtype=torch.float64).to(dtype)


def delta_scan_reference(k, beta, decay, X):
    S, states = torch.zeros_like(X[:, 0]), []
    for t in range(k.shape[1]):
        seen = (k[:, t, ..., None] * S).sum(-2)
        S = decay[:, t, :, None, None] * (S - (beta[:, t, :, None] * k[:, t])[..., None] * seen[:, :, None]) + X[:, t]
        states.append(S)
    return torch.stack(states, 1)


def phi_on_edges(*args):
    phi = selective_scan_phi_reference(*args[:5])
    return phi[args[5], :, args[6], args[7]], phi.abs().sum(-1)


def profile_reference(*args):
    phi = selective_scan_phi_reference(*args).abs()
    return torch.stack([phi.diagonal(-lag, -2, -1).mean(-1) for lag in range(phi.shape[-1])], -1)


X, DT, A, B, C, D = random(2, 5, 3), random(2, 5, 3), -random(3, 4), random(2, 5, 4), random(2, 5, 4).flip(1), random(3)
EDGES = tuple(torch.tensor(index) for index in ([0, 1, 1], [4, 2, 3], [1, 2, 0]))
PARAMS = S4DParams(random(3, 4), random(3, 4), random(3, 4, 2), random(3) - 2)
V, BETA, G = random(2, 5, 2, 3), random(2, 5, 2), -random(2, 5, 2)
HEADS = (V, BETA, -random(2), random(2, 5, 1, 4), random(2, 5, 1, 4), random(2))  # x, dt, A, B, C, D of SSD


def half_of_it(states: Tensor) -> Tensor:
    return states / 2


TRITON = {  # a call, the backend that it must reach, what that backend computes
    "scan": (selective_scan, (X, DT, A, B, C, D), backends.TRITON_SCAN, selective_scan_reference),
    "scan from a state": (
        selective_scan,
        (X, DT, A, B, C, D, random(2, 3, 4)),
        backends.TRITON_SCAN,
        selective_scan_reference,
    ),
    "Φ": (selective_scan_phi, (DT, A, B, C, D), backends.TRITON_PHI, selective_scan_phi_reference),
    "profile": (selective_scan_phi_profile, (DT, A, B, C, D), backends.TRITON_PHI_PROFILE, profile_reference),
    "mean": (
        lambda *args: selective_scan_phi_mean(*args, absolute=False),
        (DT, A, B, C, D),
        backends.TRITON_PHI_MEAN,
        lambda *args: selective_scan_phi_reference(*args[:5]).mean(1),
    ),
    "edges": (
        lambda *args: selective_scan_phi_on_edges(*args, *EDGES)[0],
        (DT, A, B, C, D),
        backends.TRITON_PHI_ON_EDGES,
        phi_on_edges,
    ),
    "WKV": (wkv, (D, -D, X, DT), backends.TRITON_WKV, wkv_reference),
    "states of the scan": (
        lambda *args: selective_scan_with_state_edit(*args, half_of_it, random(2, 3, 4).as_subclass(type(args[0]))),
        (X, DT, A, B, C, D),
        backends.TRITON_LINEAR_STATES,
        linear_scan_reference,
    ),
    "states of SSD": (
        lambda *args: ssd_with_state_edit(*args, half_of_it),
        HEADS,
        backends.TRITON_LINEAR_STATES,
        linear_scan_reference,
    ),
    "states of S4D": (
        lambda u, *params: s4d_with_state_edit(u, S4DParams(*params), None, half_of_it),
        (X, *PARAMS[:4]),
        backends.TRITON_LINEAR_STATES,
        linear_scan_reference,
    ),
    "states of the delta rule": (
        lambda *args: delta_with_state_edit(*args, half_of_it, initial=random(2, 2, 3, 3).as_subclass(type(args[0]))),
        (V, V, V, BETA, G),
        backends.TRITON_DELTA_STATES,
        delta_scan_reference,
    ),
}


@pytest.mark.parametrize("name", TRITON)
def test_a_gpu_call_reaches_our_kernel_with_its_arguments_in_order_and_the_answer_comes_back(name, monkeypatch, said):
    call, args, backend, reference = TRITON[name]
    calls = []

    def stand_in(*given):
        plain = [g.as_subclass(Tensor) if isinstance(g, Tensor) else g for g in given]
        calls.append({g.dtype for g in plain if isinstance(g, Tensor) and g.dtype != torch.long})
        answer = reference(*plain)
        return tuple(a.as_subclass(OnGPU) for a in answer) if isinstance(answer, tuple) else answer.as_subclass(OnGPU)

    module, _, function = backend.function.rpartition(".")
    monkeypatch.setitem(sys.modules, module, SimpleNamespace(**{function: stand_in}))
    found = call(*(a.as_subclass(OnGPU) for a in args)).as_subclass(Tensor)
    assert calls
    assert all(len(dtypes) == 1 for dtypes in calls)
    torch.testing.assert_close(found, call(*args), rtol=1e-5, atol=1e-6)
    assert not [line for line in said() if "torch computes" in line]


@pytest.mark.usefixtures("without_type_checks")  # the stand-in gives back what it is given
def test_scores_of_a_scan_reach_our_kernels_on_a_gpu(monkeypatch):
    """What they compute there is tested in Triton's interpreter."""
    kernels = SimpleNamespace(composed_on_edges=lambda *args: args)
    monkeypatch.setitem(sys.modules, "circuitscope.kernels.triton.scan_edges", kernels)
    monkeypatch.setattr(scan_edges, "_by_triton", lambda *args: args)
    edges = EdgeList(np.arange(11), np.zeros(10, int), np.zeros(10, int), 1, 5)
    given = scan_edges.selective_scan_edge_sums(*(a.as_subclass(OnGPU) for a in (DT, A, B, C, D)), edges)
    assert all(map(torch.equal, given[:5], (DT, A, B, C, D)))
    assert given[5] is edges


def test_half_precision_reaches_our_kernel_in_float32_and_comes_back(monkeypatch):
    seen = []
    stand_in = lambda *given: seen.append({g.dtype for g in given}) or given[2]  # noqa: E731
    monkeypatch.setitem(sys.modules, "circuitscope.kernels.triton.wkv", SimpleNamespace(wkv=stand_in))
    k, w = ones(2, 5, 3, dtype=torch.bfloat16), ones(3)
    assert wkv(w, w, k, k).dtype == torch.bfloat16
    assert seen == [{torch.float32}]


def test_mamba_ssm_comes_before_our_kernel_and_why_it_does_not_serve_is_no_warning(monkeypatch, said, caplog):
    caplog.set_level(logging.INFO, logger="circuitscope.kernels")
    ours = []
    stand_in = lambda *given: ours.append(1) or given[0]  # noqa: E731
    monkeypatch.setitem(sys.modules, "circuitscope.kernels.triton.selective_scan", SimpleNamespace(scan=stand_in))
    theirs = install(monkeypatch, scan)
    scan()
    assert (theirs, ours, said()) == ([1], [], [])
    scan(initial=True)
    assert (theirs, ours, said()) == ([1], [1], ["mamba-ssm takes no initial state; triton computes instead"])
    assert caplog.records[0].levelno == logging.INFO


@pytest.mark.parametrize(
    ("capability", "state", "reason"),
    [
        ((7, 5), 256, ""),
        ((7, 0), 4, "triton needs a GPU of compute capability 7.5 or more, not 7.0"),
        ((9, 0), 257, "triton takes a state of at most 256, not 257"),
    ],
)
def test_our_kernels_say_which_gpus_and_sizes_they_take(capability, state, reason, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    monkeypatch.setitem(sys.modules, "circuitscope.kernels.triton.selective_scan", SimpleNamespace(scan=print))
    assert backends.TRITON_SCAN.refuses(CUDA, torch.float32, state=state) == reason


def test_doctor_names_for_each_kernel_who_computes_it_and_why_the_others_do_not(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    doctor()
    said = capsys.readouterr().out
    for kernel in backends.KERNELS:
        name, refusals = backends.who_serves(kernel, CPU, torch.float32)
        assert re.search(rf"^{kernel} +{name} +{'; '.join(refusals)} *$", said, re.MULTILINE)
