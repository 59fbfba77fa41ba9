"""Mamba2 with the weights of transformers' gives its outputs, logits and gradients."""

import inspect
from typing import Any

import pytest
import torch
from torch import nn

from circuitscope.mixers.mamba2 import Mamba2, Mamba2Config
from circuitscope.models.config import ModelConfig
from circuitscope.models.hooked_lm import HookedLM

OUTPUT, GRADIENT = 1e-5, 3e-5  # of the largest entry; the peer computes in float32
D_MODEL = 24
NAMES = {
    "in_proj.weight": "in_proj.weight",
    "conv1d.weight": "conv.weight",
    "conv1d.bias": "conv.bias",
    "dt_bias": "dt_bias",
    "A_log": "A_log",
    "D": "D",
    "norm.weight": "norm.weight",
    "out_proj.weight": "out.weight",
}


def agree(ours: torch.Tensor, theirs: torch.Tensor, tolerance: float, what: str, floor: float = 0.0) -> None:
    error, largest = float((ours - theirs).detach().abs().max()), max(floor, float(theirs.detach().abs().max()))
    assert error <= tolerance * largest, f"{what}: {error:.2g} of {largest:.2g}"


def shaken(module: nn.Module) -> nn.Module:
    """Noise on every parameter: transformers starts with A = 1..heads, which the copy must not depend on."""
    r = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=r))
    return module.eval()


@pytest.fixture
def plain_transformers(monkeypatch: pytest.MonkeyPatch) -> Any:
    """transformers' Mamba2 without the fused kernels it takes from mamba-ssm where that is installed."""
    modeling = pytest.importorskip("transformers.models.mamba2.modeling_mamba2")
    for name in ("causal_conv1d_fn", "mamba2_chunk_scan"):
        if not hasattr(modeling, name):
            pytest.skip(f"this transformers has no function {name}")
        monkeypatch.setattr(modeling, name, inspect.unwrap(getattr(modeling, name)))
    return modeling


def transformers_config(modeling: Any, headdim: int, n_groups: int = 1) -> Any:
    return modeling.Mamba2Config(
        hidden_size=D_MODEL,
        state_size=8,
        num_hidden_layers=2,
        vocab_size=40,
        head_dim=headdim,
        num_heads=2 * D_MODEL // headdim,
        n_groups=n_groups,
        chunk_size=16,
        tie_word_embeddings=True,
    )


@pytest.mark.parametrize("length", [1, 2, 33])
@pytest.mark.parametrize(("headdim", "n_groups"), [(48, 1), (12, 1), (12, 2)])
def test_the_mixer_of_transformers(plain_transformers, length, headdim, n_groups):
    torch.manual_seed(0)
    config = transformers_config(plain_transformers, headdim, n_groups)
    theirs = shaken(plain_transformers.Mamba2Mixer(config, 0))
    ours = Mamba2(Mamba2Config(d_state=8, headdim=headdim, n_groups=n_groups), D_MODEL, "none")
    ours.load_state_dict({NAMES[name]: value for name, value in theirs.state_dict().items()})
    r = torch.Generator().manual_seed(length)
    x, weights = (torch.randn(2, length, D_MODEL, generator=r) for _ in range(2))
    outs, grads = [], []
    for module in (ours, theirs):
        leaf = x.clone().requires_grad_()
        leaves = dict(module.named_parameters()) | {"x": leaf}
        outs.append(module(leaf))
        values = torch.autograd.grad((outs[-1] * weights).sum(), list(leaves.values()))
        grads.append(dict(zip(leaves, values, strict=True)))
    agree(outs[0], outs[1], OUTPUT, "output")
    # The norm undoes what scales a lone head, so gradients of single numbers are sums that cancel.
    floor = 1e-2 * max(float(gradient.abs().max()) for gradient in grads[1].values())
    for name, gradient in grads[1].items():
        agree(grads[0][NAMES.get(name, name)], gradient, GRADIENT, f"gradient at {name}", floor)


def test_a_whole_model_of_transformers_with_its_norm_in_the_place_of_ours(plain_transformers):
    """Logits and gradients of Mamba2ForCausalLM. Its norms are RMSNorm, this package's LayerNorm: swapped here."""
    torch.manual_seed(0)
    config = transformers_config(plain_transformers, 12)
    theirs = shaken(plain_transformers.Mamba2ForCausalLM(config))
    shape = {
        "mixers": [Mamba2Config(d_state=8, headdim=12)],
        "n_layers": 2,
        "d_model": D_MODEL,
        "vocab_size": 40,
        "state_mixer": "none",
    }
    ours = HookedLM(ModelConfig.model_validate(shape)).eval()
    norms = {"blocks.0.ln1": "layers.0.norm", "blocks.1.ln1": "layers.1.norm", "ln_final": "norm_f"}
    names = {"embed.weight": "backbone.embeddings.weight"}
    for mine, their in norms.items():
        parent, _, name = mine.rpartition(".")
        setattr(ours.get_submodule(parent), name, nn.RMSNorm(D_MODEL, eps=config.layer_norm_epsilon))
        names[f"{mine}.weight"] = f"backbone.{their}.weight"
    for i in range(2):
        names |= {f"blocks.{i}.mixer.{mine}": f"backbone.layers.{i}.mixer.{their}" for their, mine in NAMES.items()}
    values = dict(theirs.named_parameters())
    ours.load_state_dict({mine: values[their] for mine, their in names.items()})

    tokens = torch.randint(40, (2, 21), generator=torch.Generator().manual_seed(0))
    logits = [ours(tokens), theirs(tokens).logits]
    agree(logits[0], logits[1], OUTPUT, "logits")
    for out in logits:
        out.log_softmax(-1)[..., 3].mean().backward()
    for name, parameter in ours.named_parameters():
        agree(parameter.grad, values[names[name]].grad, GRADIENT, f"gradient at {name}")
