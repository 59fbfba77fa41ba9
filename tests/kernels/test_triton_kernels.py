"""The Triton kernels against the references: odd shapes, extremes, gradients, views, guards around every array.

On a GPU the compiled kernels run. With TRITON_INTERPRET=1 Triton's interpreter runs the same tests on a CPU;
test_triton.py does that in a process of its own, because Triton reads the variable when it is imported.
"""

import os
from importlib import import_module

import pytest
import torch
from torch import Tensor

from circuitscope.kernels import scan_edges as sums
from circuitscope.kernels.edge_sums import EdgeList, Surroundings, edge_sums_reference
from circuitscope.kernels.linear_scan import linear_scan_reference
from circuitscope.kernels.selective_scan import selective_scan_phi_reference, selective_scan_reference
from circuitscope.kernels.wkv import wkv_reference
from triton_kernels import KERNELS

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
pytestmark = [] if INTERPRETED else [pytest.mark.gpu]
triton = pytest.importorskip("triton")

from circuitscope.kernels.triton import scan_edges, scans, selective_scan, selective_scan_phi, wkv  # noqa: E402

MODULES = [import_module(f"circuitscope.kernels.triton.{file}") for file in KERNELS]
GUARD = 61  # numbers; odd, so that nothing is aligned by chance
# batch, pos, channel, state: all ones, multiples of nothing, more than one chunk of positions and one block of channels
SHAPES = [(1, 1, 1, 1), (2, 3, 5, 3), (1, 35, 3, 2), (2, 18, 9, 16)]
# relative to the largest entry, against the reference in float64; a GPU's exponentials are a little less exact
TOLERANCES = {torch.float32: 3e-6 if INTERPRETED else 2e-5, torch.float64: 1e-13}


def guarded(launch, seen: set[str]):
    """Every array is moved into a buffer with NaN on both sides: a read outside shows, and a write does too."""

    def run(kernel, programs, *args, **sizes):
        seen.add(kernel.__name__)
        inner, buffers = list(args), {}
        for at, array in enumerate(args):
            if isinstance(array, Tensor):
                assert array.is_contiguous()
                mark = float("nan") if array.is_floating_point() else -(2**30)
                buffers[at] = array.new_full((array.numel() + 2 * GUARD,), mark)
                inner[at] = buffers[at][GUARD : GUARD + array.numel()].view(array.shape)
                inner[at].copy_(array)
        launch(kernel, programs, *inner, **sizes)
        for at, buffer in buffers.items():
            for band in (buffer[:GUARD], buffer[-GUARD:]):
                kept = band.isnan() if band.is_floating_point() else band == -(2**30)
                assert kept.all(), f"{kernel.__name__} wrote outside of argument {at}, {list(args[at].shape)}"
            args[at].data.copy_(inner[at])  # an input must not look as if somebody had written into it

    return run


@pytest.fixture(scope="module", autouse=True)
def every_kernel_runs_between_guards():
    """Arrays that are made empty are full of NaN, so that what a kernel does not write is seen."""
    seen: set[str] = set()
    deterministic = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # or torch refuses matrix products on a GPU
        for module in MODULES:
            patch.setattr(module, "launch", guarded(module.launch, seen))
        yield
    torch.use_deterministic_algorithms(deterministic)
    assert seen == set().union(*KERNELS.values())


def draw(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def scan_inputs(batch: int, length: int, channels: int, states: int) -> list[Tensor]:
    """x, Δ, A, B, C, D, initial, as a Mamba layer would make them."""
    return [
        draw(0, batch, length, channels),
        torch.nn.functional.softplus(draw(1, batch, length, channels) - 2),
        -torch.arange(1, states + 1) * (0.1 * draw(2, channels, states)).exp(),
        draw(3, batch, length, states),
        draw(4, batch, length, states),
        draw(5, channels),
        draw(6, batch, channels, states),
    ]


def wkv_inputs(batch: int, length: int, channels: int, scale: float = 1.0) -> list[Tensor]:
    """w, u, k, v; the scale multiplies the keys."""
    keys = (scale * draw(2, batch, length, channels)).clamp(-1000, 1000)
    return [(2 * draw(0, channels)).exp(), draw(1, channels), keys, draw(3, batch, length, channels)]


def delta_inputs(batch: int, length: int, heads: int, d_key: int, d_value: int) -> list[Tensor]:
    """k, β, decay, X."""
    k = torch.nn.functional.normalize(draw(0, batch, length, heads, d_key), dim=-1)
    beta, decay = (2 * draw(seed, batch, length, heads).sigmoid() for seed in (1, 2))
    return [k, beta, decay / 2, draw(3, batch, length, heads, d_key, d_value)]


def delta_reference(k: Tensor, beta: Tensor, decay: Tensor, X: Tensor) -> Tensor:
    """S_t = e_t (S_{t−1} − β_t k_t (k_tᵀ S_{t−1})) + X_t, by matrices."""
    states, S = [], torch.zeros_like(X[:, 0])
    eye = torch.eye(k.shape[-1], dtype=k.dtype, device=k.device)
    for t in range(k.shape[1]):
        outer = k[:, t, :, :, None] * k[:, t, :, None, :]
        S = decay[:, t, :, None, None] * (eye - beta[:, t, :, None, None] * outer) @ S + X[:, t]
        states.append(S)
    return torch.stack(states, 1)


def with_gradients(function, args: list[Tensor]) -> list[Tensor]:
    leaves = [a.detach().requires_grad_() for a in args]
    out = function(*leaves)
    weight = draw(9, *out.shape).to(out.device, out.dtype)
    grads = torch.autograd.grad((out * weight).sum().real, leaves, materialize_grads=True)
    return [out.detach().cpu(), *(grad.cpu() for grad in grads)]


def agree(kernel, reference, args: list[Tensor], dtype: torch.dtype = torch.float32, tolerance: float = 0.0) -> None:
    """Value and every gradient, against the reference in float64 of the same rounded input."""
    given = [a.to(dtype if not a.is_complex() else dtype.to_complex()) for a in args]
    got = with_gradients(kernel, [a.to(DEVICE) for a in given])
    want = with_gradients(reference, [a.to(exact.dtype) for a, exact in zip(given, args, strict=True)])
    for number, (ours, theirs) in enumerate(zip(got, want, strict=True)):
        assert ours.shape == theirs.shape
        assert ours.dtype == given[0].dtype
        error = (ours - theirs).abs().max() / theirs.abs().max().clamp_min(1e-30)
        near_zero = theirs.abs().max() < 1e-30 and ours.abs().max() < 1e-30
        assert error <= (tolerance or TOLERANCES[dtype]) or near_zero, f"{number}: {error:.1e}"


BOTH = pytest.mark.parametrize("dtype", TOLERANCES, ids=["float32", "float64"])


# -- the selective scan -------------------------------------------------------------------------------


@BOTH
@pytest.mark.parametrize("shape", SHAPES)
def test_the_scan_and_all_its_gradients(shape, dtype):
    agree(selective_scan.scan, selective_scan_reference, scan_inputs(*shape), dtype)


def test_the_scan_without_skip_and_initial_state():
    agree(selective_scan.scan, selective_scan_reference, scan_inputs(1, 17, 2, 3)[:5])


def test_the_scan_without_gradients_saves_nothing_and_is_the_same():
    args = [a.float().to(DEVICE) for a in scan_inputs(1, 20, 3, 2)]
    plain = selective_scan.scan(*args)
    assert torch.equal(plain, selective_scan.scan(*(a.requires_grad_() for a in args)))
    assert not plain.requires_grad


@pytest.mark.parametrize(
    ("delta", "rate"), [(50.0, -1000.0), (50.0, -1.0), (1e-8, -1.0), (0.0, -1.0), (0.1, -1e-6), (0.1, 0.0)]
)
def test_extremes_of_the_scan_and_of_phi(delta, rate):
    """A float32 product Δ·A of size 80 alone moves exp(Δ·A) by 5e-6."""
    x, dt, A, B, C, D, _ = scan_inputs(1, 18, 2, 2)
    dt, A = dt / dt.mean() * delta, A * -rate
    agree(selective_scan.scan, selective_scan_reference, [x, dt, A, B, C, D], tolerance=2e-5)
    agree(selective_scan_phi.phi, selective_scan_phi_reference, [dt, A, B, C, D], tolerance=2e-5)


def differentiable():
    """Every function with gradients, with small inputs."""
    return (
        (selective_scan.scan, scan_inputs(2, 5, 3, 2)),
        (selective_scan_phi.phi, scan_inputs(2, 5, 3, 2)[1:6]),
        (wkv.wkv, wkv_inputs(2, 5, 3)),
        (scans.delta_scan, delta_inputs(2, 4, 3, 2, 5)),
        (scans.linear_scan, [draw(0, 2, 5, 3), draw(1, 2, 5, 3)]),
    )


def test_autocast_to_bfloat16_rounds_nothing_inside():
    for function, args in differentiable():
        args = [a.float().to(DEVICE) for a in args]
        with torch.autocast(DEVICE, torch.bfloat16):
            rounded = with_gradients(function, args)
        for a, b in zip(rounded, with_gradients(function, args), strict=True):
            assert torch.equal(a, b)


def test_views_give_the_same_bits_as_copies():
    for function, args in differentiable():
        args = [a.float().to(DEVICE) for a in args]
        views = [a.mT.contiguous().mT if a.ndim > 1 else torch.stack([a, a], 1)[:, 0] for a in args]
        assert not any(view.is_contiguous() for view in views)
        for a, b in zip(with_gradients(function, args), with_gradients(function, views), strict=True):
            assert torch.equal(a, b)


def test_twice_the_same_bits():
    args = [a.float().to(DEVICE) for a in scan_inputs(2, 3, 9, 16)]
    assert all(map(torch.equal, with_gradients(selective_scan.scan, args), with_gradients(selective_scan.scan, args)))


# -- its Φ --------------------------------------------------------------------------------------------


@BOTH
@pytest.mark.parametrize("shape", [*SHAPES[:3], (2, 9, 3, 40)])
def test_phi_and_all_its_gradients(shape, dtype):
    agree(selective_scan_phi.phi, selective_scan_phi_reference, scan_inputs(*shape)[1:6], dtype)


def test_what_arrives_above_the_diagonal_of_phi_does_not_matter_even_if_it_is_not_finite():
    args = [a.float().to(DEVICE) for a in scan_inputs(1, 6, 2, 2)[1:6]]
    weight = draw(0, 1, 2, 6, 6).float().to(DEVICE)
    above = torch.ones(6, 6, dtype=torch.bool, device=DEVICE).triu(1)
    grads = []
    for given in (weight.masked_fill(above, float("nan")), weight):
        leaves = [a.clone().requires_grad_() for a in args]
        grads.append(torch.autograd.grad(selective_scan_phi.phi(*leaves), leaves, given))
    assert all(map(torch.equal, *grads))


@BOTH
@pytest.mark.parametrize("shape", [(1, 1, 1, 1), (2, 3, 5, 40)])
def test_sums_over_phi(shape, dtype, monkeypatch):
    monkeypatch.setattr(selective_scan_phi, "GROUP", 2)  # so that a few channels are more than one group
    given = [a.to(dtype) for a in scan_inputs(*shape)[1:6]]
    phi = selective_scan_phi_reference(*(a.double() for a in given))
    args = [a.to(DEVICE) for a in given]
    length = shape[1]
    sequence, dest, src = torch.ones(shape[0], length, length).tril().nonzero(as_tuple=True)
    some = slice(None, None, 1 + length // 4)
    edges = [index[some] for index in (sequence, dest, src)]
    entries, mass = selective_scan_phi.phi_on_edges(*args, *(index.to(DEVICE) for index in edges))
    diagonals = [phi.diagonal(-lag, -2, -1).abs().mean(-1) for lag in range(length)]
    for got, want in (
        (selective_scan_phi.phi_mean(*args), phi.abs().mean(1)),
        (selective_scan_phi.phi_mean(*args, absolute=False), phi.mean(1)),
        (selective_scan_phi.phi_profile(*args), torch.stack(diagonals, -1)),
        (entries, phi[edges[0], :, edges[1], edges[2]]),
        (mass, phi.abs().sum(-1)),
    ):
        assert got.shape == want.shape
        assert (got.cpu() - want).abs().max() <= TOLERANCES[dtype] * want.abs().max()


def test_an_edge_from_a_later_position_has_no_weight_and_no_edges_are_no_entries():
    args = [a.float().to(DEVICE) for a in scan_inputs(1, 4, 2, 2)[1:6]]
    later = [torch.tensor([index], device=DEVICE) for index in (0, 1, 3)]
    assert not selective_scan_phi.phi_on_edges(*args, *later)[0].any()
    assert selective_scan_phi.phi_on_edges(*args, *(index[:0] for index in later))[0].shape == (0, 2)


def surroundings(batch: int, length: int, channels: int, width: int) -> Surroundings:
    return Surroundings(draw(11, batch, channels, length), draw(12, batch, channels, length), draw(13, channels, width))


def every_third_edge(batch: int, length: int) -> EdgeList:
    """Of two sets, and also with sources after the destination."""
    sequence, dest, src = (part[::3] for part in torch.ones(batch, length, length).nonzero(as_tuple=True))
    counts = torch.bincount(sequence * length + dest, minlength=batch * length)
    start = torch.cat([torch.zeros(1, dtype=torch.long), counts.cumsum(0)])
    return EdgeList(start.numpy(), src.numpy(), (torch.arange(len(src)) % 2).numpy(), 2, length)


@BOTH
@pytest.mark.parametrize(("shape", "width"), [((1, 1, 1, 1), 1), ((1, 9, 2, 16), 4), ((2, 3, 5, 40), 4)])
def test_what_surrounds_the_scan_on_edges(shape, width, dtype):
    """Lengths shorter than the conv, of more than one block of sources, and channels of more than one block."""
    batch, length, channels, _ = shape
    given = [a.to(dtype) for a in scan_inputs(*shape)[1:6]]
    around = Surroundings(*(a.to(dtype) for a in surroundings(batch, length, channels, width)))
    matrix = Surroundings(*(a.double() for a in around))(selective_scan_phi_reference(*(a.double() for a in given)))
    at = every_third_edge(batch, length).indices(torch.device("cpu"))
    args = [a.to(DEVICE) for a in (*given, *around, *at)]
    entries, mass = scan_edges.composed_on_edges(*args)
    sequence, dest, src = at
    for got, want in ((entries, matrix[sequence, :, dest, src]), (mass, matrix.abs().sum(-1))):
        assert got.shape == want.shape
        assert got.dtype == dtype
        assert (got.cpu() - want).abs().max() <= 3 * TOLERANCES[dtype] * want.abs().max()


@pytest.mark.parametrize(("delta", "rate"), [(50.0, -1000.0), (0.0, -1.0), (0.1, -1e-6)])
def test_extremes_of_what_surrounds_the_scan(delta, rate):
    _, dt, A, B, C, D, _ = scan_inputs(1, 18, 2, 2)
    given = [a.float() for a in (dt / dt.mean() * delta, A * -rate, B, C, D)]
    around = Surroundings(*(a.float() for a in surroundings(1, 18, 2, 4)))
    matrix = Surroundings(*(a.double() for a in around))(selective_scan_phi_reference(*(a.double() for a in given)))
    sequence, dest, src = every_third_edge(1, 18).indices(torch.device("cpu"))
    entries, mass = scan_edges.composed_on_edges(*(a.to(DEVICE) for a in (*given, *around, sequence, dest, src)))
    assert (mass.cpu() - matrix.abs().sum(-1)).abs().max() <= 2e-5 * matrix.abs().sum(-1).max()
    assert (entries.cpu() - matrix[sequence, :, dest, src]).abs().max() <= 2e-5 * matrix.abs().max()


def test_views_of_what_surrounds_the_scan_give_the_same_bits_and_no_edges_are_no_entries():
    args = [a.float().to(DEVICE) for a in (*scan_inputs(2, 5, 3, 2)[1:6], *surroundings(2, 5, 3, 4))]
    views = [a.mT.contiguous().mT if a.ndim > 1 else torch.stack([a, a], 1)[:, 0] for a in args]
    at = [index.to(DEVICE) for index in every_third_edge(2, 5).indices(torch.device("cpu"))]
    assert all(map(torch.equal, scan_edges.composed_on_edges(*args, *at), scan_edges.composed_on_edges(*views, *at)))
    assert scan_edges.composed_on_edges(*args, *(index[:0] for index in at))[0].shape == (0, 3)


@pytest.mark.parametrize("width", [None, 4])
def test_scores_of_the_scan_by_these_kernels_are_those_of_its_matrix(width):
    dt, A, B, C, D = (a.float() for a in scan_inputs(2, 9, 3, 4)[1:6])
    around = None if width is None else Surroundings(*(a.float() for a in surroundings(2, 9, 3, width)))
    edges = every_third_edge(2, 9)
    there = None if around is None else Surroundings(*(a.to(DEVICE) for a in around))
    found = sums._by_triton(*(a.to(DEVICE) for a in (dt, A, B, C, D)), edges, there)
    phi = selective_scan_phi_reference(dt, A, B, C, D)
    for ours, matrix in zip(found, (phi, None if around is None else around(phi)), strict=True):
        assert (ours is None) == (matrix is None)
        for got, want in () if matrix is None else zip(ours, edge_sums_reference(matrix, edges), strict=True):
            torch.testing.assert_close(got.cpu(), want, rtol=1e-5, atol=1e-5)


# -- WKV ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(1, 1, 1), (2, 9, 3), (1, 4, 130)])
@pytest.mark.parametrize("scale", [1.0, 1000.0])
def test_wkv_and_all_its_gradients(shape, scale):
    for dtype, tolerance in ((torch.float32, 2e-5), (torch.float64, 1e-12)):
        agree(wkv.wkv, wkv_reference, wkv_inputs(*shape, scale), dtype, tolerance)


@pytest.mark.parametrize(
    ("w", "u", "k"),
    [
        (1e-6, 0.0, [0.0, 0.0, 0.0]),
        (1e4, 0.0, [0.0, 0.0, 0.0]),  # all forgotten but the last two
        (1.0, -500.0, [0.0, 1000.0, -1000.0]),
        (1.0, 500.0, [1000.0, -1000.0, 1000.0]),
        (400.0, 0.0, [1000.0, -1000.0, 100.0]),  # decayed by 400 per step, and still the largest
    ],
)
def test_extremes_of_wkv(w, u, k):
    values = torch.tensor([1.0, -2.0, 3.0]).double()[None, :, None]
    args = [torch.tensor([w]).double(), torch.tensor([u]).double(), torch.tensor(k).double()[None, :, None], values]
    agree(wkv.wkv, wkv_reference, args, tolerance=2e-5)


# -- states -------------------------------------------------------------------------------------------


@BOTH
@pytest.mark.parametrize("shape", [(1, 1, 1), (2, 7, 3), (1, 3, 130)])
def test_the_linear_scan_real_and_complex(shape, dtype):
    real = [draw(0, *shape), draw(1, *shape)]
    turned = [torch.complex(part, draw(seed, *shape)) for seed, part in enumerate(real, 2)]
    agree(scans.linear_scan, linear_scan_reference, real, dtype)
    agree(scans.linear_scan, linear_scan_reference, turned, dtype)


@BOTH
@pytest.mark.parametrize("shape", [(1, 1, 1, 1, 1), (2, 5, 2, 3, 4), (1, 3, 1, 33, 5)])
def test_the_delta_scan(shape, dtype):
    agree(scans.delta_scan, delta_reference, delta_inputs(*shape), dtype)


def test_scans_are_differentiable_again():
    a, x = (draw(seed, 1, 3, 2).to(DEVICE).requires_grad_() for seed in (0, 1))
    assert torch.autograd.gradgradcheck(scans.linear_scan, (a, x), fast_mode=True)
    z = torch.complex(draw(2, 1, 3, 1), draw(3, 1, 3, 1)).to(DEVICE).requires_grad_()
    assert torch.autograd.gradgradcheck(lambda z: scans.linear_scan(z, z), (z,), fast_mode=True)
    args = [part.to(DEVICE).requires_grad_() for part in delta_inputs(1, 2, 1, 2, 1)]
    assert torch.autograd.gradgradcheck(scans.delta_scan, args, fast_mode=True)
