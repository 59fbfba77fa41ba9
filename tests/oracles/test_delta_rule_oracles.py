"""The delta rules against transformers' Qwen3-Next and fla, and the adaptor to fla by fla's references."""

import inspect
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from circuitscope.kernels import backends
from circuitscope.kernels import delta_rule as kernels
from circuitscope.kernels.delta_rule import delta_phi, delta_rule

RELATIVE = 2e-5  # of the largest entry; the peers compute and solve in float32
LENGTHS = [1, 40, 64, 150]


def inputs(length: int, *, gated: bool, beta_max: float = 2.0) -> list[Tensor]:
    r = torch.Generator().manual_seed(length)
    q, k = (F.normalize(torch.randn(2, length, 3, 16, generator=r), dim=-1) for _ in "qk")
    v = torch.randn(2, length, 3, 8, generator=r)
    beta, g = beta_max * torch.rand(2, length, 3, generator=r), -torch.rand(2, length, 3, generator=r)
    return [part.requires_grad_() for part in ([q, k, v, beta, g] if gated else [q, k, v, beta])]


def agree(got: Tensor, want: Tensor, parts: list[Tensor]) -> None:
    """Outputs and the gradients of ½‖output‖², relative to the largest entry of each."""
    weights = want.detach()
    pairs = zip(torch.autograd.grad(got, parts, weights), torch.autograd.grad(want, parts, weights), strict=True)
    for ours, theirs in [(got.detach(), want.detach()), *pairs]:
        assert float((ours - theirs).abs().max()) <= RELATIVE * max(float(theirs.abs().max()), 1e-3)


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("form", ["torch_recurrent_gated_delta_rule", "torch_chunk_gated_delta_rule"])
@pytest.mark.parametrize("with_initial", [False, True])
def test_the_gated_delta_rule_of_qwen3_next(length: int, form: str, with_initial: bool) -> None:
    qwen = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next")
    # Where fla is installed transformers replaces the function by fla's Triton kernel, on a CPU too.
    function = inspect.unwrap(getattr(qwen, form))
    parts = inputs(length, gated=True)
    q, k, v, beta, g = parts
    initial = torch.randn(2, 3, 16, 8, generator=torch.Generator().manual_seed(1)) if with_initial else None
    want, _ = function(q, k, v, g=g, beta=beta, initial_state=initial, output_final_state=False)
    agree(delta_rule(q, k, v, beta, g, initial=initial), want, parts)


@pytest.mark.parametrize("length", LENGTHS)
def test_the_gated_delta_rule_of_fla(length: int) -> None:
    naive = pytest.importorskip("fla.ops.gated_delta_rule.naive")
    parts = inputs(length, gated=True)
    q, k, v, beta, g = parts
    ours = delta_rule(*parts, scale=0.5)
    steps, _ = naive.naive_recurrent_gated_delta_rule(q=q, k=k, v=v, beta=beta, g=g, scale=0.5)
    agree(ours, steps, parts)
    chunks, _ = naive.naive_chunk_gated_delta_rule(q=q, k=k, v=v, beta=beta, g=g, scale=0.5)
    agree(delta_rule(*parts, scale=0.5), chunks, parts)


@pytest.mark.parametrize("length", LENGTHS)
def test_the_delta_rule_of_fla(length: int) -> None:
    naive = pytest.importorskip("fla.ops.delta_rule.naive")
    parts = inputs(length, gated=False)
    steps, _ = naive.delta_rule_recurrence(*(part.transpose(1, 2) for part in parts))
    agree(delta_rule(*parts), steps.transpose(1, 2), parts)


def test_the_matrix_of_flas_parallel_form_is_phi_without_beta() -> None:
    naive = pytest.importorskip("fla.ops.delta_rule.naive")
    parts = inputs(128, gated=False)
    with torch.no_grad():
        q, k, _, beta = parts
        _, matrix = naive.delta_rule_parallel(*(part.transpose(1, 2) for part in parts), BM=64, BN=32)
        phi = delta_phi(q, k, beta)
        theirs = matrix * beta.transpose(1, 2)[:, :, None]
    assert float((phi - theirs).abs().max()) <= RELATIVE * float(phi.abs().max())


def plain_stand_in(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, **others: Any) -> Any:
    """fla's delta_rule_recurrence (heads first, scale fixed) behind the signature of chunk_delta_rule."""
    from fla.ops.delta_rule.naive import delta_rule_recurrence

    q = q * (others["scale"] * q.shape[-1] ** 0.5)
    moved = (part.transpose(1, 2) for part in (q, k, v, beta))
    out, state = delta_rule_recurrence(*moved, initial_state=others["initial_state"], output_final_state=False)
    return out.transpose(1, 2), state


@pytest.mark.parametrize("length", [1, 40, 150])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("with_initial", [False, True])
@pytest.mark.parametrize("scale", [None, 0.7])
def test_the_adaptor_to_fla(
    length: int, gated: bool, with_initial: bool, scale: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """fla's own reference in the place of its GPU kernel."""
    naive = pytest.importorskip("fla.ops.gated_delta_rule.naive")
    parts = inputs(length, gated=gated)
    initial = (
        torch.randn(2, 3, 16, 8, generator=torch.Generator().manual_seed(1), requires_grad=True)
        if with_initial
        else None
    )
    want = delta_rule(*parts, scale=scale, initial=initial)
    calls = []

    def stand_in(**arguments: Any) -> Any:
        calls.append(arguments)
        return (naive.naive_recurrent_gated_delta_rule if gated else plain_stand_in)(**arguments)

    name = "FLA_GATED_DELTA" if gated else "FLA_DELTA"
    real = getattr(backends, name)
    here = replace(real, device="cpu", dtypes=(torch.float32,), limits=lambda device, **sizes: "")
    monkeypatch.setattr(kernels, name, here)
    monkeypatch.setattr(backends, "_import", lambda path: (stand_in, ""))
    got = delta_rule(*parts, scale=scale, initial=initial)
    assert len(calls) == 1
    agree(got, want, [*parts, *([] if initial is None else [initial])])


@pytest.mark.parametrize("gated", [False, True])
def test_the_adaptor_speaks_the_kernels_language(gated: bool) -> None:
    """Every argument it passes is one that fla's chunk kernel names."""
    pytest.importorskip("fla.ops.gated_delta_rule")
    from fla.ops.delta_rule import chunk_delta_rule
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    seen: dict[str, Any] = {}

    def listen(**arguments: Any) -> tuple[Tensor, None]:
        seen.update(arguments)
        return arguments["v"], None

    q, k, v, beta, *g = inputs(5, gated=gated)
    kernels._delta_by_fla(listen, q.bfloat16(), k, v, beta, g[0] if g else None, 1.0, None)
    function = inspect.unwrap(chunk_gated_delta_rule if gated else chunk_delta_rule)
    assert set(seen) <= set(inspect.signature(function).parameters)
    assert all(seen[name].dtype == torch.bfloat16 for name in ("q", "k", "v", "beta"))
    assert not gated or seen["g"].dtype == torch.float32
