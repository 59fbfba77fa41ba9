"""A second device without hardware, whose tensors have values: for tests of where things are computed.

A tensor on the device `second` holds a tensor of the CPU, computes with it, and refuses to meet a tensor that is on
the CPU, as a GPU does. Values come back to the CPU by a copy or one by one, and both are counted: on a GPU each of them
waits until the GPU is done. The device may refuse float64, as Apple's does. It shows where things are computed and how
often a step waits; it says nothing about the kernels or the speed of a real device.

    with second_device() as crossed:
        model = HookedLM(config).to("second")
        loss = task.loss(model, batch)[0].backward()
    crossed.to_cpu, crossed.waits
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils import backend_registration
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

aten = torch.ops.aten
WIDE = (torch.float64, torch.complex128)
# What a GPU cannot answer before all that was asked of it is done: the size of the result depends on values.
WAITS = {aten.nonzero, aten.masked_select, aten.equal, aten._unique2, aten.unique_dim, aten.repeat_interleave}
COPIES = {aten._to_copy, aten.copy_}


class _Module(backend_registration._DummyBackendModule):
    """What torch.autocast asks of a backend."""

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]


backend_registration._setup_privateuseone_for_python_backend("second", backend_module=_Module())
DEVICE = torch.device("second", 0)


@dataclass
class Crossed:
    """How often values went from the second device to the CPU since the last `reset`."""

    float64: bool = True
    to_cpu: int = 0  # copies of whole tensors
    waits: Counter[str] = field(default_factory=Counter)  # single numbers, and what depends on values

    @property
    def total(self) -> int:
        return self.to_cpu + sum(self.waits.values())

    def reset(self) -> None:
        self.to_cpu, self.waits = 0, Counter()


_crossed = Crossed()


class OnSecond(torch.Tensor):
    """A tensor on the second device; `held` has its values."""

    held: torch.Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, held: torch.Tensor) -> "OnSecond":
        if held.dtype in WIDE and not _crossed.float64:
            raise TypeError(f"the second device has no {held.dtype}")
        held = held.resolve_conj().resolve_neg()  # a mark that only the inner tensor has would get lost
        out = torch.Tensor._make_wrapper_subclass(
            cls,
            held.shape,
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=held.dtype,
            device=DEVICE,
        )
        out.held = held
        return out

    def __repr__(self) -> str:
        return f"OnSecond({self.held!r})"

    def tolist(self) -> Any:
        return self.cpu().tolist()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _compute(func, args, kwargs or {})


class _Mode(TorchDispatchMode):
    """Catches the calls that make tensors on the second device: torch.zeros(…, device="second"), x.to("second")."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        there = any(isinstance(x, OnSecond) for x in tree_flatten((args, kwargs))[0])
        asked = kwargs.get("device")
        if there or (asked is not None and torch.device(asked).type == "second"):
            return _compute(func, args, kwargs)
        return func(*args, **kwargs)


def _compute(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    packet, asked = func.overloadpacket, kwargs.get("device")
    leaves, shape = tree_flatten((args, kwargs))
    if packet not in COPIES:
        for leaf in leaves:
            if isinstance(leaf, torch.Tensor) and not isinstance(leaf, OnSecond) and leaf.ndim:
                raise RuntimeError(f"{func}: expected all tensors on the second device, found one on the {leaf.device}")
    if kwargs.get("dtype") in WIDE and asked is not None and torch.device(asked).type == "cpu":
        pass  # it is copied first and widened there
    elif kwargs.get("dtype") in WIDE and not _crossed.float64:
        raise TypeError(f"{func}: the second device has no {kwargs['dtype']}")
    held_args, held_kwargs = tree_unflatten([x.held if isinstance(x, OnSecond) else x for x in leaves], shape)
    if asked is not None:
        held_kwargs["device"] = torch.device("cpu")
    if packet in WAITS:
        _crossed.waits[str(packet)] += 1
    if packet is aten._local_scalar_dense:
        _crossed.waits["item"] += 1
        return func(*held_args, **held_kwargs)
    if packet is aten.index and any(x is not None and x.dtype == torch.bool for x in args[1]):
        _crossed.waits["index by a mask"] += 1
    out = OWN.get(packet, func)(*held_args, **held_kwargs)
    if packet is aten._to_copy and asked is not None and torch.device(asked).type == "cpu":
        _crossed.to_cpu += 1
        return out.clone() if out is held_args[0] else out
    if packet is aten.copy_ and not isinstance(args[0], OnSecond):
        _crossed.to_cpu += 1
        return args[0]
    out = tree_map(lambda x: OnSecond(x) if isinstance(x, torch.Tensor) else x, out)
    return return_and_correct_aliasing(func, args, kwargs, out)


# -- kernels that a CPU does not have ------------------------------------------------------------------


def _lstm_cell(
    by_input: torch.Tensor,
    by_state: torch.Tensor,
    cx: torch.Tensor,
    input_bias: torch.Tensor | None = None,
    state_bias: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """One step of an LSTM, which torch fuses on every device but the CPU: h, c and the four gates."""
    total = by_input + by_state
    for bias in (input_bias, state_bias):
        total = total if bias is None else total + bias
    i, f, g, o = total.chunk(4, 1)
    i, f, g, o = i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()
    cy = f * cx + i * g
    return o * cy.tanh(), cy, torch.cat([i, f, g, o], 1)


def _lstm_cell_backward(
    grad_hy: torch.Tensor | None,
    grad_cy: torch.Tensor | None,
    cx: torch.Tensor,
    cy: torch.Tensor,
    gates: torch.Tensor,
    has_bias: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Gradients of what the gates add up, of the state c before the step, and of the bias."""
    i, f, g, o = gates.chunk(4, 1)
    bent = cy.tanh()
    zero = torch.zeros_like(cy)
    grad_hy, grad_cy = (zero if grad is None else grad for grad in (grad_hy, grad_cy))
    d_c = grad_cy + grad_hy * o * (1 - bent.square())
    of_gates = [
        d_c * g * i * (1 - i),
        d_c * cx * f * (1 - f),
        d_c * i * (1 - g.square()),
        grad_hy * bent * o * (1 - o),
    ]
    d_gates = torch.cat(of_gates, 1)
    return d_gates, d_c * f, d_gates.sum(0) if has_bias else None


OWN = {aten._thnn_fused_lstm_cell: _lstm_cell, aten._thnn_fused_lstm_cell_backward_impl: _lstm_cell_backward}


# -- copies that the mode does not see ------------------------------------------------------------------


def _copy_from(source: torch.Tensor, target: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    values = source.held if isinstance(source, OnSecond) else source
    if isinstance(target, OnSecond):
        target.held.copy_(values)
    else:
        _crossed.to_cpu += 1
        target.copy_(values)
    return target


# An assignment x[where] = 0 makes its 0 on the device and copies it there without asking the mode, and a mode holds in
# the thread that began it alone.
_made = torch.library.Library("aten", "IMPL")
_made.impl(
    "empty_strided",
    lambda size, stride, dtype=None, **_: OnSecond(torch.empty_strided(size, stride, dtype=dtype)),
    "PrivateUse1",
)
_made.impl("_copy_from", _copy_from, "PrivateUse1")


@contextmanager
def second_device(*, float64: bool = True) -> Iterator[Crossed]:
    """Inside, `second` is a device; what comes out counts the crossings to the CPU.

    Args:
        float64: whether the device has float64.
    """
    _crossed.reset()
    _crossed.float64 = float64
    try:
        with _Mode():
            yield _crossed
    finally:
        _crossed.float64 = True
