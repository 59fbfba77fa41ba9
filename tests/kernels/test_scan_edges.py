"""Sums over edges: those of a matrix against the reference, and those of the scan against its matrix."""

import numpy as np
import pytest
import torch
from test_selective_scan import SHAPES, inputs

from circuitscope.kernels import scan_edges
from circuitscope.kernels.edge_sums import EdgeList, EdgeSums, Surroundings, edge_sums, edge_sums_reference
from circuitscope.kernels.scan_edges import selective_scan_edge_sums
from circuitscope.kernels.selective_scan import selective_scan_phi_reference


def some_edges(batch: int, length: int, sets: int = 2, ahead: bool = False) -> EdgeList:
    """About a third of all edges, of two sets; with those that read ahead if asked for."""
    draw = torch.Generator().manual_seed(1)
    mask = torch.rand(sets, batch, length, length, generator=draw) < 0.3
    mask = mask if ahead else mask.tril()
    sequence, dest, src, of = mask.permute(1, 2, 3, 0).nonzero(as_tuple=True)
    counts = np.bincount((sequence * length + dest).numpy(), minlength=batch * length)
    return EdgeList(np.concatenate([[0], counts.cumsum()]), src.numpy(), of.numpy(), sets, length)


def close(ours: EdgeSums, reference: EdgeSums) -> None:
    for one, other in zip(ours, reference, strict=True):
        assert one.shape == other.shape
        torch.testing.assert_close(one.double(), other.double(), rtol=0, atol=1e-5 * max(1, other.abs().max()))


def test_sums_on_a_matrix_made_by_hand():
    matrix = torch.tensor([[[[2.0, 0.0], [-1.0, 3.0]], [[0.0, 0.0], [0.0, 4.0]]]])
    edges = EdgeList(np.array([0, 1, 2]), np.array([0, 0]), np.array([0, 1]), sets=2, length=2)
    for found in (edge_sums(matrix, edges), edge_sums_reference(matrix, edges)):
        assert found.signed[:, 0].tolist() == [[1.0, 0.0], [-0.25, 0.0]]
        assert found.size[:, 0].tolist() == [[1.0, 0.0], [0.25, 0.0]]
        assert found.entries.tolist() == [2.0, 1.0]
        assert found.mass.tolist() == [[2.0, 8.0]]


@pytest.mark.parametrize(("batch", "length", "units"), [(2, 3, 4), (3, 17, 1), (1, 1, 1)])
@pytest.mark.parametrize("shared", [False, True])
def test_sums_of_a_matrix_are_those_of_the_reference(batch, length, units, shared):
    matrix = torch.randn(1 if shared else batch, units, length, length)
    matrix[:, :, -1] = 0  # a row of zeros has no shares
    edges = some_edges(batch, length, ahead=True)
    whole = matrix.expand(batch, -1, -1, -1)
    close(edge_sums(whole, edges), edge_sums_reference(whole, edges))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("width", [None, 1, 4, 11])
def test_sums_of_the_scan_are_those_of_its_matrix(shape, width):
    _, dt, A, B, C, D, _ = inputs(*shape)
    batch, length, channels, _ = shape
    edges = some_edges(batch, length, ahead=True)
    around = None
    if width:
        taps = torch.randn(channels, width)
        around = Surroundings(torch.randn(batch, channels, length), torch.rand(batch, channels, length), taps)
    bare, whole = selective_scan_edge_sums(dt, A, B, C, D, edges, around)
    phi = selective_scan_phi_reference(dt, A, B, C, D)
    close(bare, edge_sums_reference(phi, edges))
    assert (whole is None) == (around is None)
    if around is not None and whole is not None:
        close(whole, edge_sums_reference(around(phi), edges))


def test_where_no_kernel_serves_a_few_channels_are_read_at_a_time(monkeypatch):
    monkeypatch.setattr(scan_edges, "_ENTRIES", 2 * 9 * 9 * 2)  # two channels
    _, dt, A, B, C, D, _ = (tensor.double() for tensor in inputs(2, 9, 5, 4))
    edges = some_edges(2, 9)
    around = Surroundings(*(torch.randn(2, 5, 9).double() for _ in range(2)), torch.randn(5, 4).double())
    bare, whole = selective_scan_edge_sums(dt, A, B, C, D, edges, around)
    phi = selective_scan_phi_reference(dt, A, B, C, D)
    close(bare, edge_sums_reference(phi, edges))
    close(whole, edge_sums_reference(around(phi), edges))


def test_other_dtypes_go_through_the_reference():
    _, dt, A, B, C, D, _ = (tensor.double() for tensor in inputs(2, 9, 3, 4))
    edges = some_edges(2, 9)
    bare, _ = selective_scan_edge_sums(dt, A, B, C, D, edges)
    assert bare.signed.dtype == torch.float64
    close(bare, edge_sums_reference(selective_scan_phi_reference(dt, A, B, C, D), edges))


def test_edges_of_other_sequences_are_refused():
    _, dt, A, B, C, D, _ = inputs(2, 9, 3, 4)
    with pytest.raises(ValueError, match="the edges are of 3 sequences of length 9"):
        selective_scan_edge_sums(dt, A, B, C, D, some_edges(3, 9))
    with pytest.raises(ValueError, match="the edges are of 2 sequences of length 8"):
        edge_sums(torch.randn(2, 1, 9, 9), some_edges(2, 8))
