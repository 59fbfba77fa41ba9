"""The identity of a run: what counts, what does not, and ten digests that stay."""

import json
from pathlib import Path
from typing import Annotated

import pytest
from pydantic import Field

import circuitscope as cs
from circuitscope.config import RunConfig, TrainConfig, differ_in_seed_alone, differences
from circuitscope.config.identity import digest
from circuitscope.mixers.mamba import MambaConfig
from circuitscope.models.config import ModelConfig
from circuitscope.runs.run import create_run
from circuitscope.section import Added
from circuitscope.tasks.mqar import MQAR

TEN = [json.loads(line) for line in Path(__file__).with_name("ten_runs.jsonl").read_text().splitlines()]


def other(**options) -> bool:
    """Whether these options make another run of the default one."""
    return RunConfig.build(**options).digest != RunConfig().digest


@pytest.mark.parametrize("run", TEN, ids=lambda run: run["digest"])
def test_a_digest_stays_what_it_is(run):
    """The configs are complete, so neither a new default nor a new field that is marked `Added` may change one."""
    assert RunConfig.parse(run["config"]).digest == run["digest"]


def test_the_ten_configs_hold_every_mixer_and_task_so_that_an_unmarked_new_field_is_seen():
    configs = [RunConfig.parse(run["config"]) for run in TEN]
    mixers = {m: cs.mixers.config_class(m) for m in cs.mixers.names()}
    tasks = {t: cs.tasks.TASKS[t] for t in cs.tasks.names()}
    ours = {name for name, kind in (mixers | tasks).items() if kind.__module__.startswith("circuitscope.")}
    assert {m.name for c in configs for m in c.model.mixers} | {c.task.name for c in configs} == ours


@pytest.mark.parametrize(
    "options",
    [
        {"save_every": 7},
        {"save_schedule": "log"},
        {"resume_every": 7},
        {"keep_resume": 7},
        {"log_every": 7},
        {"eval_every": 7},
        {"eval_batches": 7},
        {"eval_batch_size": 7},
        {"device": "cpu"},
        {"threads": 1},
        {"tensorboard": True},
        {"wandb": "project"},
        {"data_seed": 0},
    ],
    ids=str,
)
def test_what_changes_no_weight_is_left_out(options):
    assert not other(**options)


def test_every_field_of_training_is_in_the_digest_or_known_to_have_no_effect():
    counted = {"steps", "batch_size", "lr", "schedule", "warmup", "weight_decay", "beta1", "beta2", "clip", "precision"}
    counted |= {"warmup_steps", "lr_groups", "schedule_every", "decay_on"}  # where they are not as before
    assert TrainConfig().without_effect() == set(TrainConfig.model_fields) - counted - {"seed", "data_seed"}


@pytest.mark.parametrize(
    "options",
    [
        {"lr": 0.1},
        {"steps": 7},
        {"seed": 1},
        {"data_seed": 1},
        {"clip": None},
        {"d_model": 32},
        {"n_heads": 2},
        {"pairs": 2},
        {"vocab_size": 100},
        {"model": "mamba"},
        {"task": "ar"},
    ],
    ids=str,
)
def test_what_changes_the_weights_makes_another_run(options):
    assert other(**options)


def test_evaluation_counts_where_it_ends_the_run():
    stopped = [RunConfig.build(early_stop=0.9, eval_every=n).digest for n in (10, 10, 20)]
    assert stopped[0] == stopped[1] != stopped[2]
    assert other(early_stop=0.9)
    assert RunConfig.build(early_stop=0.9, save_every=7, threads=1, eval_every=10).digest == stopped[0]


def test_the_way_a_config_was_given_makes_no_difference(tmp_path):
    config = RunConfig.build("mamba", n_layers=1, lr=1e-3, weight_decay=1)
    mapping = {"model": {"mixers": [{"name": "mamba"}], "n_layers": 1}, "train": {"lr": "1e-3", "weight_decay": 1.0}}
    assert RunConfig.parse(mapping).digest == config.digest
    run = create_run(config, root=tmp_path, name="any")
    assert run.digest == config.digest
    assert create_run(config, root=tmp_path, name="other").digest == config.digest


# A field that is added later.


class LaterTrain(TrainConfig):
    """Training as it may be one day: by default something new, at False as before."""

    ema: Annotated[bool, Added(2, before=False)] = True


class LaterMamba(MambaConfig):
    skip: Annotated[float | None, Added(2, before=None)] = Field(default=0.5, gt=0)


class LaterTask(MQAR):
    haze: Annotated[float, Added(2, before=0.0)] = Field(default=0.0, ge=0)


class LaterRun(RunConfig):
    interventions: Annotated[tuple[str, ...], Added(2, before=())] = ()


def later(ema: bool = False, skip: float | None = None, noise: float = 0.0, interventions: tuple = ()) -> str:
    """The digest of the config of `now`, by the classes that have one more field each."""
    model = ModelConfig(mixers=(LaterMamba(skip=skip),), n_layers=1)
    train, task = LaterTrain(ema=ema, lr=0.5), LaterTask(haze=noise)
    return digest(LaterRun(model=model, task=task, train=train, interventions=interventions))


def test_a_field_that_is_added_later_changes_no_digest_of_before_and_counts_at_any_other_value():
    now = RunConfig.build("mamba", n_layers=1, lr=0.5, recipe="plain").digest
    assert later() == now
    assert len({now, later(ema=True), later(skip=0.5), later(noise=0.1), later(interventions=("a",))}) == 5


def test_a_default_that_changes_leaves_the_digest_of_a_complete_config_alone():
    class Faster(TrainConfig):
        lr: float = 0.5

    before = RunConfig()
    saved = before.train.model_dump()
    assert RunConfig(train=Faster.model_validate(saved)).digest == before.digest
    assert RunConfig(train=Faster()).digest != before.digest


# Differing in the seed alone.


def test_runs_differ_in_the_seed_alone_where_seeds_differ_and_nothing_else_that_counts():
    one = RunConfig.build(seed=1)
    for options in ({"seed": 2}, {"seed": 1, "data_seed": 2}, {"seed": 2, "save_every": 7, "threads": 1}):
        assert differ_in_seed_alone(one, RunConfig.build(**options)), options
    for options in ({"seed": 1}, {"seed": 1, "data_seed": 1}, {"seed": 1, "save_every": 7}, {"seed": 2, "lr": 0.1}):
        assert not differ_in_seed_alone(one, RunConfig.build(**options)), options


# What differs.


def test_what_differs_is_told_by_field_with_the_value_in_each_config():
    build = RunConfig.build
    assert differences([build(seed=1), build(seed=2), build(seed=2)]) == {"train.seed": [1, 2, 2]}
    assert differences([build(lr=0.1, n_heads=2), build(lr=0.2)]) == {
        "model.mixers.n_heads": [2, 1],
        "train.lr": [0.1, 0.2],
    }
    assert differences([build(seed=1, data_seed=5), build(seed=2, data_seed=6)]) == {
        "train.seed": [1, 2],
        "train.data_seed": [5, 6],
    }
    assert differences([build(mixers="mamba,attention", recipe="plain"), build(n_layers=3, recipe="plain")]) == {
        "model.mixers": [["mamba", "attention"], "attention"],
        "model.n_layers": [2, 3],
    }
    assert differences([build(), build(early_stop=0.9)]) == {"train.early_stop": [None, 0.9]}
    assert differences([build(), build(save_every=7, threads=1)]) == {}
    assert differences([build()]) == {}


def test_what_follows_from_another_field_is_no_difference():
    """The task gives vocabulary and length; the mixers give positions and initialization, and have their own fields."""
    one = RunConfig.build(vocab_size=64, recipe="plain")
    other = RunConfig.build("mamba", vocab_size=32, length=16, n_layers=2, recipe="plain")
    found = differences([one, other])
    assert found == {"model.mixers": ["attention", "mamba"], "task.length": [64, 16], "task.vocab_size": [64, 32]}
    chosen = RunConfig.build("mamba", vocab_size=64, positions="learned", init="gpt2", rescale_residual=False)
    assert "model.positions" not in differences([one, chosen])  # they are the same
    assert "model.positions" in differences([other, chosen])
