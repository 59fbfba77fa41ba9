"""SSD against transformers' Mamba2 scan and fla's simple GLA, and the adaptor to fla by fla's reference."""

import inspect
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from circuitscope.kernels import backends
from circuitscope.kernels import ssd as kernels
from circuitscope.kernels.ssd import segment_decay, ssd, ssd_phi

RELATIVE = 1e-5  # of the largest entry; the peers compute in float32


def inputs(length: int, groups: int = 2) -> list[Tensor]:
    r = torch.Generator().manual_seed(length)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=r)

    dt = 1e-3 * 100 ** torch.rand(2, length, 4, generator=r)
    A = -(1 + 15 * torch.rand(4, generator=r))
    B, C = normal(2, length, groups, 16), normal(2, length, groups, 16)
    parts = [normal(2, length, 4, 8), dt, A, B, C, normal(4)]
    return [part.requires_grad_() for part in parts]


def agree(got: Tensor, want: Tensor, parts: list[Tensor]) -> None:
    """Outputs and the gradients of ½‖output‖², relative to the largest entry of each."""
    weights = want.detach()
    pairs = zip(torch.autograd.grad(got, parts, weights), torch.autograd.grad(want, parts, weights), strict=True)
    for ours, theirs in [(got.detach(), want.detach()), *pairs]:
        assert float((ours - theirs).abs().max()) <= RELATIVE * float(theirs.abs().max())


@pytest.mark.parametrize("length", [1, 40, 64, 150])
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_the_scan_of_transformers_mamba2(length: int, groups: int) -> None:
    mamba2 = pytest.importorskip("transformers.models.mamba2.modeling_mamba2")
    if not hasattr(mamba2, "mamba2_chunk_scan"):
        pytest.skip("this transformers has no kernel-level scan")
    # Where mamba-ssm is installed transformers replaces the function by its Triton kernel, on a CPU too.
    scan = inspect.unwrap(mamba2.mamba2_chunk_scan)
    parts = inputs(length, groups)
    x, dt, A, B, C, D = parts
    initial = torch.randn(2, 4, 16, 8, generator=torch.Generator().manual_seed(1))
    agree(ssd(*parts), scan(x, dt, A, B, C, chunk_size=32, D=D), parts)
    # Its state is [d_head, state].
    theirs = scan(x, dt, A, B, C, chunk_size=32, D=D, initial_states=initial.transpose(-1, -2))
    agree(ssd(*parts, initial=initial), theirs, parts)


def test_the_segment_sum_of_transformers_mamba2() -> None:
    mamba2 = pytest.importorskip("transformers.models.mamba2.modeling_mamba2")
    log_a = (-torch.rand(2, 3, 50)).requires_grad_()
    agree(segment_decay(log_a), mamba2.segment_sum(log_a).exp(), [log_a])


@pytest.mark.parametrize("length", [1, 40, 64, 150])
def test_simple_gla_of_fla(length: int) -> None:
    """Both of its forms; the parallel one also returns its matrix, which is our Φ but for Δ and D."""
    naive = pytest.importorskip("fla.ops.simple_gla.naive")
    x, dt, A, B, C, _ = inputs(length, groups=4)
    steps = naive.naive_recurrent_simple_gla(q=C, k=B, v=dt[..., None] * x, g=dt * A, scale=1.0)[0]
    agree(ssd(x, dt, A, B, C), steps, [x, dt, A, B, C])
    _, matrix = naive.naive_parallel_simple_gla(q=C, k=B, v=x, g=dt * A, scale=1.0)
    agree(ssd_phi(dt, A, B, C), matrix * dt.transpose(1, 2)[:, :, None], [dt, A, B, C])


@pytest.mark.parametrize("length", [1, 40, 150])
@pytest.mark.parametrize("with_initial", [False, True])
@pytest.mark.parametrize("with_D", [False, True])
def test_the_adaptor_to_fla(length: int, with_initial: bool, with_D: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """fla's own reference in the place of its GPU kernel, which takes the same arguments."""
    naive = pytest.importorskip("fla.ops.simple_gla.naive")
    parts = inputs(length)
    initial = (
        torch.randn(2, 4, 16, 8, generator=torch.Generator().manual_seed(1), requires_grad=True)
        if with_initial
        else None
    )
    leaves = [*(parts if with_D else parts[:5]), *([] if initial is None else [initial])]
    D = parts[5] if with_D else None
    want = ssd(*parts[:5], D, initial)
    calls = []

    def stand_in(**arguments: object) -> object:
        calls.append(arguments)
        return naive.naive_recurrent_simple_gla(**arguments)

    here = replace(backends.FLA_SSD, device="cpu", dtypes=(torch.float32,), limits=lambda device, **sizes: "")
    monkeypatch.setattr(kernels, "FLA_SSD", here)
    monkeypatch.setattr(backends, "_import", lambda path: (stand_in, ""))
    got = ssd(*parts[:5], D, initial)
    assert len(calls) == 1
    agree(got, want, leaves)


def test_the_adaptor_speaks_the_kernels_language() -> None:
    """Every argument it passes is one that fla's chunk_simple_gla names."""
    chunk = pytest.importorskip("fla.ops.simple_gla.chunk")
    seen: dict[str, object] = {}

    def listen(**arguments: object) -> tuple[Tensor, None]:
        seen.update(arguments)
        return torch.zeros(2, 5, 4, 8), None

    with torch.no_grad():
        x, dt, A, B, C, D = inputs(5)
        kernels._ssd_by_fla(listen, x.bfloat16(), dt, A, B.bfloat16(), C.bfloat16(), D, None)
    function = inspect.unwrap(chunk.chunk_simple_gla)
    assert set(seen) <= set(inspect.signature(function).parameters)
    assert {name: seen[name].dtype for name in "qkvg"} == {  # type: ignore[attr-defined]
        "q": torch.bfloat16,
        "k": torch.bfloat16,
        "v": torch.bfloat16,
        "g": torch.float32,
    }
