"""Mamba with the weights of transformers' and of mambapy's gives their outputs, logits and gradients."""

import inspect
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from circuitscope.mixers.mamba import Mamba, MambaConfig
from circuitscope.models.config import ModelConfig
from circuitscope.models.hooked_lm import HookedLM

RELATIVE = 1e-5  # of the largest entry; both peers compute in float32
D_MODEL = 24
NAMES = {
    "in_proj.weight": "in_proj.weight",
    "conv1d.weight": "conv.weight",
    "conv1d.bias": "conv.bias",
    "x_proj.weight": "ssm.x_proj.weight",
    "dt_proj.weight": "ssm.dt_proj.weight",
    "dt_proj.bias": "ssm.dt_proj.bias",
    "A_log": "ssm.A_log",
    "D": "ssm.D",
    "out_proj.weight": "out.weight",
}


def agree(ours: Tensor, theirs: Tensor, what: str = "") -> None:
    error, largest = float((ours - theirs).detach().abs().max()), float(theirs.detach().abs().max())
    assert error <= RELATIVE * largest, f"{what}: {error:.2g} of {largest:.2g}"


def shaken(module: nn.Module, seed: int) -> nn.Module:
    """Noise on every parameter, so that none is a constant."""
    r = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=r))
    return module.eval()


def compare_mixers(ours: nn.Module, theirs: nn.Module, names: dict[str, str], length: int) -> None:
    """Same input, same output, same gradients of the input and of every weight."""
    ours.load_state_dict({names[name]: value for name, value in theirs.state_dict().items()})
    r = torch.Generator().manual_seed(length)
    x, weights = (torch.randn(2, length, D_MODEL, generator=r) for _ in range(2))
    grads: list[tuple[Tensor, dict[str, Tensor]]] = []
    outs = []
    for module in (ours, theirs):
        leaf = x.clone().requires_grad_()
        out = module(leaf)
        outs.append(out)
        leaves = dict(module.named_parameters()) | {"x": leaf}
        values = torch.autograd.grad((out * weights).sum(), list(leaves.values()))
        grads.append((out, dict(zip(leaves, values, strict=True))))
    agree(outs[0], outs[1], "output")
    for name, theirs_grad in grads[1][1].items():
        agree(grads[0][1][names.get(name, name)], theirs_grad, f"gradient at {name}")


@pytest.fixture
def plain_transformers(monkeypatch: pytest.MonkeyPatch) -> Any:
    """transformers' Mamba without the fused kernels it takes from mamba-ssm where that is installed."""
    modeling = pytest.importorskip("transformers.models.mamba.modeling_mamba")
    for name in ("causal_conv1d_fn", "mamba_selective_scan"):
        if not hasattr(modeling, name):
            pytest.skip(f"this transformers has no function {name}")
        monkeypatch.setattr(modeling, name, inspect.unwrap(getattr(modeling, name)))
    return modeling


def transformers_config(modeling: Any, **options: Any) -> Any:
    sizes = {"hidden_size": D_MODEL, "state_size": 8, "num_hidden_layers": 2, "vocab_size": 40, "use_mambapy": False}
    return modeling.MambaConfig(**sizes | options)


@pytest.mark.parametrize("length", [1, 2, 33])
@pytest.mark.parametrize("options", [{}, {"expand": 3, "conv_kernel": 3, "time_step_rank": 5}])
def test_the_mixer_of_transformers(plain_transformers, length, options):
    torch.manual_seed(0)
    theirs = shaken(plain_transformers.MambaMixer(transformers_config(plain_transformers, **options), 0), 1)
    sizes = {"expand": "expand", "conv_kernel": "conv_width", "time_step_rank": "dt_rank"}
    ours = Mamba(MambaConfig(d_state=8, **{sizes[k]: v for k, v in options.items()}), D_MODEL, "none")
    compare_mixers(ours, theirs, NAMES, length)


@pytest.mark.parametrize("pscan", [True, False])
@pytest.mark.parametrize("length", [1, 2, 33])
def test_the_block_of_mambapy(length, pscan):
    mambapy = pytest.importorskip("mambapy.mamba")
    torch.manual_seed(0)
    config = mambapy.MambaConfig(d_model=D_MODEL, n_layers=1, d_state=8, pscan=pscan)
    compare_mixers(Mamba(MambaConfig(d_state=8), D_MODEL, "none"), shaken(mambapy.MambaBlock(config), 2), NAMES, length)


def test_a_whole_model_of_transformers_with_its_norm_in_the_place_of_ours(plain_transformers):
    """Logits and gradients of MambaForCausalLM. Its norms are RMSNorm, this package's LayerNorm: swapped here."""
    torch.manual_seed(0)
    config = transformers_config(plain_transformers, tie_word_embeddings=True)
    theirs = shaken(plain_transformers.MambaForCausalLM(config), 3)
    shape = {
        "mixers": [MambaConfig(d_state=8)],
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
    agree(logits[0], logits[1], "logits")
    for out in logits:
        out.log_softmax(-1)[..., 3].mean().backward()
    for name, parameter in ours.named_parameters():
        agree(parameter.grad, values[names[name]].grad, f"gradient at {name}")
