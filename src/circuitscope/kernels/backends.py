"""The backends that compute a kernel: packages with GPU kernels, our own in Triton, Numba on a CPU, otherwise torch.

Before the call, a backend says whether it can serve it and, if not, why, in one sentence. An error that it raises after
it has said yes is a bug, and nothing catches it. The reason is logged once; nothing is logged on a CPU, where nobody
expects a GPU kernel.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module, metadata
from typing import Any

import torch
from torch import Tensor

HALF = (torch.float16, torch.bfloat16)

_logger = logging.getLogger("circuitscope.kernels")
_said: set[str] = set()


def _no_limits(device: torch.device, **sizes: Any) -> str:
    return ""


@dataclass(frozen=True)
class Backend:
    """A kernel of another package or of ours: where to import it from, and which calls it can serve.

    `limits(device, **sizes)` says which limit of the kernel a call with these sizes would break; "" means none.
    """

    package: str
    function: str
    dtypes: tuple[torch.dtype, ...]
    limits: Callable[..., str] = _no_limits
    device: str = "cuda"

    def refuses(self, device: torch.device, dtype: torch.dtype, **sizes: Any) -> str:
        """Why this backend cannot serve such a call, in one sentence; "" if it can."""
        if device.type != self.device:
            return f"{self.package} needs a {self.device.upper()} device, not {device.type.upper()}"
        if dtype not in self.dtypes:
            return f"{self.package} takes {' or '.join(map(_name, self.dtypes))}, not {_name(dtype)}"
        limit = self.limits(device, **sizes)
        return f"{self.package} {limit}" if limit else self._import()[1]

    def serves(self, tensor: Tensor, **sizes: Any) -> bool:
        """Whether this backend can serve a call with tensors like this one. Each reason to refuse is logged once."""
        return first_that_serves((self,), tensor, **sizes) is not None

    def __call__(self, *args: Any, **options: Any) -> Any:
        return self._import()[0](*args, **options)

    def _import(self) -> tuple[Any, str]:
        """The function and "", or None and why it cannot be imported."""
        function, reason = _import(self.function)
        return function, reason and f"{self.package} {reason}"


def first_that_serves(backends: Sequence[Backend], tensor: Tensor, **sizes: Any) -> Backend | None:
    """The first of these backends that can serve a call with tensors like this one; None if torch has to compute it.

    On a GPU each reason to refuse is logged once: as a warning if torch computes instead, otherwise as information.
    """
    on_gpu = tensor.device.type == "cuda"
    if on_gpu and not tensor.numel():
        return None  # a GPU kernel cannot launch zero threads; torch handles empty tensors
    serving, reasons = None, []
    for backend in backends:
        reason = backend.refuses(tensor.device, tensor.dtype, **sizes)
        if not reason:
            serving = backend
            break
        if on_gpu and backend.device == "cuda":
            reasons.append(reason)
    instead = "torch" if serving is None else serving.package
    for said in (f"{reason}; {instead} computes instead" for reason in reasons):
        if said not in _said:
            _said.add(said)
            _logger.log(logging.WARNING if serving is None else logging.INFO, said)
    return serving


@cache
def _import(path: str) -> tuple[Any, str]:
    module, _, name = path.rpartition(".")
    top = module.partition(".")[0]
    needed = "triton" if top == __name__.partition(".")[0] else top  # a kernel of our own is there if Triton is
    try:
        return getattr(import_module(module), name), ""
    except Exception as error:  # without a driver these packages fail to import in many ways
        if isinstance(error, ModuleNotFoundError) and error.name == needed:
            return None, "is not installed"
        said = (str(error).splitlines() or [""])[0]
        return None, f"cannot be imported ({type(error).__name__}: {said})"


def only_deterministic() -> bool:
    """Whether only kernels that give the same bits each time may serve: torch would raise an error at any other."""
    return torch.get_deterministic_debug_mode() == 2


def at_least_float32(first: Tensor, *others: Tensor | None) -> list[Tensor | None]:
    """The tensors in the precision of the first, but in float32 if that is half precision: what kernels compute in."""
    wide = torch.promote_types(first.dtype, torch.float32)
    return [None if tensor is None else tensor.to(wide) for tensor in (first, *others)]


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# -- limits -------------------------------------------------------------------------------------------


def _flash_attn_limits(device: torch.device, d_head: int = 1, bias: bool = False) -> str:
    """flash-attn's README: heads up to 256, Ampere GPUs or newer. It pads heads to a multiple of 8 by itself."""
    if bias:
        return "takes no bias"
    if d_head > 256:
        return f"takes a d_head of at most 256, not {d_head}"
    major, minor = torch.cuda.get_device_capability(device)
    return "" if major >= 8 else f"needs a GPU of compute capability 8.0 or more, not {major}.{minor}"


def _mamba_ssm_limits(device: torch.device, state: int = 1, initial: bool = False) -> str:
    """selective_scan.cpp checks the size of the state; selective_scan_fn starts from the state 0.

    Its backward pass adds up gradients with atomics, in an order that differs from call to call.
    """
    if only_deterministic():
        return "adds gradients in no fixed order, and only deterministic kernels are asked for"
    if initial:
        return "takes no initial state"
    return "" if state <= 256 else f"takes a state of at most 256, not {state}"


def _simple_gla_limits(device: torch.device, d_head: int = 2, state: int = 2) -> str:
    """The backward pass (chunk_bwd_dv) asserts even sizes in half precision."""
    if d_head % 2 or state % 2:
        return f"takes an even d_head and an even state, not {d_head} and {state}"
    return _gated_limits(device)


def _delta_limits(device: torch.device, d_key: int = 1) -> str:
    """chunk_gated_delta_rule_fwd_h, which serves both delta rules, asserts the size of keys."""
    return "" if d_key <= 256 else f"takes a d_key of at most 256, not {d_key}"


def _gated_delta_limits(device: torch.device, d_key: int = 1) -> str:
    return _delta_limits(device, d_key) or _gated_limits(device)


def _gated_limits(device: torch.device) -> str:
    """fla's gated backward pass (chunk_bwd_dqkwg) raises on Hopper under the versions of Triton that get it wrong."""
    if torch.version.hip is not None or torch.cuda.get_device_capability(device)[0] != 9:
        return ""
    try:
        version = metadata.version("triton")
    except metadata.PackageNotFoundError:
        return "needs Triton"
    wrong = (3, 4, 0) <= tuple(int(part) for part in version.split("+")[0].split(".")[:3]) < (3, 7, 1)
    return f"gives wrong gradients on Hopper GPUs under Triton 3.4.0 to 3.7.0, and this is {version}" if wrong else ""


def _triton_limits(device: torch.device, state: int = 1, initial: bool = False) -> str:
    """Our kernels keep a whole state in the registers of one warp. Triton compiles for capability 7.5 and up."""
    if state > 256:
        return f"takes a state of at most 256, not {state}"
    if torch.version.hip is not None:
        return ""
    major, minor = torch.cuda.get_device_capability(device)
    return "" if (major, minor) >= (7, 5) else f"needs a GPU of compute capability 7.5 or more, not {major}.{minor}"


# -- which backend serves which kernel ----------------------------------------------------------------

# fla refuses float32 or multiplies it in tf32, so that Φ·v no longer equals the fused output to 1e-5. Who asks for half
# precision accepts such rounding.
FLASH_ATTN = Backend("flash-attn", "flash_attn.flash_attn_func", HALF, _flash_attn_limits)
MAMBA_SSM = Backend(
    "mamba-ssm",
    "mamba_ssm.ops.selective_scan_interface.selective_scan_fn",
    (torch.float32, *HALF),
    _mamba_ssm_limits,
)
FLA_SSD = Backend("flash-linear-attention", "fla.ops.simple_gla.chunk_simple_gla", HALF, _simple_gla_limits)
FLA_DELTA = Backend("flash-linear-attention", "fla.ops.delta_rule.chunk_delta_rule", HALF, _delta_limits)
FLA_GATED_DELTA = Backend(
    "flash-linear-attention", "fla.ops.gated_delta_rule.chunk_gated_delta_rule", HALF, _gated_delta_limits
)
NUMBA = Backend("numba", "numba.njit", (torch.float32, *HALF), device="cpu")


def _in_triton(function: str, *dtypes: torch.dtype) -> Backend:
    """A kernel of our own; who calls it brings half precision to float32."""
    real = (torch.float32, torch.float64, *HALF)
    return Backend("triton", f"circuitscope.kernels.triton.{function}", (*real, *dtypes), _triton_limits)


TRITON_SCAN = _in_triton("selective_scan.scan")
TRITON_PHI = _in_triton("selective_scan_phi.phi")
TRITON_PHI_MEAN = _in_triton("selective_scan_phi.phi_mean")
TRITON_PHI_ON_EDGES = _in_triton("selective_scan_phi.phi_on_edges")
TRITON_COMPOSED_ON_EDGES = _in_triton("scan_edges.composed_on_edges")
TRITON_PHI_PROFILE = _in_triton("selective_scan_phi.phi_profile")
TRITON_WKV = _in_triton("wkv.wkv")
TRITON_LINEAR_STATES = _in_triton("scans.linear_scan", torch.complex64, torch.complex128)
TRITON_DELTA_STATES = _in_triton("scans.delta_scan")

KERNELS: dict[str, tuple[Backend, ...]] = {
    "attention": (FLASH_ATTN,),
    "selective scan": (NUMBA, MAMBA_SSM, TRITON_SCAN),
    "matrix of the selective scan": (NUMBA, TRITON_PHI),
    "SSD": (FLA_SSD,),
    "delta rule": (FLA_DELTA,),
    "gated delta rule": (FLA_GATED_DELTA,),
    "WKV": (NUMBA, TRITON_WKV),
    "short and long convolution": (NUMBA,),
    "states that are read or edited": (TRITON_LINEAR_STATES,),
}


def who_serves(kernel: str, device: torch.device, dtype: torch.dtype) -> tuple[str, list[str]]:
    """The package that computes this kernel for sizes within its limits, and why each of the others does not."""
    refusals = {backend.package: backend.refuses(device, dtype) for backend in KERNELS[kernel]}
    serving = [package for package, reason in refusals.items() if not reason]
    return serving[0] if serving else "torch", [reason for reason in refusals.values() if reason]
