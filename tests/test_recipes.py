"""Recipes fill in what nobody gave, and leave no trace but plain values."""

import math

import pytest
import yaml

import circuitscope as cs
from circuitscope.config import RunConfig, override, recipes
from circuitscope.config.recipes import FAMILIES, RECIPES, Recipe, Rule
from circuitscope.models.config import ModelConfig
from circuitscope.models.presets import PRESETS
from circuitscope.sweeps.grid import make_grid
from circuitscope.tasks.mqar import MQAR
from tiny_run import tiny


@pytest.fixture
def made_up(monkeypatch):
    """Recipes whose values differ from every default, one by a rule."""
    steps = Rule("a step per pair and per example of a batch", lambda s: s.task.pairs * s.train.batch_size)
    fields = {"train.lr": 0.25, "train.weight_decay": 0.5, "task.examples": None, "train.steps": steps}
    monkeypatch.setitem(RECIPES, "mamba", Recipe("made up", fields))
    monkeypatch.setitem(RECIPES, "attention", Recipe("made up", {"train.lr": 0.125, "model.embed_std": 0.5}))


def test_every_field_of_every_recipe_exists_and_every_mixer_and_preset_has_a_recipe():
    mixer_fields = {f for name in cs.mixers.MIXERS.own() for f in cs.mixers.config_class(name).model_fields}
    known = {
        "train": set(recipes.TrainConfig.model_fields),
        "model": set(ModelConfig.model_fields),
        "mixer": mixer_fields,
        "task": {"examples"},
    }
    for name, recipe in RECIPES.items():
        for path in recipe.fields:
            section, _, field = path.partition(".")
            assert field in known[section], (name, path)
    assert FAMILIES.keys() == set(cs.mixers.MIXERS.own())
    assert set(FAMILIES.values()) <= RECIPES.keys()
    for preset in PRESETS:
        assert recipes.words({"model": preset}).startswith("recipe: "), preset


@pytest.mark.parametrize("name", sorted(set(FAMILIES.values())))
def test_a_model_with_a_recipe_of_its_own_takes_it_and_says_so(name):
    assert recipes.words({"model": name}) == f"recipe: {name}"
    assert recipes.words({"model": {"preset": name, "n_layers": 1}}) == f"recipe: {name}"
    config = RunConfig.build(name)
    for path, value in RECIPES[name].fields.items():
        section, _, field = path.partition(".")
        if section in ("train", "task") and not isinstance(value, Rule):
            assert getattr(getattr(config, section), field) == value


def test_other_models_take_the_recipe_of_their_first_mixer_and_are_called_untuned():
    for model in ("rwkv", "mamba_no_conv", "mambaformer", "mamba,attention", {"mixers": ["s6"]}):
        assert recipes.words({"model": model}) == "recipe: mamba, untuned for this model"
    assert recipes.words({"model": "standard_hybrid"}) == "recipe: attention, untuned for this model"


def test_what_is_given_wins_over_the_recipe_and_the_recipe_over_defaults(made_up, tmp_path):
    path = tmp_path / "some.yaml"
    path.write_text("model: mamba\ntrain: {weight_decay: 0.75}\ntask: {pairs: 8}\n")
    by_file = RunConfig.load(path, {"train.batch_size": 10})
    by_options = RunConfig.build("mamba", weight_decay=0.75, pairs=8, batch_size=10)
    by_data = RunConfig.parse(
        {"model": {"mixers": "mamba"}, "train": {"weight_decay": 0.75, "batch_size": 10}, "task": {"pairs": 8}}
    )
    assert by_file.digest == by_options.digest == by_data.digest
    assert (by_file.train.lr, by_file.train.weight_decay, by_file.train.steps) == (0.25, 0.75, 80)
    assert by_file.task.examples is None
    assert RunConfig.build("mamba", examples=7, steps=3).task.examples == 7
    assert RunConfig().train.lr == 0.125


def test_plain_means_the_defaults_of_the_fields_and_a_name_means_that_recipe(made_up):
    plain = recipes.TrainConfig()
    assert RunConfig.build("mamba", recipe="plain").train == plain
    assert RunConfig.parse({"recipe": "plain"}).train == plain
    assert RunConfig.parse({"recipe": "mamba"}).train.lr == 0.25
    assert RunConfig.parse({"recipe": "auto"}) == RunConfig()


def test_the_recipe_of_a_task_wins_over_that_of_the_model(made_up, monkeypatch):
    monkeypatch.setattr(MQAR, "recipe", {"train.lr": 0.375, "train.seed": 9})
    config = RunConfig.build("mamba")
    assert (config.train.lr, config.train.seed, config.train.weight_decay) == (0.375, 9, 0.5)
    assert RunConfig.build("mamba", lr=0.5).train.lr == 0.5
    assert RunConfig.build("mamba", recipe="plain").train.lr == 0.001
    assert recipes.words({"model": "mamba"}) == "recipe: mamba, and that of the task mqar"


def test_objects_and_complete_configs_are_left_alone(made_up, tmp_path):
    train, task = recipes.TrainConfig(), cs.task("mqar")
    assert RunConfig(model=ModelConfig(mixers=["mamba"]), task=task, train=train).train == train
    assert RunConfig.build("mamba", task).task == task
    path = tmp_path / "config.yaml"
    for version in (3, 2, 1):
        config = yaml.safe_load(RunConfig.build("mamba", recipe="plain").dump()) | {"schema": version}
        if version < 3:
            for field in ("schedule_every", "decay_on"):
                del config["train"][field]
        path.write_text(yaml.safe_dump(config))
        assert RunConfig.load(path) == RunConfig.load_complete(path) == RunConfig.build("mamba", recipe="plain")
        assert recipes.words(config) == ""


def test_a_field_that_came_later_can_come_from_a_recipe_unless_the_file_is_complete(monkeypatch, tmp_path):
    monkeypatch.setitem(RECIPES, "mamba", Recipe("made up", {"train.warmup_steps": 5, "train.decay_on": "all"}))
    path = tmp_path / "some.yaml"
    path.write_text("model: mamba\n")
    assert (RunConfig.load(path).train.warmup_steps, RunConfig.load(path).train.decay_on) == (5, "all")
    path.write_text("model: mamba\nrecipe: plain\n")
    assert RunConfig.load(path).train.warmup_steps is None
    assert RunConfig.build("mamba", warmup=0.5).train.warmup_steps is None  # it would win over the warmup given
    complete = yaml.safe_load(RunConfig.build("mamba", recipe="plain").dump())
    del complete["schema"], complete["train"]["warmup_steps"], complete["train"]["decay_on"]
    path.write_text(yaml.safe_dump(complete))
    assert RunConfig.load(path).train.warmup_steps is None


def test_options_of_mixers_do_not_make_the_fields_of_a_preset_count_as_given():
    for changes in ({}, {"model.mixers.1.n_heads": 2}):
        config = RunConfig.parse(override({}, {"recipe": "zoology", "model.preset": "based", **changes}))
        assert config.model.positions == "none"
        assert config.train.decay_on == "all"
    assert RunConfig.build("based", recipe="zoology", n_heads=2).model.positions == "none"
    assert RunConfig.build("based", recipe="zoology", positions="learned").model.positions == "learned"


def test_a_grid_resolves_the_recipe_of_each_trial(made_up):
    axes = {"model.preset": ["attention", "mamba"], "task.pairs": [2, 4]}
    found = make_grid("g", {"base": {"recipe": "auto"}, "axes": axes}).trials
    assert [(t.config.train.lr, t.config.train.steps) for t in found] == [
        (0.125, 1500),
        (0.125, 1500),
        (0.25, 128),
        (0.25, 256),
    ]
    plain = make_grid("g", {"base": {"recipe": "plain"}, "axes": axes}).trials
    assert {t.config.train.lr for t in plain} == {0.001}
    by_recipe = make_grid("g", {"axes": {"recipe": ["plain", "attention", "mamba"]}}).trials
    assert [t.config.train.lr for t in by_recipe] == [0.001, 0.125, 0.25]


@pytest.mark.parametrize(
    ("pairs", "batch", "steps"), [(1, 256, 2500), (2, 128, 2500), (3, 86, 2500), (4, 64, 1500), (8, 64, 1500)]
)
def test_a_batch_of_few_pairs_has_as_many_labels_as_one_of_four(pairs, batch, steps):
    """With 2 pairs and batches of 64 Mamba stayed at one half, and attention was not done after 1,500 steps."""
    attention = RunConfig.build("attention", "mqar", pairs=pairs).train
    assert (attention.batch_size, attention.steps) == (batch, steps)
    assert RunConfig.build("mamba", "mqar", pairs=pairs).train.batch_size == batch
    assert RunConfig.build("mamba", "mqar", pairs=pairs, batch_size=32).train.batch_size == 32
    assert RunConfig.build("mamba", "copy").train.batch_size == 64


@pytest.mark.parametrize(("length", "pairs", "steps"), [(64, 4, 2500), (128, 4, 2500), (64, 8, 2500), (128, 8, 4000)])
def test_mamba2_gets_more_steps_for_long_sequences_with_many_pairs(length, pairs, steps):
    """At (128, 8) it left the plateau at step 800 only, and was at 85% and rising after 2,500 steps."""
    assert RunConfig.build("mamba2", "mqar", length=length, pairs=pairs).train.steps == steps


@pytest.mark.parametrize(
    ("data", "says"),
    [
        ({"recipe": "papper"}, "unknown recipe 'papper'; did you mean 'paper'?"),
        ({"recipe": 5}, "unknown recipe"),
        ({"recipie": "paper"}, "unknown key 'recipie'; did you mean 'recipe'?"),
        ({"recipe": "paper", "train": {"batch_size": "many"}}, "train.batch_size: expected an integer"),
        ({"recipe": "paper", "task": {"pairs": 99}}, "pairs must be at most"),
        ({"recipe": "zoology", "model": {"mixers": [5]}}, "a mixer is a name or a mapping"),
    ],
)
def test_wrong_input_is_one_line_that_says_what_is_wrong(data, says):
    with pytest.raises(cs.UserError, match=says):
        RunConfig.parse(data)


def test_a_recipe_for_a_file_that_gives_everything_is_refused(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text(RunConfig().dump())
    with pytest.raises(cs.UserError, match="recipe paper would change nothing: every field that it sets is given"):
        RunConfig.load(path, {"recipe": "paper"})


@pytest.mark.parametrize(
    ("length", "pairs", "batch", "epoch"),
    [(64, 4, 512, 196), (128, 8, 512, 196), (256, 16, 256, 391), (512, 64, 128, 782)],
)
def test_the_paper_trains_fifty_epochs_in_batches_that_shrink_with_the_length(length, pairs, batch, epoch):
    config = RunConfig.build("mamba", recipe="paper", length=length, pairs=pairs)
    train = config.train
    assert config.task.examples == 100_000
    assert (train.batch_size, train.steps, train.eval_every) == (batch, 50 * epoch, epoch)
    assert (train.weight_decay, train.warmup, train.schedule, train.seed) == (0.1, 0.1, "cosine", 42)
    assert train.eval_batches * train.eval_batch_size == 3000
    assert RunConfig.build(recipe="paper", batch_size=1000, examples=10_000).train.steps == 500


def test_zoology_is_the_benchmarks_figure_in_full():
    attention, hyena, based, mamba = (
        RunConfig.build(name, recipe="zoology") for name in ("attention", "hyena", "based", "mamba")
    )
    for config in (attention, hyena, based, mamba):
        model, train = config.model, config.train
        assert (model.state_mixer, model.embed_dropout, model.rescale_residual) == ("none", 0.1, True)
        assert (train.steps, train.schedule, train.schedule_every, train.warmup) == (64 * 196, "cosine", 196, 0)
        assert (train.clip, train.weight_decay, train.decay_on, train.early_stop) == (None, 0.1, "all", 0.99)
    assert [c.model.positions for c in (attention, hyena, based, mamba)] == ["learned", "none", "none", "none"]
    assert [c.model.init for c in (attention, hyena, based, mamba)] == ["gpt2", "gpt2", "gpt2", "native"]
    assert [m.dropout for m in attention.model.mixers] == [0.1, 0.1]
    assert {m.filter_init for m in hyena.model.mixers} == {"gpt2"}


def test_the_benchmarks_start_divides_output_projections_by_the_root_of_twice_the_layers():
    def spread(**options) -> float:
        config = tiny(d_model=64, **options).model
        return cs.model(config).layers[0].mixer.out.weight.std().item()

    published = spread(recipe="zoology")
    assert math.isclose(published, 0.02 / 2, rel_tol=0.05)
    assert math.isclose(spread(recipe="zoology", residual_branches=1), 0.02 / 2**0.5, rel_tol=0.05)


def test_hyenas_filter_starts_a_thousand_times_smaller_under_the_benchmarks_init():
    def size(**options) -> float:
        model = cs.model("hyena", n_layers=1, **options)
        return model.layers[0].mixer.filter(64).square().mean().sqrt().item()

    assert 1e-2 < size() < 4e-2
    assert size(init="gpt2") == size()
    assert 1e-5 < size(filter_init="gpt2") < 4e-5
