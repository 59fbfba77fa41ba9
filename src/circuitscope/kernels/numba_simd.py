"""Vectors of float32 inside Numba kernels, their exp2, and how kernels are compiled and launched.

LLVM's loop vectorizer gives up on a recurrence as soon as it cannot prove that two arrays do not
overlap, and a scalar exp costs six times a vector one. So kernels here say what they mean: `load`
eight neighbouring floats, use + and * on them (a product followed by a sum becomes one fused
multiply-add where the machine has it), `store` them. LLVM splits or joins the eight lanes as the
machine's registers ask; nothing here is specific to one processor.

No index is checked: a kernel pads its last axis to a multiple of LANES first.
"""

import inspect
import logging
import operator
import os
import threading
from collections.abc import Callable
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from types import FunctionType
from typing import Any

import llvmlite.ir as ir  # type: ignore[import-untyped]
import numba
import torch
import torch.nn.functional as F
from numba.core import cgutils, types
from numba.core.typing.templates import ConcreteTemplate, infer_global, signature
from numba.extending import intrinsic, lower_builtin, models, register_model
from torch import Tensor

from circuitscope.kernels import forks
from circuitscope.kernels.opaque import opaque

LANES = 8
LOG2_E = 1.4426950408889634  # e^x = 2^(x · LOG2_E)
LN_2 = 0.6931471805599453

# Numba claims to be typed, but most of it is not.
_numba: Any = numba
_settings: Any = numba.config
_get_item_pointer: Any = cgutils.get_item_pointer
_unpack_tuple: Any = cgutils.unpack_tuple
_lower: Any = lower_builtin
_signature: Any = signature

# The one liberty of fast math that kernels take: a product and a sum may fuse. Numba puts its flags on every
# instruction of a function: "reassoc" would cancel the rounding in exp2, and with "nnan" a NaN may
# come out finite (the trainer knows a diverged run by its loss). Vectors do not need either.
FASTMATH = {"contract"}


# -- compiling and launching ------------------------------------------------------------------------


def task(function: Callable[..., Any]) -> Any:
    """Compile the work of one thread or a part of it: kernels call it inside their `numba.prange`.

    It is always inlined. Otherwise the process that compiles calls this function's own machine code while later ones
    call the copy in the kernel's cache, and the two may fuse products and sums differently.
    """
    return numba.njit(fastmath=FASTMATH, forceinline=True)(_as_written(function))


def serial(function: Callable[..., None]) -> Callable[..., None]:
    """Compile a function of finite numbers for one thread and keep the machine code on disk."""
    function = _as_written(function)
    try:
        compiled: Callable[..., None] = numba.njit(cache=True, fastmath=True)(function)
    except RuntimeError:  # no writable place for a cache
        compiled = numba.njit(fastmath=True)(function)
    return compiled


def kernel(function: Callable[..., None]) -> Callable[..., None]:
    """Compile a function with a `numba.prange` over tasks and keep the machine code on disk.

    Each call uses as many threads as torch does, or NUMBA_NUM_THREADS if that is fewer; one, in a process that was
    forked from one with threads (circuitscope.kernels.forks). Python's lock is released meanwhile, so other Python
    threads run, and may launch kernels of their own.
    """
    function = _as_written(function)
    compiled = _compiled(function, parallel=True)

    @cache
    def on_one_thread() -> Any:
        return _compiled(_renamed(function, "_on_one_thread"), parallel=False)

    @opaque
    def launch(*args: Any) -> None:
        if forks.threads_left_behind():
            alone = on_one_thread()
            if not alone.signatures:
                _say_once_if_compiling(alone)
            alone(*args)
            return
        forks.computing()
        _prefer_openmp()
        if not compiled.signatures:
            _say_once_if_compiling(compiled)
        threads = torch.get_num_threads()
        numba.set_num_threads(max(1, min(threads, _settings.NUMBA_NUM_THREADS)))  # type: ignore[no-untyped-call]
        with nullcontext() if _several_may_launch() else _one_launches:
            compiled(*args)
        if torch.get_num_threads() != threads:  # Numba's first launch sets OpenMP's count, which is also torch's
            torch.set_num_threads(threads)

    return launch


def _compiled(function: Any, parallel: bool) -> Any:
    try:
        return numba.njit(parallel=parallel, nogil=True, cache=True, fastmath=FASTMATH)(function)
    except RuntimeError:  # no writable place for a cache
        return numba.njit(parallel=parallel, nogil=True, fastmath=FASTMATH)(function)


def _renamed(function: Any, ending: str) -> Any:
    """The same function under another name: Numba's cache knows a function by its name, not by how it is compiled."""
    copy = FunctionType(
        function.__code__, function.__globals__, function.__name__ + ending, function.__defaults__, function.__closure__
    )
    copy.__module__, copy.__qualname__ = function.__module__, function.__qualname__ + ending
    return copy


def _as_written(function: Callable[..., Any]) -> Any:
    """The function without the wrapper that a run-time type checker put around it, which Numba cannot compile."""
    return inspect.unwrap(function)


def _prefer_openmp() -> None:
    """Two threads must not enter Numba's workqueue layer at once; they may enter OpenMP and TBB.

    A layer that the user names (NUMBA_THREADING_LAYER, NUMBA_THREADING_LAYER_PRIORITY) stays.
    """
    chosen = "NUMBA_THREADING_LAYER" in os.environ or "NUMBA_THREADING_LAYER_PRIORITY" in os.environ
    if not chosen and _settings.THREADING_LAYER_PRIORITY == ["tbb", "omp", "workqueue"]:
        _settings.THREADING_LAYER_PRIORITY = ["omp", "tbb", "workqueue"]


_one_launches = threading.Lock()


def _several_may_launch() -> bool:
    """Whether Numba's threading layer, which is chosen at the first launch, lets several threads launch at once."""
    try:
        return bool(_numba.threading_layer() != "workqueue")
    except ValueError:  # nothing was launched yet
        return False


_said_compiling = False


def _say_once_if_compiling(compiled: Any) -> None:
    global _said_compiling
    _remove_stale_code(compiled)
    if _machine_code(compiled) or _said_compiling:
        return
    _said_compiling = True
    logging.getLogger("circuitscope").warning("compiling kernels, once; later runs find them in the cache")


def _machine_code(compiled: Any) -> list[Path]:
    """Numba's index files of this function on disk; none where it keeps no cache."""
    folder = compiled.stats.cache_path
    return list(Path(folder).glob(f"*.{compiled.py_func.__name__}-*.nbi")) if folder else []


def _remove_stale_code(compiled: Any) -> None:
    """Remove machine code that is older than this file or the kernel's own.

    Numba compares its cache with the kernel's own file only; a kernel also contains what it calls here.
    """
    sources = [Path(__file__), Path(compiled.py_func.__code__.co_filename)]
    try:
        newest = max(file.stat().st_mtime for file in sources)
        for file in _machine_code(compiled):
            if file.stat().st_mtime < newest:
                file.unlink(missing_ok=True)
    except OSError:  # a cache that cannot be changed or is changed by another process: Numba copes
        pass


def pad_last(tensor: Tensor, multiple: int = LANES) -> Tensor:
    """A contiguous, detached tensor whose last axis is padded with zeros to a multiple: what a kernel may load from."""
    missing = -tensor.shape[-1] % multiple
    tensor = tensor.detach()
    return F.pad(tensor, (0, missing)) if missing else tensor.contiguous()


# -- vectors ----------------------------------------------------------------------------------------


class Float32Vector(types.Type):  # type: ignore[misc]
    """LANES float32 numbers in registers."""

    def __init__(self) -> None:
        super().__init__(name=f"float32x{LANES}")  # type: ignore[no-untyped-call]


vector = Float32Vector()
_LLVM_VECTOR = ir.VectorType(ir.FloatType(), LANES)
_LLVM_INTS = ir.VectorType(ir.IntType(32), LANES)


@register_model(Float32Vector)  # type: ignore[no-untyped-call]
class _Float32VectorModel(models.PrimitiveModel):  # type: ignore[misc]
    def __init__(self, dmm: Any, fe_type: Any) -> None:
        super().__init__(dmm, fe_type, _LLVM_VECTOR)  # type: ignore[no-untyped-call]


def _splat(builder: Any, scalar: Any) -> Any:
    first = builder.insert_element(ir.Constant(_LLVM_VECTOR, ir.Undefined), scalar, ir.Constant(ir.IntType(32), 0))
    return builder.shuffle_vector(first, first, ir.Constant(_LLVM_INTS, [0] * LANES))


def _constant(value: float) -> Any:
    return ir.Constant(_LLVM_VECTOR, [ir.Constant(ir.FloatType(), value)] * LANES)


def _define(function: Any, instruction: str) -> None:
    """`function` (operator.add, ...) on two vectors, or a vector and a float32."""

    @infer_global(function)  # type: ignore[no-untyped-call]
    class _Template(ConcreteTemplate):  # type: ignore[misc]
        cases = [  # noqa: RUF012
            _signature(vector, vector, vector),
            _signature(vector, vector, types.float32),
            _signature(vector, types.float32, vector),
        ]

    def lower(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        a, b = (
            value if isinstance(kind, Float32Vector) else _splat(builder, value)
            for kind, value in zip(sig.args, args, strict=True)
        )
        return getattr(builder, instruction)(a, b, flags=("contract",))

    for case in _Template.cases:
        _lower(function, *case.args)(lower)


_define(operator.add, "fadd")
_define(operator.sub, "fsub")
_define(operator.mul, "fmul")


def _pointer(context: Any, builder: Any, array_type: Any, array: Any, index_type: Any, index: Any) -> Any:
    """The address of array[i, j, ...], without Numba's test for negative indices."""
    view = context.make_array(array_type)(context, builder, array)
    indices = [
        context.cast(builder, i, kind, types.intp)
        for i, kind in zip(_unpack_tuple(builder, index), index_type, strict=True)
    ]
    return _get_item_pointer(context, builder, array_type, view, indices, wraparound=False)


def instructions(function: Any) -> Any:
    """A function for use in kernels, given by the LLVM instructions that it emits. Type checkers see Any."""
    return intrinsic(_as_written(function))


@instructions
def load(typing_context, array, index):  # type: ignore[no-untyped-def]
    """load(array, (i, j, ...)): the LANES floats from array[i, j, ...] on."""

    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        at = _pointer(context, builder, sig.args[0], args[0], sig.args[1], args[1])
        return builder.load(builder.bitcast(at, _LLVM_VECTOR.as_pointer()), align=4)

    return vector(array, index), emit


@instructions
def broadcast(typing_context, array, index):  # type: ignore[no-untyped-def]
    """broadcast(array, (i, j, ...)): the one float array[i, j, ...] in every lane."""

    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        at = _pointer(context, builder, sig.args[0], args[0], sig.args[1], args[1])
        return _splat(builder, builder.load(at))

    return vector(array, index), emit


@instructions
def store(typing_context, array, index, value):  # type: ignore[no-untyped-def]
    """store(array, (i, j, ...), vector)."""

    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        at = _pointer(context, builder, sig.args[0], args[0], sig.args[1], args[1])
        builder.store(args[2], builder.bitcast(at, _LLVM_VECTOR.as_pointer()), align=4)
        return context.get_dummy_value()

    return types.void(array, index, value), emit


@instructions
def splat(typing_context, scalar):  # type: ignore[no-untyped-def]
    """The same float32 in every lane."""

    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return _splat(builder, context.cast(builder, args[0], sig.args[0], types.float32))

    return vector(scalar), emit


@instructions
def lane_sum(typing_context, value):  # type: ignore[no-untyped-def]
    """The sum of the lanes, in a fixed order."""

    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        total, width = args[0], LANES
        while width > 1:
            width //= 2
            halves = [
                builder.shuffle_vector(
                    total, total, ir.Constant(ir.VectorType(ir.IntType(32), width), list(range(at, at + width)))
                )
                for at in (0, width)
            ]
            total = builder.fadd(*halves)
        return builder.extract_element(total, ir.Constant(ir.IntType(32), 0))

    return types.float32(value), emit


@instructions
def magnitude(typing_context, value):  # type: ignore[no-untyped-def]
    """|value|, lane by lane."""

    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        bits = builder.bitcast(args[0], _LLVM_INTS)
        mask = ir.Constant(_LLVM_INTS, [0x7FFFFFFF] * LANES)
        return builder.bitcast(builder.and_(bits, mask), _LLVM_VECTOR)

    return vector(value), emit


# 2^f on |f| ≤ ½: minimax in relative error with constant term 1, so that exp2(0) is exactly 1.
_POLYNOMIAL = (1.0, 0.6931469775983289, 0.2402224208402667, 0.055507337438817084, 0.009671512727712661,
               0.0013264727270274057)  # fmt: skip
# A float32 this large has no fraction bits left: adding it rounds to an integer, and that integer
# plus the exponent's bias stands in the lowest bits of the sum.
_ROUND = 1.5 * 2**23 + 127


@instructions
def exp2(typing_context, value):  # type: ignore[no-untyped-def]
    """2^z, lane by lane, to 2 units in the last place.

    z = k + f with k an integer and |f| ≤ ½; 2^f by a polynomial of degree 5; 2^k by writing k into
    the exponent bits. Below −126.5 the result is 0 (k = −127 is the exponent field 0), from 127.5 on
    it is ∞ (k = 128 is the field 255). NaN stays NaN.
    """

    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        z = args[0]
        # "low > z ? low : z" keeps a NaN, the other order would lose it
        z = builder.select(builder.fcmp_ordered(">", _constant(-127.0), z), _constant(-127.0), z)
        z = builder.select(builder.fcmp_ordered("<", _constant(128.0), z), _constant(128.0), z)
        shifted = builder.fadd(z, _constant(_ROUND))
        f = builder.fsub(z, builder.fsub(shifted, _constant(_ROUND)))
        power = _constant(_POLYNOMIAL[-1])
        for coefficient in reversed(_POLYNOMIAL[:-1]):
            product = builder.fmul(power, f, flags=("contract",))
            power = builder.fadd(product, _constant(coefficient), flags=("contract",))
        bits = builder.shl(builder.bitcast(shifted, _LLVM_INTS), ir.Constant(_LLVM_INTS, [23] * LANES))
        return builder.fmul(power, builder.bitcast(bits, _LLVM_VECTOR), flags=("contract",))

    return vector(value), emit
