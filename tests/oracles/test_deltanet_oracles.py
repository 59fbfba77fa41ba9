"""Whole layers with the same weights: transformers' Qwen3-Next for Gated DeltaNet, fla's layer for DeltaNet.

Both call Triton kernels when fla can be imported, which fail on a CPU. Their own torch forms stand in; what is
compared is the layer: projections, convs, activations, norms, β and decay, scale, norm and gate.
"""

import inspect
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from circuitscope.mixers.deltanet import DeltaNet, DeltaNetConfig, GatedDeltaNetConfig

RELATIVE = 1e-5  # of the largest entry, outputs and gradients of the input; the peers compute in float32
D_MODEL = 24


def agree(ours: nn.Module, theirs: Any, length: int) -> None:
    """Same outputs, same gradients at the input."""
    x = torch.randn(2, length, D_MODEL, generator=torch.Generator().manual_seed(length), requires_grad=True)
    got, want = ours(x), theirs(x)
    weights = torch.randn(want.shape, generator=torch.Generator().manual_seed(1))
    for a, b in ((got, want), (torch.autograd.grad(f, x, weights)[0] for f in (got, want))):
        assert float((a - b).detach().abs().max()) <= RELATIVE * float(b.detach().abs().max())


@pytest.mark.parametrize("length", [1, 2, 33, 130])
def test_gated_deltanet_is_the_layer_of_qwen3_next(length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    qwen = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next")
    from transformers import Qwen3NextConfig

    for name in ("torch_chunk_gated_delta_rule", "causal_conv1d_fn"):
        monkeypatch.setattr(qwen, name, inspect.unwrap(getattr(qwen, name)))
    torch.manual_seed(0)
    heads, d_key, d_value = 3, 8, 5
    theirs = qwen.Qwen3NextGatedDeltaNet(
        Qwen3NextConfig(
            hidden_size=D_MODEL,
            num_hidden_layers=1,
            layer_types=["linear_attention"],
            linear_num_value_heads=heads,
            linear_num_key_heads=heads,
            linear_key_head_dim=d_key,
            linear_value_head_dim=d_value,
        ),
        layer_idx=0,
    )
    config = GatedDeltaNetConfig(n_heads=heads, d_key=d_key, d_value=d_value, norm_eps=theirs.layer_norm_epsilon)
    ours = DeltaNet(config, D_MODEL, "none")
    with torch.no_grad():
        theirs.norm.weight.normal_(1, 0.1)
        theirs.dt_bias.normal_()
        # theirs keeps q, k, v, gate of a head together, and β and step of a head
        qkvz = theirs.in_proj_qkvz.weight.unflatten(0, (heads, -1)).split([d_key, d_key, d_value, d_value], dim=1)
        q, k, v, gate = (part.flatten(0, 1) for part in qkvz)
        beta, step = theirs.in_proj_ba.weight.unflatten(0, (heads, 2)).unbind(1)
        ours.in_proj.weight.copy_(torch.cat([q, k, v, beta, step, gate]))
        ours.conv.weight.copy_(theirs.conv1d.weight)
        ours.A_log.copy_(theirs.A_log)
        ours.dt_bias.copy_(theirs.dt_bias)
        ours.norm.weight.copy_(theirs.norm.weight)
        ours.out.weight.copy_(theirs.out_proj.weight)
    agree(ours, theirs, length)


@pytest.mark.parametrize("length", [1, 2, 33, 64])
@pytest.mark.parametrize("allow_neg_eigval", [False, True])
def test_deltanet_is_the_layer_of_fla(length: int, allow_neg_eigval: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = pytest.importorskip("fla.layers.delta_net")
    from fla.ops.delta_rule.naive import delta_rule_recurrence

    def rule(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, use_qk_l2norm_in_kernel: bool, **others: Any) -> Any:
        assert use_qk_l2norm_in_kernel
        q, k = (part * torch.rsqrt(part.square().sum(-1, keepdim=True) + 1e-6) for part in (q, k))
        o, state = delta_rule_recurrence(*(part.transpose(1, 2) for part in (q, k, v, beta)))
        return o.transpose(1, 2), state

    def conv(self: Any, x: Tensor, **others: Any) -> Any:
        assert self.activation == "silu"
        padded = F.pad(x.mT, (self.kernel_size[0] - 1, 0))
        return F.silu(F.conv1d(padded, self.weight, self.bias, groups=x.shape[-1])).mT, None

    monkeypatch.setattr(layer, "fused_recurrent_delta_rule", rule)
    monkeypatch.setattr(layer.ShortConvolution, "forward", conv)
    torch.manual_seed(0)
    theirs = layer.DeltaNet(hidden_size=D_MODEL, num_heads=3, allow_neg_eigval=allow_neg_eigval, layer_idx=0)
    norm = nn.RMSNorm(8, eps=theirs.o_norm.eps)
    theirs.o_norm = norm
    ours = DeltaNet(DeltaNetConfig(n_heads=3, allow_neg_eigval=allow_neg_eigval), D_MODEL, "none")
    with torch.no_grad():
        norm.weight.normal_(1, 0.1)
        projections = (theirs.q_proj, theirs.k_proj, theirs.v_proj, theirs.b_proj)
        ours.in_proj.weight.copy_(torch.cat([p.weight for p in projections]))
        ours.conv.weight.copy_(torch.cat([c.weight for c in (theirs.q_conv1d, theirs.k_conv1d, theirs.v_conv1d)]))
        ours.norm.weight.copy_(norm.weight)
        ours.out.weight.copy_(theirs.o_proj.weight)
    agree(ours, lambda x: theirs(x)[0], length)
