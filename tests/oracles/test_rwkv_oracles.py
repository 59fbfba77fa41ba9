"""RWKV-4's time mixing against transformers' RwkvSelfAttention with the same weights."""

import pytest
import torch

from circuitscope.mixers.rwkv import RWKV, RWKVConfig

modeling_rwkv = pytest.importorskip("transformers.models.rwkv.modeling_rwkv")

RELATIVE = 2e-5  # of the largest entry, outputs and all gradients; transformers' running maximum rounds in float32
D_MODEL = 24


def both(layer: int, n_layers: int) -> tuple[RWKV, torch.nn.Module]:
    """Ours at its own initialization, theirs with every weight of ours.

    transformers starts time_first at ones where RWKV-4 has a zigzag, so nothing of its own initialization is used.
    """
    torch.manual_seed(0)
    ours = RWKV(RWKVConfig(), D_MODEL, "none")
    ours.set_depth(layer, n_layers)
    config = modeling_rwkv.RwkvConfig(hidden_size=D_MODEL, num_hidden_layers=n_layers, vocab_size=8)
    theirs = modeling_rwkv.RwkvSelfAttention(config, layer_id=layer)
    with torch.no_grad():
        for name, to in NAMES.items():
            source, target = ours.get_parameter(name), theirs.get_parameter(to)
            target.copy_(source.view(target.shape))
    return ours, theirs


NAMES = {
    "time_decay": "time_decay",
    "time_first": "time_first",
    "time_mix_k": "time_mix_key",
    "time_mix_v": "time_mix_value",
    "time_mix_r": "time_mix_receptance",
    "key.weight": "key.weight",
    "value.weight": "value.weight",
    "receptance.weight": "receptance.weight",
    "out.weight": "output.weight",
}


@pytest.mark.parametrize("length", [1, 2, 33, 128])
@pytest.mark.parametrize("layer", [0, 2])
def test_same_output_and_gradients_as_transformers(length, layer):
    ours, theirs = both(layer, 3)
    assert {n for n, _ in ours.named_parameters()} == set(NAMES)
    x = torch.randn(2, length, D_MODEL, generator=torch.Generator().manual_seed(length), requires_grad=True)
    got, (want, _) = ours(x), theirs(x)
    assert (got - want).abs().max() <= RELATIVE * want.abs().max()
    weights = torch.randn(want.shape, generator=torch.Generator().manual_seed(1))
    mine = torch.autograd.grad(got, [x, *(ours.get_parameter(n) for n in NAMES)], weights)
    leaves = [x, *(theirs.get_parameter(n) for n in NAMES.values())]
    for a, b in zip(mine, torch.autograd.grad(want, leaves, weights, materialize_grads=True), strict=True):
        assert (a.flatten() - b.flatten()).abs().max() <= RELATIVE * b.abs().max().clamp(min=1e-3)


@pytest.mark.parametrize("n_layers", [2, 3])
def test_same_initialization_of_decay_and_mixes_as_transformers(n_layers):
    """All that transformers gets right: time_first is its trap."""
    config = modeling_rwkv.RwkvConfig(
        hidden_size=D_MODEL, num_hidden_layers=n_layers, vocab_size=8, attention_hidden_size=D_MODEL
    )
    model = modeling_rwkv.RwkvModel(config)
    for layer, block in enumerate(model.blocks):
        ours = RWKV(RWKVConfig(), D_MODEL, "none")
        ours.set_depth(layer, n_layers)
        for name, theirs in list(NAMES.items())[:5]:
            if name != "time_first":
                want = block.attention.get_parameter(theirs).flatten()
                torch.testing.assert_close(ours.get_parameter(name), want, msg=lambda m, n=name: f"{n}: {m}")
