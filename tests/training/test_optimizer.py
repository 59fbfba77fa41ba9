"""AdamW decays matrices alone, and its moments survive being saved."""

import pytest
import torch
from torch import nn

import circuitscope as cs
from circuitscope.config import RunConfig
from circuitscope.config.train import TrainConfig
from circuitscope.errors import UserError
from circuitscope.models.hooked_lm import HookedLM
from circuitscope.training.optimizer import (
    gradient_norms,
    make_optimizer,
    moments_of,
    parameter_groups,
    restore_moments,
)
from circuitscope.training.trainer import train
from tiny_run import tiny


def one_update(model, optimizer, seed):
    torch.manual_seed(seed)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()


def decayed(model):
    """Names of the parameters that shrink when the gradient is zero."""
    optimizer = make_optimizer(model, TrainConfig(weight_decay=0.5, lr=0.1))
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name]) or torch.allclose(parameter, before[name] * 0.95)
    return {n for n, p in model.named_parameters() if not torch.equal(p, before[n])}


def test_only_matrices_decay():
    model = HookedLM(tiny().model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)  # biases start at zero, where decay would not show
    matrices = {n for n, p in model.named_parameters() if p.ndim >= 2}
    assert decayed(model) == matrices
    others = {n for n, _ in model.named_parameters()} - matrices
    assert any("ln" in n for n in others)
    assert any("bias" in n for n in others)


def test_a_parameter_marked_exempt_does_not_decay():
    model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
    model[0].weight.no_weight_decay = True
    assert decayed(model) == {"1.weight"}


def test_every_parameter_is_optimized_once():
    model = HookedLM(tiny().model)
    listed = [id(p) for g in make_optimizer(model, TrainConfig()).param_groups for p in g["params"]]
    assert len(listed) == len(set(listed))
    assert set(listed) == {id(p) for p in model.parameters()}


def test_on_a_cpu_the_fused_kernel_runs_and_agrees_with_the_plain_one():
    one, two = (HookedLM(tiny().model) for _ in range(2))
    fused, plain = make_optimizer(one, TrainConfig()), make_optimizer(two, TrainConfig())
    assert all(g["fused"] for g in fused.param_groups)
    for group in plain.param_groups:
        group["fused"] = False
        group["foreach"] = False
    plain.defaults["fused"] = False
    for seed in range(5):
        one_update(one, fused, seed)
        one_update(two, plain, seed)
    for a, b in zip(one.parameters(), two.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("updates", [1, 3])
def test_restored_moments_continue_to_the_same_bits(updates):
    one, two = (HookedLM(tiny().model) for _ in range(2))
    first = make_optimizer(one, TrainConfig())
    for seed in range(updates):
        one_update(one, first, seed)
    kept = {n: t.clone() for n, t in moments_of(first, one).items()}
    assert set(kept) == {f"{m}.{n}" for m in ("first", "second") for n, _ in one.named_parameters()}

    two.load_state_dict({n: t.clone() for n, t in one.state_dict().items()})
    second = make_optimizer(two, TrainConfig())
    restore_moments(second, two, kept, updates)
    for seed in range(10, 13):
        one_update(one, first, seed)
        one_update(two, second, seed)
    for a, b in zip(one.parameters(), two.parameters(), strict=True):
        assert torch.equal(a, b)
    after, also = moments_of(first, one), moments_of(second, two)
    assert all(torch.equal(after[n], also[n]) for n in after)


def test_the_step_count_matters_to_the_next_update():
    """Guards the test above: AdamW's bias correction makes a wrong step count visible."""
    one, two = (HookedLM(tiny().model) for _ in range(2))
    first = make_optimizer(one, TrainConfig())
    one_update(one, first, 0)
    two.load_state_dict({n: t.clone() for n, t in one.state_dict().items()})
    second = make_optimizer(two, TrainConfig())
    restore_moments(second, two, {n: t.clone() for n, t in moments_of(first, one).items()}, 5)
    one_update(one, first, 1)
    one_update(two, second, 1)
    assert not all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True))


def test_groups_of_parameters_have_factors_of_the_rate_and_the_last_match_counts():
    model = cs.model("mamba", d_model=8, n_layers=2, vocab_size=16)
    config = TrainConfig(lr_groups={"blocks.*": 0.5, "*.A_log": 0.1})
    by_parameter = {
        id(p): group["factor"] for group in make_optimizer(model, config).param_groups for p in group["params"]
    }
    factors = {name: by_parameter[id(p)] for name, p in model.named_parameters()}
    assert factors["blocks.1.mixer.ssm.A_log"] == 0.1
    assert factors["blocks.1.mixer.ssm.D"] == 0.5
    assert factors["embed.weight"] == 1.0


def test_a_factor_of_zero_holds_a_parameter_still(tmp_path):
    config = RunConfig.parse(
        {
            "model": {"preset": "mamba", "d_model": 8, "n_layers": 1},
            "task": {"length": 16, "pairs": 2, "vocab_size": 64},
            "train": {"steps": 3, "batch_size": 4, "eval_every": 3, "eval_batches": 1, "lr_groups": {"*.A_log": 0}},
        }
    )
    run = train(config, root=tmp_path)
    before, after = run.load(0).state_dict(), run.load(3).state_dict()
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert not any(name.endswith("A_log") for name in moved)
    assert any(name.endswith("dt_proj.weight") for name in moved)


def test_a_pattern_that_matches_nothing_is_refused_before_there_is_a_run(tmp_path):
    config = RunConfig.parse({"train": {"steps": 3, "lr_groups": {"*.A_log": 0.1}}})
    with pytest.raises(UserError, match=r"no parameter matches '\*\.A_log'"):
        train(config, root=tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_group_holds_the_parameters_of_all_layers_that_play_the_same_part():
    config = RunConfig.build("mamba", "mqar", length=16, pairs=2, vocab_size=64, d_model=8, n_layers=2)
    model = HookedLM(config.model)
    groups = parameter_groups(model)
    assert {"embed", "conv", "in_proj", "out", "ssm.A_log", "ssm.dt_proj", "ln1", "ln_final", "mlp.into"} <= set(groups)
    named = {id(parameter): name for name, parameter in model.named_parameters()}
    assert sorted(named[id(p)] for p in groups["conv"]) == [
        f"blocks.{i}.mixer.conv.{part}" for i in (0, 1) for part in ("bias", "weight")
    ]
    assert sorted(id(p) for several in groups.values() for p in several) == sorted(named)  # each in one group
    hyena = RunConfig.build("hyena", "mqar", length=16, pairs=2, vocab_size=64, d_model=8)
    assert "filter.layers" in parameter_groups(HookedLM(hyena.model))


def test_norms_by_group_are_those_of_the_gradients_put_together():
    config = RunConfig.build("mamba", "mqar", length=16, pairs=2, vocab_size=64, d_model=8, n_layers=2)
    model = HookedLM(config.model)
    config.task.loss(model, config.task.batch(0, size=4))[0].backward()
    groups = parameter_groups(model)
    norms = dict(zip(groups, gradient_norms(groups).tolist(), strict=True))
    whole = torch.cat([block.mixer.ssm.A_log.grad.flatten() for block in model.layers])
    assert norms["ssm.A_log"] == pytest.approx(whole.norm().item(), rel=1e-5)
    total = torch.nn.utils.clip_grad_norm_(model.parameters(), float("inf")).item()
    assert sum(n**2 for n in norms.values()) == pytest.approx(total**2, rel=1e-5)


def test_decay_on_all_spares_nothing():
    model = cs.model("mamba", n_layers=1, d_model=16)
    (group,) = make_optimizer(model, TrainConfig(weight_decay=0.5, decay_on="all")).param_groups
    assert group["weight_decay"] == 0.5
    assert {id(p) for p in group["params"]} == {id(p) for p in model.parameters()}
