"""The selective scan and its Φ: kernels against the references, gradients, extremes, odd shapes, threads."""

import logging
import os
import subprocess
import sys
from inspect import unwrap

import numba
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from circuitscope.kernels import numba_simd
from circuitscope.kernels.selective_scan import (
    selective_scan,
    selective_scan_phi,
    selective_scan_phi_profile,
    selective_scan_phi_reference,
    selective_scan_reference,
    selective_scan_with_state_edit,
)

# batch, pos, channel, state: multiples of the lanes, of nothing, and all ones
SHAPES = [
    (2, 32, 16, 4),
    (1, 1, 1, 1),
    (2, 3, 17, 3),
    (1, 17, 65, 1),
    (3, 129, 3, 17),
    (1, 65, 129, 5),
    (9, 16, 64, 16),
]


def inputs(batch: int, length: int, channels: int, states: int, seed: int = 0) -> list[Tensor]:
    """x, dt, A, B, C, D, initial, as a Mamba layer would make them."""
    draw = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw)

    A = -torch.arange(1, states + 1) * torch.exp(0.1 * normal(channels, states))
    return [
        normal(batch, length, channels),
        F.softplus(normal(batch, length, channels) - 2),
        A,
        normal(batch, length, states),
        normal(batch, length, states),
        normal(channels),
        normal(batch, channels, states),
    ]


def phi_inputs(*shape: int, seed: int = 0) -> list[Tensor]:
    return inputs(*shape, seed=seed)[1:6]


def states(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, initial: Tensor | None = None) -> Tensor:
    """Every h_t, as an edit is shown them."""
    shown: list[Tensor] = []
    selective_scan_with_state_edit(x, dt, A, B, B, None, lambda h: shown.append(h) or h, initial)
    return shown[0]


def with_gradients(function, args, weight=None, dtype=None):
    """The function's value, and the gradients of a fixed random weighting of it."""
    args = [a.detach().to(dtype or a.dtype).requires_grad_() for a in args]
    out = function(*args)
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(7)) if weight is None else weight
    return out.detach(), torch.autograd.grad((out * weight.to(out.dtype)).sum(), args, materialize_grads=True)


def relative(got: Tensor, expected: Tensor) -> float:
    if not expected.numel():
        return 0.0
    return ((got.double() - expected.double()).abs().max() / expected.double().abs().max().clamp_min(1e-30)).item()


# -- the scan against its reference -------------------------------------------------------------------


@pytest.mark.parametrize("shape", SHAPES)
def test_kernel_agrees_with_float64_reference_in_value_and_every_gradient(shape):
    """1e-6 of the largest value; gradients, which sum over batch and time, 2e-6."""
    y, grads = with_gradients(selective_scan, inputs(*shape))
    expected, expected_grads = with_gradients(selective_scan_reference, inputs(*shape), dtype=torch.float64)
    assert y.dtype == torch.float32
    assert relative(y, expected) < 1e-6
    for name, got, want in zip(("x", "dt", "A", "B", "C", "D", "initial"), grads, expected_grads, strict=True):
        assert got.shape == want.shape
        assert relative(got, want) < 2e-6, name


def test_without_skip_and_without_initial_state():
    x, dt, A, B, C, *_ = inputs(2, 19, 5, 3)
    y, grads = with_gradients(selective_scan, [x, dt, A, B, C])
    expected, expected_grads = with_gradients(selective_scan_reference, [x, dt, A, B, C], dtype=torch.float64)
    assert relative(y, expected) < 1e-6
    assert all(relative(got, want) < 2e-6 for got, want in zip(grads, expected_grads, strict=True))


def test_reference_passes_gradcheck_in_float64():
    args = [a.double().requires_grad_() for a in inputs(2, 5, 3, 2)]
    assert torch.autograd.gradcheck(selective_scan_reference, args)
    assert torch.autograd.gradcheck(selective_scan, args)  # float64 takes the reference path


def test_initial_state_continues_a_sequence_cut_in_two():
    x, dt, A, B, C, D, _ = inputs(2, 40, 7, 3)
    whole = selective_scan(x, dt, A, B, C, D)
    carried = states(x[:, :23], dt[:, :23], A, B[:, :23])[:, -1]
    rest = selective_scan(x[:, 23:], dt[:, 23:], A, B[:, 23:], C[:, 23:], D, carried)
    assert relative(rest, whole[:, 23:]) < 1e-6


def test_non_contiguous_inputs_give_the_same_bits():
    args = inputs(3, 33, 20, 5)
    views = [a.mT.contiguous().mT if a.ndim > 1 else torch.stack([a, a], 1)[:, 0] for a in args]
    assert not any(view.is_contiguous() for view in views)
    y, grads = with_gradients(selective_scan, args)
    y_views, grads_views = with_gradients(selective_scan, views)
    assert torch.equal(y, y_views)
    assert all(torch.equal(a, b) for a, b in zip(grads, grads_views, strict=True))
    weight = torch.randn(3, 20, 33).mT  # a gradient that arrives transposed
    a, b = (with_gradients(selective_scan, args, w)[1] for w in (weight, weight.contiguous()))
    assert all(torch.equal(p, q) for p, q in zip(a, b, strict=True))


def test_expanded_inputs_are_taken():
    x, dt, A, B, C, D, _ = inputs(1, 9, 8, 3)
    args = [a.expand(4, -1, -1) if a.ndim == 3 else a for a in (x, dt, A, B, C, D)]
    assert torch.equal(selective_scan(*args)[2], selective_scan(x, dt, A, B, C, D)[0])


@pytest.mark.parametrize("shape", [(0, 4, 3, 2), (2, 0, 3, 2), (2, 4, 0, 2), (2, 4, 3, 0)])
def test_empty_axes_give_empty_or_skip_only_outputs(shape):
    y, grads = with_gradients(selective_scan, inputs(*shape))
    expected, _ = with_gradients(selective_scan_reference, inputs(*shape))
    assert y.shape == expected.shape
    assert torch.allclose(y, expected)
    assert [g.shape for g in grads] == [a.shape for a in inputs(*shape)]
    assert selective_scan_phi(*phi_inputs(*shape)).shape == (shape[0], shape[2], shape[1], shape[1])


def test_without_gradients_it_is_the_same():
    args = [a.requires_grad_() for a in inputs(2, 30, 9, 4)]
    y, phi = selective_scan(*args), selective_scan_phi(*args[1:6])
    with torch.no_grad():
        assert torch.equal(selective_scan(*args), y)
        assert torch.equal(selective_scan_phi(*args[1:6]), phi)
    plain = selective_scan(*(a.detach() for a in args))
    assert torch.equal(plain, y)
    assert not plain.requires_grad


def test_half_precision_is_computed_in_float32():
    args = [a.bfloat16() for a in inputs(2, 30, 9, 4)]
    y = selective_scan(*args)
    assert y.dtype == torch.bfloat16
    assert torch.equal(y, selective_scan(*(a.float() for a in args)).bfloat16())


def test_wrong_shapes_are_refused_before_any_memory_is_read():
    x, dt, A, B, C, D, initial = inputs(2, 8, 4, 3)
    # Without the wrapper of the shape checker, which tests can turn on and which would speak first.
    scan, phi = unwrap(selective_scan), unwrap(selective_scan_phi)
    with pytest.raises(ValueError, match="B is"):
        scan(x, dt, A, B[:1], C, D)
    with pytest.raises(ValueError, match="x is"):
        scan(x[:, :7], dt, A, B, C, D)
    with pytest.raises(ValueError, match="initial is"):
        scan(x, dt, A, B, C, D, initial.mT)
    with pytest.raises(ValueError, match="D is"):
        phi(dt, A, B, C, D[:-1])


# -- extremes -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("delta", "rate", "length"),
    [(50.0, None, 64), (1e-8, None, 64), (0.1, -1e-6, 64), (0.1, -1000.0, 64), (50.0, -1000.0, 64), (0.01, None, 2048)],
    ids=["large dt", "tiny dt", "A near 0", "large A", "both large", "long"],
)
def test_extremes_are_finite_and_right(delta, rate, length):
    """2e-5 of the largest value: a float32 product Δ·A of size 80 alone moves exp(Δ·A) by 5e-6."""
    x, dt, A, B, C, D, _ = inputs(1, length, 9, 4)
    dt = dt / dt.mean() * delta
    A = A if rate is None else torch.full_like(A, rate)
    y, grads = with_gradients(selective_scan, [x, dt, A, B, C, D])
    expected, expected_grads = with_gradients(selective_scan_reference, [x, dt, A, B, C, D], dtype=torch.float64)
    assert torch.isfinite(y).all()
    assert relative(y, expected) < 2e-5
    for name, got, want in zip(("x", "dt", "A", "B", "C", "D"), grads, expected_grads, strict=True):
        assert torch.isfinite(got).all(), name
        assert relative(got, want) < 2e-5 or want.abs().max() < 1e-30, name


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("which", range(6), ids=["x", "dt", "A", "B", "C", "D"])
def test_a_non_finite_input_comes_out_non_finite(which, bad):
    args = inputs(1, 24, 8, 4)[:6]
    args[which].view(-1)[0] = bad if which != 2 else float("nan")  # A = −∞ is a state that forgets at once
    assert not torch.isfinite(selective_scan(*args)).all()
    if which:
        assert not torch.isfinite(selective_scan_phi(*args[1:])).all()


def test_a_nan_reaches_its_own_channel_and_later_positions_only():
    args = inputs(2, 24, 16, 4)[:6]
    args[0][1, 10, 3] = float("nan")
    y = selective_scan(*args)
    assert torch.isnan(y[1, 10:, 3]).all()
    assert torch.isnan(y).sum() == 14


def test_vector_exp2_is_within_2_1_ulp_and_saturates():
    @numba.njit
    def run(z, out):
        for i in range(0, len(z), numba_simd.LANES):
            numba_simd.store(out, (i,), numba_simd.exp2(numba_simd.load(z, (i,))))

    z = np.concatenate([np.linspace(-126.4, 127.4, 80_000), np.linspace(-1, 1, 80_000)]).astype(np.float32)
    out = np.empty_like(z)
    run(z, out)
    exact = np.exp2(z.astype(np.float64))
    assert (np.abs(out - exact) / np.spacing(exact.astype(np.float32))).max() < 2.1
    edges = np.array([0, -127, -1e30, -np.inf, 128, 1e30, np.inf, np.nan], np.float32)
    out = np.empty_like(edges)
    run(edges, out)
    assert out[:-1].tolist() == [1, 0, 0, 0, np.inf, np.inf, np.inf]
    assert np.isnan(out[-1])


# -- Φ ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", SHAPES)
def test_phi_times_x_is_the_scan(shape):
    """1e-5 of the largest output in float32, 1e-10 in float64."""
    x, dt, A, B, C, D, _ = inputs(*shape)
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.float64, 1e-10)):
        args = [a.to(dtype) for a in (dt, A, B, C, D)]
        phi = selective_scan_phi(*args)
        assert phi.shape == (shape[0], shape[2], shape[1], shape[1])
        assert torch.equal(phi, phi.tril())
        y = selective_scan(x.to(dtype), *args)
        assert relative(torch.einsum("beij,bje->bie", phi, x.to(dtype)), y) < tolerance


@pytest.mark.parametrize("shape", SHAPES)
def test_phi_and_its_gradients_agree_with_torch_in_float64(shape):
    """1e-6 for Φ, 3e-6 for gradients, of the largest entry."""
    phi, grads = with_gradients(selective_scan_phi, phi_inputs(*shape))
    expected, expected_grads = with_gradients(selective_scan_phi_reference, phi_inputs(*shape), dtype=torch.float64)
    assert relative(phi, expected) < 1e-6
    for name, got, want in zip(("dt", "A", "B", "C", "D"), grads, expected_grads, strict=True):
        assert got.shape == want.shape
        # at L 1 no Δ·A enters Φ and A's gradient is exactly 0
        assert relative(got, want) < 3e-6 or got.abs().max() == want.abs().max() == 0, name


def test_phi_reference_passes_gradcheck_in_float64():
    args = [a.double().requires_grad_() for a in phi_inputs(2, 5, 3, 2)]
    assert torch.autograd.gradcheck(selective_scan_phi_reference, args)


@pytest.mark.parametrize(("delta", "rate"), [(50.0, None), (1e-8, None), (0.1, -1e-6), (50.0, -1000.0)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_phi_gradients_are_finite_at_extremes(delta, rate, dtype):
    _, dt, A, B, C, D, _ = inputs(1, 40, 3, 4)
    dt = dt / dt.mean() * delta
    A = A if rate is None else torch.full_like(A, rate)
    phi, grads = with_gradients(selective_scan_phi, [dt, A, B, C, D], dtype=dtype)
    expected, expected_grads = with_gradients(selective_scan_phi_reference, [dt, A, B, C, D], dtype=torch.float64)
    assert relative(phi, expected) < 2e-5
    for got, want in zip(grads, expected_grads, strict=True):
        assert torch.isfinite(got).all()
        assert relative(got, want) < 2e-5 or want.abs().max() < 1e-30


def test_gradients_above_the_diagonal_of_phi_are_ignored_even_when_not_finite():
    args = phi_inputs(1, 21, 3, 2)
    weight = torch.randn(1, 3, 21, 21)
    above = torch.ones(21, 21, dtype=torch.bool).triu(1)
    dirty = [a.clone().requires_grad_() for a in args]
    selective_scan_phi(*dirty).backward(weight.masked_fill(above, float("nan")))
    _, clean = with_gradients(selective_scan_phi, args, weight)
    assert all(torch.equal(a.grad, g) for a, g in zip(dirty, clean, strict=True))


def test_phi_of_a_channel_slice_is_the_slice_of_phi():
    dt, A, B, C, D = phi_inputs(2, 30, 11, 5)
    part = selective_scan_phi(dt[..., 4:9], A[4:9], B, C, D[4:9])
    assert torch.equal(part, selective_scan_phi(dt, A, B, C, D)[:, 4:9])


@pytest.mark.parametrize("shape", SHAPES)
def test_profile_is_the_mean_of_each_diagonal(shape):
    args = phi_inputs(*shape)
    for dtype, tolerance in ((torch.float32, 1e-6), (torch.float64, 1e-12)):
        cast = [a.to(dtype) for a in args]
        phi = selective_scan_phi(*cast).abs()
        expected = torch.stack([phi.diagonal(-lag, -2, -1).mean(-1) for lag in range(shape[1])], -1)
        assert relative(selective_scan_phi_profile(*cast), expected) < tolerance


# -- states -------------------------------------------------------------------------------------------


def test_states_read_out_by_C_are_the_scan():
    x, dt, A, B, C, D, initial = inputs(2, 21, 5, 3)
    h = states(x, dt, A, B, initial)
    assert h.shape == (2, 21, 5, 3)
    assert relative(torch.einsum("blen,bln->ble", h, C) + D * x, selective_scan(x, dt, A, B, C, D, initial)) < 1e-6


def test_an_identity_edit_of_the_states_changes_nothing():
    *args, initial = inputs(2, 21, 5, 3)
    same = selective_scan_with_state_edit(*args, lambda h: h, initial)
    assert relative(same, selective_scan(*args, initial)) < 1e-6


def test_an_edited_state_holds_at_its_position_and_drives_later_ones():
    x, dt, A, B, C, D, _ = (a.double() for a in inputs(2, 12, 5, 3))
    new = torch.randn(2, 5, 3, dtype=torch.float64)

    def replace(h):
        h = h.clone()
        h[:, 4] = new
        return h

    y = selective_scan_with_state_edit(x, dt, A, B, C, D, replace)
    plain = selective_scan(x, dt, A, B, C, D)
    assert relative(y[:, :4], plain[:, :4]) < 1e-14
    assert relative(y[:, 4], torch.einsum("ben,bn->be", new, C[:, 4]) + D * x[:, 4]) < 1e-14
    rest = selective_scan(x[:, 5:], dt[:, 5:], A, B[:, 5:], C[:, 5:], D, new)
    assert relative(y[:, 5:], rest) < 1e-14


def test_an_edit_may_write_in_place():
    args = inputs(2, 12, 5, 3)[:6]

    def erase(h):
        h[:, 4] = 0
        return h

    copied = selective_scan_with_state_edit(*args, lambda h: erase(h.clone()))
    assert torch.equal(selective_scan_with_state_edit(*args, erase), copied)
    assert not torch.equal(copied, selective_scan_with_state_edit(*args, lambda h: h))


def test_a_second_edit_adds_to_what_the_first_sends():
    x, dt, A, B, C, D, _ = (a.double() for a in inputs(1, 8, 3, 2))

    def zero_two(h):
        return h * torch.tensor([1, 1, 0, 1, 1, 0, 1, 1], dtype=h.dtype)[:, None, None]

    h = states(x, dt, A, B)
    sent = torch.exp(dt[:, 3:6].sum(1)[..., None] * A) * -h[:, 2]  # the first edit, decayed from 2 to 5
    expected = torch.einsum("ben,bn->be", sent, C[:, 5]) + D * x[:, 5]
    y = selective_scan_with_state_edit(x, dt, A, B, C, D, zero_two)
    assert relative(y[:, 5], expected) < 1e-12


def test_state_edits_pass_gradcheck():
    args = [a.double().requires_grad_() for a in inputs(1, 4, 2, 2)[:6]]
    scale = torch.rand(1, 4, 2, 2, dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda *a: selective_scan_with_state_edit(*a, lambda h: h * scale), args)


# -- launching ----------------------------------------------------------------------------------------


@pytest.fixture
def restore_threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_same_bits_twice_and_at_any_thread_count(restore_threads):
    results = []
    for threads in (1, 2, 2):
        torch.set_num_threads(threads)
        y, grads = with_gradients(selective_scan, inputs(4, 50, 130, 6))
        phi, phi_grads = with_gradients(selective_scan_phi, phi_inputs(2, 30, 40, 5))
        profile = selective_scan_phi_profile(*phi_inputs(2, 50, 6, 3))
        results.append([y, *grads, phi, *phi_grads, profile])
    assert all(torch.equal(a, b) for other in results[1:] for a, b in zip(results[0], other, strict=True))


def test_threads_follow_torch(restore_threads):
    for threads in (1, 2):
        torch.set_num_threads(threads)
        selective_scan(*inputs(2, 5, 8, 2))
        assert numba.get_num_threads() == min(threads, numba.config.NUMBA_NUM_THREADS)
        assert torch.get_num_threads() == threads


def test_threading_layer_is_one_that_two_threads_may_enter():
    if "NUMBA_THREADING_LAYER" in os.environ:
        pytest.skip("chosen by the user")
    selective_scan(*inputs(1, 2, 8, 2))
    assert numba.threading_layer() in ("omp", "tbb")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_the_scan_agrees_with_the_cpu():
    y, grads = with_gradients(selective_scan, inputs(2, 64, 32, 16)[:6])
    weight = torch.randn(y.shape, generator=torch.Generator().manual_seed(7)).cuda()
    y_gpu, grads_gpu = with_gradients(selective_scan, [a.cuda() for a in inputs(2, 64, 32, 16)[:6]], weight)
    assert relative(y_gpu.cpu(), y) < 1e-4
    assert all(relative(a.cpu(), b) < 1e-3 for a, b in zip(grads_gpu, grads, strict=True))


@pytest.mark.slow
def test_compiling_is_said_once_and_not_when_cached_and_torch_keeps_its_threads(tmp_path):
    code = (
        "import torch; torch.set_num_threads(1); from circuitscope.kernels.selective_scan import selective_scan as s;"
        "o = torch.ones(1, 2, 8, requires_grad=True);"
        "[s(o, o, -o[0, 0, :, None], o[..., :1], o[..., :1]).sum().backward() for _ in range(2)];"
        "assert torch.get_num_threads() == 1"  # OpenMP's thread count belongs to torch
    )
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)}
    said = [
        subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True).stderr
        for _ in range(2)
    ]
    assert said[0].count("compiling kernels, once") == 1
    assert "compiling" not in said[1]


@pytest.mark.slow
def test_the_process_that_compiles_and_one_that_finds_the_cache_compute_the_same_bits(tmp_path):
    code = (
        "import hashlib, torch; from circuitscope.kernels.selective_scan import selective_scan_phi as phi;"
        "torch.manual_seed(0); dt, A, B = torch.rand(2, 50, 20) / 5, -4 * torch.rand(20, 6), torch.randn(2, 50, 6);"
        "leaves = [a.requires_grad_() for a in (dt, A, B)]; out = phi(*leaves, B);"
        "grads = torch.autograd.grad(out.square().sum(), leaves);"
        "print(hashlib.sha256(b''.join(a.detach().numpy().tobytes() for a in (out, *grads))).hexdigest())"
    )
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)}
    digests = {
        subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True).stdout
        for _ in range(2)
    }
    assert len(digests) == 1


def test_a_cache_older_than_the_shared_vector_code_is_dropped(tmp_path):
    index = tmp_path / "selective_scan.kernel_name-1.py311.nbi"
    index.touch()

    class Compiled:
        class stats:
            cache_path = str(tmp_path)

        class py_func:
            __name__ = "kernel_name"
            __code__ = inputs.__code__

    Compiled.py_func.__name__ = "kernel_name"
    os.utime(index, (0, 0))
    assert numba_simd._machine_code(Compiled) == [index]  # to ask changes nothing
    numba_simd._remove_stale_code(Compiled)
    assert not numba_simd._machine_code(Compiled)
    index.touch()
    numba_simd._remove_stale_code(Compiled)
    assert numba_simd._machine_code(Compiled) == [index]


def test_logger_is_the_package_logger(caplog, monkeypatch):
    monkeypatch.setattr(numba_simd, "_said_compiling", False)

    @numba.njit
    def without_cache():
        return None

    with caplog.at_level(logging.INFO, logger="circuitscope"):
        numba_simd._say_once_if_compiling(without_cache)
        numba_simd._say_once_if_compiling(without_cache)
    assert [record.name for record in caplog.records] == ["circuitscope"]
