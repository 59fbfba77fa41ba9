"""The decay of a model as tidy rows."""

import math

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn
from transformer_lens import HookedRootModule
from transformer_lens.hook_points import HookPoint

import circuitscope as cs
from circuitscope import models
from circuitscope.analysis.decay.gradient_reach import gradient_reach
from circuitscope.analysis.decay.layer_decay import layer_decay
from circuitscope.analysis.decay.rows import decay_rows
from circuitscope.analysis.decay.transition import transition_product
from circuitscope.errors import UserError

LENGTH, BATCH = 12, 4
TOKENS = torch.randint(0, 20, (BATCH, LENGTH), generator=torch.Generator().manual_seed(0))
COLUMNS = ["layer", "head", "factor", "quantity", "lag", "value", "stderr", "n"]
PER_HEAD = {"kappa", "kappa_r2", "power", "power_r2", "half_mass", "mean_distance", "off_diagonal"}


def build(name: str, **options) -> cs.HookedLM:
    return cs.model(name, **{"d_model": 32, "n_layers": 1, "vocab_size": 20, "max_length": LENGTH} | options)


def table(name: str, **options) -> pd.DataFrame:
    return pd.DataFrame(decay_rows(build(name), TOKENS, **options))


@pytest.mark.slow
def test_rows_of_a_mamba_are_complete():
    rows = table("mamba", factors=("phi", "composed"))
    assert list(rows.columns) == COLUMNS
    assert set(rows.factor) == {
        *("phi", "phi_without_D", "composed", "composed_without_D", "transition", "gradient"),
    }
    for factor in ("phi", "composed_without_D"):
        part = rows[rows.factor == factor]
        assert set(part[part["head"].notna()].quantity) == PER_HEAD
        assert (part[part["head"].notna()].groupby("quantity")["head"].nunique() == 64).all()
        summaries = {f"{name}_{word}" for name in PER_HEAD for word in ("q25", "median", "q75")}
        assert summaries <= set(part[part["head"].isna()].quantity)
        assert part[part.quantity == "profile"].lag.tolist() == list(range(LENGTH))
        assert part[part.quantity == "length"].value.tolist() == [LENGTH]
    by_lag = rows[rows.quantity.isin(["transition_norm", "transition_rms_median", "gradient_reach"])]
    assert (by_lag.groupby("quantity").lag.nunique() == LENGTH).all()
    assert not rows.duplicated(["layer", "head", "factor", "quantity", "lag"]).any()


def test_rows_hold_what_the_functions_give():
    model = build("gated_deltanet", n_heads=2)
    rows = pd.DataFrame(decay_rows(model, TOKENS, probes=3, seed=5))

    def values(quantity: str, column: str = "value") -> list[float]:
        return rows[rows.quantity == quantity][column].tolist()

    found = layer_decay(model, TOKENS, 0).whole
    assert values("kappa_r2") == found.numbers["kappa_r2"][0].tolist()
    assert values("mean_distance") == found.numbers["mean_distance"][0].tolist()
    assert values("mean_distance", "stderr") == found.numbers["mean_distance"][1].tolist()
    assert values("off_diagonal_median") == [found.summary["off_diagonal_median"][0]]
    assert values("profile") == found.mean_profile[0].tolist()
    transition = transition_product(model, TOKENS, 0)
    assert values("transition_norm") == transition.norm.layer.tolist()
    assert values("transition_norm_median") == transition.norm.value.quantile(0.5, 0).tolist()
    assert values("time_constant") == transition.time_constant.tolist()
    reach = gradient_reach(model, TOKENS, 0, probes=3, seed=5)
    assert values("gradient_reach") == reach.norm.tolist()
    assert values("gradient_reach", "n") == reach.n.tolist()


def test_mamba_against_deltanet_the_transition_falls_in_one_and_not_in_the_other():
    """What the comparison rests on: Φ falls with the lag in both, at random weights."""
    norms, falls = {}, {}
    tokens = torch.randint(0, 20, (64, LENGTH), generator=torch.Generator().manual_seed(1))
    for name in ("mamba", "deltanet"):
        rows = pd.DataFrame(decay_rows(build(name), tokens, probes=0))
        norms[name] = rows[rows.quantity == "transition_norm"].set_index("lag").value
        falls[name] = rows[rows.quantity == "kappa_median"].value.iloc[0]
    assert falls["mamba"] > 0
    assert falls["deltanet"] > 0
    assert (norms["deltanet"] == 1).all()
    assert (norms["mamba"].diff().dropna() < 0).all()
    assert norms["mamba"].iloc[-1] < 0.95


@pytest.mark.slow
@pytest.mark.parametrize("name", models.names())
def test_every_preset_has_rows_and_no_infinite_ones(name):
    model = build(name, n_layers=2)
    rows = pd.DataFrame(decay_rows(model, TOKENS))
    assert set(rows.layer) == set(range(model.config.n_layers))
    assert not rows.value.isin([math.inf, -math.inf]).any()
    fits = rows.quantity.str.startswith(("kappa", "power"))
    assert rows[~fits].value.notna().all()
    for layer, mixer in enumerate(model.config.mixers):
        factors = set(rows[rows.layer == layer].factor)
        has_transition = mixer.name not in ("attention", "based", "gated_conv", "hyena", "lstm")
        assert ("transition" in factors) == has_transition
        assert ("phi" in factors) == (mixer.name != "lstm")


class Shown(HookedRootModule):
    """Another's model whose only layer has these matrices."""

    def __init__(self, matrices):
        super().__init__()
        self.matrices = matrices
        self.blocks = nn.ModuleList([nn.ModuleDict({"attn": nn.ModuleDict({"hook_pattern": HookPoint()})})])
        self.setup()

    def forward(self, tokens):
        return self.blocks[0]["attn"]["hook_pattern"](self.matrices.expand(len(tokens), -1, -1, -1))


def decay_of_matrices(matrices) -> pd.DataFrame:
    tokens = torch.zeros(2, matrices.shape[-1], dtype=torch.long)
    return pd.DataFrame(decay_rows(Shown(matrices), tokens, probes=0))


def test_a_rate_is_in_the_table_where_its_fit_holds_and_its_r2_everywhere():
    """Of 4 heads two fall exponentially; noise of a third and a fourth fits nothing."""
    lag = torch.arange(16)[:, None] - torch.arange(16)
    noise = torch.rand(4, 16, 16, generator=torch.Generator().manual_seed(0))
    matrices = torch.stack([torch.exp(-rate * lag.clamp(min=0)) for rate in (0.2, 0.5, 0.0, 0.0)])
    matrices[2:] = torch.exp(3 * noise[2:])
    found = decay_of_matrices(matrices.tril())
    by_head = {quantity: found[found.quantity == quantity].value for quantity in ("kappa", "kappa_r2")}
    np.testing.assert_allclose(by_head["kappa"], [0.2, 0.5, np.nan, np.nan], atol=1e-6)
    assert (by_head["kappa_r2"].iloc[2:] < 0.8).all()
    quartiles = {q: found[found.quantity == f"kappa_{q}"].value.item() for q in ("q25", "median", "q75")}
    assert quartiles == pytest.approx({"q25": 0.275, "median": 0.35, "q75": 0.425}, abs=1e-6)
    fewer = decay_of_matrices(matrices[1:].tril())  # one of three
    assert fewer[fewer.quantity == "kappa_median"].value.isna().all()
    assert fewer[fewer.quantity == "kappa_r2_median"].value.notna().all()


def test_a_gated_conv_too_narrow_for_a_fit_has_no_rate():
    rows = pd.DataFrame(decay_rows(build("based", n_layers=2), TOKENS, layers=[0], probes=0))
    assert rows[rows.quantity == "kappa"].value.isna().all()
    assert rows[rows.quantity == "off_diagonal"].value.notna().all()


def test_only_what_is_asked_for():
    model = build("mamba", n_layers=3)
    rows = pd.DataFrame(decay_rows(model, TOKENS, layers=[-1], factors=["conv"], probes=0))
    assert set(rows.layer) == {2}
    assert set(rows.factor) == {"conv", "transition"}


def test_layers_of_a_hybrid_leave_out_factors_they_lack():
    rows = pd.DataFrame(decay_rows(build("mambaformer", n_heads=2), TOKENS, factors=["phi", "conv"], probes=0))
    assert set(rows[rows.factor == "conv"].layer) == {0, 2}
    assert set(rows[rows.factor == "phi"].layer) == {0, 1, 2}


def test_a_factor_that_no_layer_has_is_refused():
    with pytest.raises(UserError, match="unknown factor 'cnov'; did you mean 'conv'"):
        decay_rows(build("mamba"), TOKENS, factors=["cnov"])


@pytest.mark.parametrize("length", [1, 2])
@pytest.mark.parametrize("name", ["mamba", "mamba2", "deltanet", "rwkv", "attention", "s4"])
def test_short_sequences_have_rows(name, length):
    rows = pd.DataFrame(decay_rows(build(name), TOKENS[:, :length]))
    assert rows[rows.quantity == "kappa"].value.isna().all()
    assert rows[rows.quantity == "gradient_reach"].lag.tolist() == list(range(length))
