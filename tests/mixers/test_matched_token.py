"""Which token's key a query matched: N by hand, by its definition, and where it is known by construction."""

import pytest
import torch
from contract import seen_at, shaken, stream

from circuitscope.analysis.reading.opened import opened
from circuitscope.analysis.scores.edges import named_edges
from circuitscope.analysis.scores.weight_on_edges import weights_on
from circuitscope.mixers import build_mixer, mixer_config
from circuitscope.mixers.matched_token import matched_token
from circuitscope.mixers.positions import rotate
from planted import planted_conv_attention, planted_task

D_MODEL = 8


def test_by_hand():
    """Two tokens add to the last key, in the ratio 3 to 1: the query there matched both of them, in these shares."""
    pattern = torch.tensor([[1.0, 0.0], [0.25, 0.75]])[None, None]
    q = torch.tensor([1.0, 2.0])[None, :, None, None]
    own, before = torch.tensor([5.0, 3.0])[None, :, None, None], torch.tensor([0.0, -1.0])[None, :, None, None]
    found = matched_token(pattern, q, {0: own, 1: before})
    torch.testing.assert_close(found[0, 0], torch.tensor([[1.0, 0.0], [0.25 + 0.75 / 4, 0.75 * 3 / 4]]))


@pytest.mark.parametrize("positions", ["none", "rope", "alibi"])
@pytest.mark.parametrize(
    "options",
    [{}, {"conv_activation": True}, {"conv_mode": "centred", "conv_width": 3}],
    ids=["plain", "silu", "centred"],
)
def test_it_is_the_definition_written_out(options, positions):
    torch.manual_seed(0)
    config = mixer_config({"name": "attention", "conv_on": "k", "n_heads": 2, **options})
    mixer, x = shaken(build_mixer(config, D_MODEL, positions).double()), stream(6, D_MODEL, 2, torch.float64)
    pre = seen_at(mixer, x, "hook_conv_k")
    q = seen_at(mixer, x, "hook_rot_q" if positions == "rope" else "hook_q")
    with torch.no_grad():
        reading = mixer.reading(x)
        pattern, got = (reading.product(name).build(slice(0, 2)) for name in ("pattern", "matched"))
        conv = reading.product("conv_k").build(slice(0, D_MODEL))[0]
        gate = pre.sigmoid() if config.conv_activation else torch.ones_like(pre)
        sizes = []
        for t in range(6):
            added = gate * conv[:, :, t].T * x[:, t, None]  # by token t, to what the projection of each key reads
            keys = torch.einsum("bjc,hcd->bjhd", added, mixer.W_K)
            sizes.append(torch.einsum("bihd,bjhd->bhij", q, rotate(keys) if positions == "rope" else keys).abs())
        s = torch.stack(sizes, dim=-1)
        want = torch.einsum("bhij,bhijt->bhit", pattern, s / s.sum(dim=-1, keepdim=True))
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-12)


def test_with_a_shift_planted_in_the_conv_a_query_attends_to_the_value_and_matched_the_key():
    batch = planted_task().batch(0, split="test", size=16)
    reading = opened(planted_conv_attention()).reading(batch.tokens, 0)
    weights = {}
    for name in ("pattern", "matched"):
        ((_, matrix),) = reading.slices(reading.product(name))
        for edges in ("recall", "match"):
            set_of = named_edges(edges, batch.layout)
            weights[name, edges] = float(weights_on([set_of], matrix, ["raw"])[edges, "raw"].mean())
    assert min(weights["pattern", "recall"], weights["matched", "match"]) > 0.95
    assert max(weights["pattern", "match"], weights["matched", "recall"]) < 0.05
