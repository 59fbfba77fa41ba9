"""Every kernel against its reference: the output, the gradient of every input, and the worst error of each.

The reference computes on the CPU in float64, from inputs that are rounded to what the kernel gets. An error is the
largest difference, as a share of the largest number that should come out. Kernels that only read a matrix have no
gradients.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from circuitscope.checkup.findings import Finding
from circuitscope.kernels.attention import causal_scores, fused_attention
from circuitscope.kernels.backends import KERNELS, who_serves
from circuitscope.kernels.cross_entropy import linear_cross_entropy
from circuitscope.kernels.delta_rule import delta_rule, delta_rule_reference, delta_with_state_edit
from circuitscope.kernels.edge_sums import EdgeList, EdgeSums, Surroundings, edge_sums_reference
from circuitscope.kernels.linear_attention import based_attention, based_reference
from circuitscope.kernels.linear_scan import linear_scan, linear_scan_reference
from circuitscope.kernels.long_conv import long_conv, long_conv_reference
from circuitscope.kernels.s4d import S4DParams, s4d_kernel, s4d_kernel_reference
from circuitscope.kernels.scan_edges import selective_scan_edge_sums
from circuitscope.kernels.selective_scan import (
    selective_scan,
    selective_scan_phi,
    selective_scan_phi_profile,
    selective_scan_phi_reference,
    selective_scan_reference,
)
from circuitscope.kernels.selective_scan_sums import selective_scan_phi_mean
from circuitscope.kernels.short_conv import short_conv, short_conv_reference
from circuitscope.kernels.ssd import ssd, ssd_reference
from circuitscope.kernels.wkv import wkv, wkv_reference

_BATCH, _LENGTH, _CHANNELS, _HEADS, _SIZE, _STATE = 2, 100, 24, 2, 16, 8
# The largest error of an output and of a gradient. bfloat16 has 8 bits of a number, and errors of many terms add up.
ALLOWED = {torch.float32: (1e-4, 1e-3), torch.bfloat16: (3e-2, 1e-1)}

Inputs = dict[str, Tensor]


class Case(NamedTuple):
    """A kernel with its reference. Inputs that begin with a capital letter are parameters and stay in float32."""

    name: str
    served_as: str  # the name under which kernels/backends.py has it; "" where torch computes it everywhere
    fast: Callable[..., Tensor]
    reference: Callable[..., Tensor]
    inputs: Callable[[Callable[..., Tensor]], Inputs]


def _tokens(randn: Callable[..., Tensor], *sizes: int) -> Tensor:
    return randn(_BATCH, _LENGTH, *sizes)


def _scan_inputs(randn: Callable[..., Tensor]) -> Inputs:
    return {
        "x": _tokens(randn, _CHANNELS),
        "dt": F.softplus(_tokens(randn, _CHANNELS) - 2),
        "A": -randn(_CHANNELS, _STATE).exp(),
        "b": _tokens(randn, _STATE),
        "c": _tokens(randn, _STATE),
        "D": randn(_CHANNELS),
    }


def _ssd_inputs(randn: Callable[..., Tensor]) -> Inputs:
    return {
        "x": _tokens(randn, _HEADS, _SIZE),
        "dt": F.softplus(_tokens(randn, _HEADS) - 2),
        "A": -randn(_HEADS).exp(),
        "b": _tokens(randn, 1, _STATE),
        "c": _tokens(randn, 1, _STATE),
        "D": randn(_HEADS),
    }


def _delta_inputs(randn: Callable[..., Tensor]) -> Inputs:
    return {
        "q": _tokens(randn, _HEADS, _SIZE),
        "k": F.normalize(_tokens(randn, _HEADS, _SIZE), dim=-1),
        "v": _tokens(randn, _HEADS, _SIZE),
        "beta": _tokens(randn, _HEADS).sigmoid(),
    }


def _gated_delta_inputs(randn: Callable[..., Tensor]) -> Inputs:
    return {**_delta_inputs(randn), "g": F.logsigmoid(_tokens(randn, _HEADS) + 3)}


def _heads(randn: Callable[..., Tensor]) -> Inputs:
    return {name: _tokens(randn, _HEADS, _SIZE) for name in ("q", "k", "v")}


def _attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.einsum("bhij,bjhd->bihd", causal_scores(q, k).softmax(-1), v)


def _phi(scan_phi: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Φ of the scan as a function of all its inputs; x has no part in it."""
    return lambda x, dt, A, b, c, D: scan_phi(dt, A, b, c, D)


def _reading_only(kernel: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A kernel that sums up Φ, as a function of all inputs of the scan; x has no part in it. There are no gradients."""
    return lambda x, dt, A, b, c, D: kernel(*(part.detach() for part in (dt, A, b, c, D)))


def _mean_of_phi(dt: Tensor, A: Tensor, b: Tensor, c: Tensor, D: Tensor) -> Tensor:
    return selective_scan_phi_reference(dt, A, b, c, D).abs().mean(1)


def _profile_of_phi(dt: Tensor, A: Tensor, b: Tensor, c: Tensor, D: Tensor) -> Tensor:
    phi = selective_scan_phi_reference(dt, A, b, c, D).abs()
    return torch.stack([phi.diagonal(-lag, -2, -1).mean(-1) for lag in range(_LENGTH)], -1)


def _edges() -> EdgeList:
    """In every row the edge to the position before, and as a second set that to the first position."""
    dest = np.tile(np.arange(_LENGTH), _BATCH).repeat(2)
    src = np.where(np.arange(len(dest)) % 2, 0, np.maximum(dest - 1, 0))
    return EdgeList(np.arange(0, len(dest) + 1, 2), src, np.arange(len(dest)) % 2, 2, _LENGTH)


@torch.no_grad()
def _scores(x: Tensor, dt: Tensor, A: Tensor, b: Tensor, c: Tensor, D: Tensor, Taps: Tensor) -> Tensor:
    """What circuit scores need of Φ, and of Φ between gates (here x, on both sides) and a short conv."""
    return _joined(*selective_scan_edge_sums(dt, A, b, c, D, _edges(), Surroundings(x.mT, x.mT, Taps)))


@torch.no_grad()
def _scores_reference(x: Tensor, dt: Tensor, A: Tensor, b: Tensor, c: Tensor, D: Tensor, Taps: Tensor) -> Tensor:
    phi = selective_scan_phi_reference(dt, A, b, c, D)
    around = Surroundings(x.mT, x.mT, Taps)(phi)
    return _joined(edge_sums_reference(phi, _edges()), edge_sums_reference(around, _edges()))


def _joined(*sums: EdgeSums | None) -> Tensor:
    """All sums side by side, each as a share of its largest, so that an error in any of them shows."""
    parts = [part for one in sums if one is not None for part in one]
    return torch.cat([(part / part.abs().max()).flatten().float() for part in parts])


def _delta_states(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, g: Tensor) -> Tensor:
    """The gated delta rule through its states, which nobody changes."""
    return delta_with_state_edit(q, k, v, beta, g, lambda states: states)


_TARGET = torch.arange(40) % 50


def _cross_entropy(x: Tensor, W: Tensor) -> Tensor:
    return linear_cross_entropy(x, W, _TARGET.to(x.device))


def _cross_entropy_reference(x: Tensor, W: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(x, W), _TARGET)


CASES = (
    Case("attention", "attention", fused_attention, _attention, _heads),
    Case("selective scan", "selective scan", selective_scan, selective_scan_reference, _scan_inputs),
    Case(
        "Φ of the scan",
        "matrix of the selective scan",
        _phi(selective_scan_phi),
        _phi(selective_scan_phi_reference),
        _scan_inputs,
    ),
    Case(
        "mean size of Φ over channels",
        "matrix of the selective scan",
        _reading_only(selective_scan_phi_mean),
        _reading_only(_mean_of_phi),
        _scan_inputs,
    ),
    Case(
        "mean size of Φ by lag",
        "matrix of the selective scan",
        _reading_only(selective_scan_phi_profile),
        _reading_only(_profile_of_phi),
        _scan_inputs,
    ),
    Case(
        "scores of the scan",
        "matrix of the selective scan",
        _scores,
        _scores_reference,
        lambda randn: {**_scan_inputs(randn), "Taps": randn(_CHANNELS, 4)},
    ),
    Case("SSD", "SSD", ssd, ssd_reference, _ssd_inputs),
    Case("delta rule", "delta rule", delta_rule, delta_rule_reference, _delta_inputs),
    Case("gated delta rule", "gated delta rule", delta_rule, delta_rule_reference, _gated_delta_inputs),
    Case(
        "states of a linear recurrence",
        "states that are read or edited",
        linear_scan,
        linear_scan_reference,
        lambda randn: {"a": _tokens(randn, _CHANNELS).sigmoid(), "x": _tokens(randn, _CHANNELS)},
    ),
    Case(
        "states of the gated delta rule",
        "states that are read or edited",
        _delta_states,
        delta_rule_reference,
        _gated_delta_inputs,
    ),
    Case(
        "WKV",
        "WKV",
        wkv,
        wkv_reference,
        lambda randn: {
            "W": randn(_CHANNELS).exp() / 4,
            "U": randn(_CHANNELS),
            "k": _tokens(randn, _CHANNELS),
            "v": _tokens(randn, _CHANNELS),
        },
    ),
    Case("linear attention", "", based_attention, based_reference, _heads),
    Case(
        "short conv",
        "convolution",
        short_conv,
        short_conv_reference,
        lambda randn: {"x": _tokens(randn, _CHANNELS), "W": randn(_CHANNELS, 4), "Bias": randn(_CHANNELS)},
    ),
    Case(
        "long conv",
        "",
        long_conv,
        long_conv_reference,
        lambda randn: {"u": _tokens(randn, _CHANNELS), "K": randn(_CHANNELS, _LENGTH), "Skip": randn(_CHANNELS)},
    ),
    Case(
        "S4D kernel",
        "",
        lambda *params: s4d_kernel(S4DParams(*params), _LENGTH),
        lambda *params: s4d_kernel_reference(S4DParams(*params), _LENGTH),
        lambda randn: {
            "Log_A": randn(_CHANNELS, _STATE),
            "A": 3 * randn(_CHANNELS, _STATE),
            "C": randn(_CHANNELS, _STATE, 2),
            "Log_dt": randn(_CHANNELS) - 3,
        },
    ),
    Case(
        "cross-entropy",
        "",
        _cross_entropy,
        _cross_entropy_reference,
        lambda randn: {"x": randn(40, _SIZE), "W": randn(50, _SIZE)},
    ),
)


def check_kernels(device: torch.device) -> Iterator[Finding]:
    """A finding for every kernel, in float32 and, on CUDA, also in bfloat16, in which training computes there."""
    for dtype in (torch.float32, torch.bfloat16) if device.type == "cuda" else (torch.float32,):
        for case in CASES:
            yield check_kernel(case, device, dtype)


def check_kernel(case: Case, device: torch.device, dtype: torch.dtype) -> Finding:
    """The worst errors of a kernel's output and of its gradients; an exception is a finding too."""
    what = f"{case.name}, {str(dtype).removeprefix('torch.')}"
    served = _served_as(case)
    by = who_serves(served, device, dtype)[0] if served else "torch"
    try:
        output, gradient, where = errors(case, device, dtype)
    except Exception as error:  # whatever a kernel raises on this machine is what the table is for
        said = (str(error).splitlines() or [""])[0]
        return Finding(what, by, f"{type(error).__name__}: {said}", False)
    most, most_gradient = ALLOWED[dtype]
    gradients = f"gradients by at most {gradient:.0e} ({where})" if where else "it has no gradients"
    result = f"output off by {output:.0e}, {gradients}"
    return Finding(what, by, result, output <= most and gradient <= most_gradient)


def errors(case: Case, device: torch.device, dtype: torch.dtype) -> tuple[float, float, str]:
    """The error of the output, the worst error of a gradient, and the input that has it; "" if there are none."""
    generator = torch.Generator().manual_seed(0)
    given = case.inputs(lambda *sizes: torch.randn(*sizes, generator=generator))
    rounded = {name: x if name[0].isupper() else x.to(dtype) for name, x in given.items()}
    exact, exact_gradients = _run(case.reference, {name: x.double() for name, x in rounded.items()})
    found, found_gradients = _run(case.fast, {name: x.to(device) for name, x in rounded.items()})
    worst = {
        name: float("inf") if (gradient := found_gradients[name]) is None else relative(gradient, wanted)
        for name, wanted in exact_gradients.items()
        if wanted is not None
    }
    where = max(worst, key=lambda name: worst[name], default="")
    return relative(found, exact), worst.get(where, 0.0), where


def relative(found: Tensor, exact: Tensor) -> float:
    """The largest difference as a share of the largest number; infinite where a number is not finite."""
    difference = (found.detach().cpu().double() - exact).abs().max()
    return float(difference / exact.abs().max()) if difference.isfinite() else float("inf")


def _run(kernel: Callable[..., Tensor], inputs: Inputs) -> tuple[Tensor, dict[str, Tensor | None]]:
    """The output, and the gradients of a fixed weighted sum of it."""
    leaves = {name: x.detach().requires_grad_() for name, x in inputs.items()}
    out = kernel(*leaves.values())
    if not out.requires_grad:
        return out, dict.fromkeys(leaves)
    weight = torch.linspace(-1, 1, out.numel()).view(out.shape).cos().to(out)
    gradients = torch.autograd.grad((out * weight).sum(), list(leaves.values()), allow_unused=True)
    return out.detach(), dict(zip(leaves, gradients, strict=True))


def _served_as(case: Case) -> str:
    """The entry of KERNELS that a case belongs to; one entry may name several kernels."""
    if case.served_as in KERNELS or not case.served_as:
        return case.served_as
    return next((name for name in KERNELS if case.served_as.lower() in name.lower()), "")
