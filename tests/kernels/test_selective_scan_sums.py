"""Sums over Φ of the selective scan are those of the whole matrix, however few channels are built at once."""

import pytest
import torch

from circuitscope.kernels import selective_scan_sums
from circuitscope.kernels.selective_scan import selective_scan_phi_reference
from circuitscope.kernels.selective_scan_sums import selective_scan_phi_mean, selective_scan_phi_on_edges


@pytest.fixture(params=[1, 200, 10**6], ids=["one channel", "two channels", "all channels"])
def inputs(request, monkeypatch):
    """dt, A, B, C, D of five channels, with so many entries of Φ at once."""
    monkeypatch.setattr(selective_scan_sums, "SLICE", request.param)
    draw = torch.Generator().manual_seed(0)
    shapes = (2, 7, 5), (5, 3), (2, 7, 3), (2, 7, 3), (5,)
    dt, A, B, C, D = (torch.randn(shape, generator=draw) for shape in shapes)
    return [dt.exp(), -A.exp(), B, C, D]


@pytest.mark.parametrize("absolute", [True, False])
def test_the_mean_over_channels(inputs, absolute):
    phi = selective_scan_phi_reference(*inputs)
    found = selective_scan_phi_mean(*inputs, absolute=absolute)
    torch.testing.assert_close(found, (phi.abs() if absolute else phi).mean(1))


def test_the_weight_on_edges_and_the_mass_of_rows(inputs):
    phi = selective_scan_phi_reference(*inputs)
    sequence, dest, src = (torch.tensor(index) for index in ([0, 0, 1], [3, 6, 2], [3, 0, 4]))
    entries, mass = selective_scan_phi_on_edges(*inputs, sequence, dest, src)
    torch.testing.assert_close(entries, phi[sequence, :, dest, src])
    assert not entries[2].any()  # from a later position
    torch.testing.assert_close(mass, phi.abs().sum(-1))


@pytest.mark.parametrize(("name", "edge"), [("sequence", (2, 0, 0)), ("dest", (0, 7, 0)), ("src", (0, 0, -1))])
def test_an_edge_outside_is_refused_before_any_memory_is_read(inputs, name, edge):
    with pytest.raises(ValueError, match=f"{name} must be in 0 to"):
        selective_scan_phi_on_edges(*inputs, *(torch.tensor([index]) for index in edge))
