"""config.yaml says its version, and files of earlier versions are read as what they meant."""

from typing import Annotated

import pytest
import yaml

import circuitscope as cs
from circuitscope.config import RunConfig, schema
from circuitscope.config.train import TrainConfig
from circuitscope.mixers.attention import AttentionConfig
from circuitscope.section import Added

UNVERSIONED = """\
model:
  mixers:
  - name: attention
    n_heads: 2
    qkv_bias: true
    conv_on: k
    conv_width: 4
    conv_activation: false
  n_layers: 1
  d_model: 32
  positions: learned
  state_mixer: mlp
  mlp_ratio: 4
  init: gpt2
  embed_std: 0.02
  rescale_residual: false
  tied: true
  norm_eps: 1.0e-05
  vocab_size: 8192
  max_length: 64
task:
  name: mqar
  version: 1
  vocab_size: 8192
  examples: 20000
  length: 64
  pairs: 8
  queries: null
  filler: clean
  shared_vocabulary: false
  power: 0.01
  slots_in_draw_order: false
train:
  steps: 1500
  batch_size: 64
  lr: 0.003
  schedule: constant
  warmup: 0.1
  weight_decay: 1.0
  beta1: 0.9
  beta2: 0.999
  clip: 1.0
  seed: 0
  data_seed: null
  eval_every: 50
  eval_batches: 8
  eval_batch_size: 64
  log_every: 10
  early_stop: null
  save_every: 100
  save_schedule: every
  resume_every: 250
  keep_resume: 4
  device: auto
  threads: null
  precision: auto
  tensorboard: false
  wandb: null
"""


@pytest.fixture
def unversioned(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text(UNVERSIONED)
    return path


def test_a_config_says_its_version_in_the_first_line():
    assert RunConfig().dump().splitlines()[0] == f"schema: {schema.VERSION}"


def test_a_config_without_a_version_is_read_as_version_one(unversioned):
    config = RunConfig.load(unversioned)
    given, read = yaml.safe_load(UNVERSIONED), yaml.safe_load(config.dump())
    (old,), (new,) = given["model"].pop("mixers"), read["model"].pop("mixers")
    assert new | old == new
    assert all(read[part] | fields == read[part] for part, fields in given.items())
    assert cs.Run(unversioned.parent).digest == config.digest == "d3857ae095f1"


@pytest.mark.parametrize("version", [schema.VERSION + 1, 1000, 10**30])
def test_a_version_from_the_future_is_one_line_that_says_what_to_do(version, tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text(f"schema: {version}\n{UNVERSIONED}later: true\n")
    what = rf"config\.yaml: schema: .*version .*up to {schema.VERSION}; install a newer release$"
    with pytest.raises(cs.UserError, match=what):
        RunConfig.load(path)


@pytest.mark.parametrize("version", [0, -1, True, None, "1", 1.0, [1]])
def test_what_is_no_version_is_refused(version):
    with pytest.raises(cs.UserError, match=rf"^schema: expected a version from 1 to {schema.VERSION}, got "):
        RunConfig.parse({"schema": version})


def test_a_later_version_upgrades_the_layout_before_anything_reads_it(unversioned, monkeypatch):
    """As if version 8 were to call `lr` what version 1 calls `rate`."""
    monkeypatch.setattr(schema, "VERSION", 8)
    monkeypatch.setitem(schema.UPGRADES, 8, lambda data: {**data, "train": {"lr": data["train"]["rate"]}})
    unversioned.write_text("train: {rate: 0.25}")
    assert RunConfig.load(unversioned, {"model.d_model": 32}).train.lr == 0.25
    assert RunConfig.parse({"schema": 7, "train": {"rate": 0.25}}).train.lr == 0.25
    assert RunConfig.parse({"schema": 8, "train": {"lr": 0.25}}).train.lr == 0.25
    assert RunConfig.parse({"train": {"lr": 0.25}}).train.lr == 0.25


def test_the_config_of_a_run_may_lack_only_what_its_version_did_not_have(unversioned, monkeypatch):
    """As if version 9 had brought `wandb`."""
    unversioned.write_text(UNVERSIONED.replace("  wandb: null\n", ""))
    with pytest.raises(cs.UserError, match=r"config\.yaml is incomplete: train\.wandb is missing; the config of a run"):
        cs.Run(unversioned.parent).config  # noqa: B018
    monkeypatch.setattr(schema, "VERSION", 9)
    monkeypatch.setitem(schema.UPGRADES, 9, lambda data: {**data, "train": {**data["train"], "wandb": None}})
    assert cs.Run(unversioned.parent).config.train.wandb is None


def test_a_file_older_than_a_field_means_what_was_before(unversioned, monkeypatch):
    class LaterTrain(TrainConfig):
        ema: Annotated[bool, Added(9, before=False)] = True

    class LaterAttention(AttentionConfig):
        sinks: Annotated[int, Added(9, before=0)] = 4

    monkeypatch.setattr(schema, "VERSION", 9)
    monkeypatch.setattr(schema, "TrainConfig", LaterTrain)
    monkeypatch.setattr(schema.mixers, "config_class", lambda name: LaterAttention)
    for data in (yaml.safe_load(UNVERSIONED), {"schema": 1, **yaml.safe_load(UNVERSIONED)}):
        given = repr(data)
        upgraded = schema.to_current(data)
        assert upgraded["train"]["ema"] is False
        assert upgraded["model"]["mixers"][0]["sinks"] == 0
        assert repr(data) == given
    assert schema.to_current({"train": {"ema": True}})["train"]["ema"] is True
    assert schema.to_current({})["train"]["ema"] is False
    assert "ema" not in schema.to_current({"schema": 9, **yaml.safe_load(UNVERSIONED)})["train"]


def test_positions_of_a_mixer_that_is_given_by_its_name_are_kept():
    data = {"schema": 1, "model": {"mixers": ["attention"], "positions": "rope"}}
    assert RunConfig.parse(data).model.positions == "rope"
