"""RunConfig: strict, complete, and every mistake is one line."""

import math
from pathlib import Path

import pytest
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st

import circuitscope as cs
from circuitscope.config import RunConfig, override, parse_assignments, read_yaml
from circuitscope.config.identity import differences
from circuitscope.config.train import TrainConfig
from circuitscope.mixers.attention import AttentionConfig
from circuitscope.models.config import ModelConfig


def said(data) -> str:
    """The one line a bad config gives."""
    with pytest.raises(cs.UserError) as error:
        RunConfig.parse(data)
    message = str(error.value)
    assert message
    assert "\n" not in message
    return message


@pytest.mark.parametrize(
    ("data", "nearest"),
    [
        ({"modle": {}}, "model"),
        ({"model": {"d_modle": 8}}, "model.d_model"),
        ({"model": {"n_layer": 8}}, "model.n_layers"),
        ({"task": {"pair": 8}}, "task.pairs"),
        ({"task": {"name": "induction", "blocks": 8}}, "task.block"),
        ({"train": {"save_evry": 8}}, "train.save_every"),
        ({"task": "mqra"}, "mqar"),
        ({"task": {"name": "inductoin"}}, "induction"),
        ({"model": "atention"}, "attention"),
        ({"model": {"mixers": ["atention"]}}, "attention"),
        ({"model": {"mixers": [{"name": "attention", "n_head": 2}]}}, "n_heads"),
    ],
)
def test_an_unknown_name_at_any_level_comes_with_the_nearest_valid_one(data, nearest):
    message = said(data)
    assert message.startswith("unknown ")
    assert nearest in message.split("did you mean '")[1].split("'")[0]


@pytest.mark.parametrize(
    ("data", "parts"),
    [
        ({"train": {"steps": -1}}, ["train.steps", "-1"]),
        ({"train": {"steps": 0}}, ["train.steps", "0"]),
        ({"train": {"lr": "fast"}}, ["train.lr", "fast"]),
        ({"train": {"lr": math.nan}}, ["train.lr", "nan"]),
        ({"train": {"lr": math.inf}}, ["train.lr", "inf"]),
        ({"train": {"weight_decay": math.inf}}, ["train.weight_decay", "inf"]),
        ({"train": {"device": "gpu"}}, ["train.device", "cuda", "gpu"]),
        ({"model": {"positions": "rotary"}}, ["model.positions", "rope", "rotary"]),
        ({"model": {"d_model": 1.5}}, ["model.d_model", "1.5"]),
        ({"model": {"d_model": None}}, ["model.d_model", "None"]),
        ({"model": {"d_model": True}}, ["model.d_model", "True"]),
        ({"model": {"n_layers": True}}, ["model.n_layers", "True"]),
        ({"train": {"steps": True}}, ["train.steps", "True"]),
        ({"model": {"d_model": [64]}}, ["model.d_model", "[64]"]),
        ({"model": {"mixers": []}}, ["model.mixers"]),
        ({"model": {"mixers": ["attention"] * 2, "n_layers": 3}}, ["2", "3"]),
        ({"model": 5}, ["model", "5"]),
        ({"model": None}, ["model"]),
        ({"model": []}, ["model"]),
        ({"model": [["d_model", 32]]}, ["model"]),
        ({"task": None}, ["task", "None"]),
        ({"task": 7}, ["task", "7"]),
        ({"task": {1: 2}}, ["task", "1"]),
        ({"model": {1: 2}}, ["model", "1"]),
        ({"train": None}, ["train", "None"]),
        ({"train": [1]}, ["train"]),
        ({"task": {"length": 64, "pairs": 17}}, ["16", "17"]),
        ({"task": {"power": math.inf}}, ["power", "inf"]),
        ({"model": {"vocab_size": 100}}, ["vocab_size", "8192", "100"]),
        ({"model": {"max_length": 63}}, ["max_length", "64", "63"]),
        ({"model": {"a\nb": 1}}, ["unknown key"]),
        ({"task": "a\nb"}, ["unknown task"]),
        ([], ["mapping", "list"]),
        ("mqar", ["mapping", "str"]),
        (None, ["mapping", "NoneType"]),
    ],
)
def test_a_wrong_value_is_named_with_what_was_given(data, parts):
    message = said(data)
    assert all(part in message for part in parts), message


def test_a_number_too_long_to_print_is_still_one_line():
    assert "model.d_model" in said({"model": {"d_model": -(16**5000)}})


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"task": "induction"},
        {"task": "ar", "examples": 100, "early_stop": 0.99, "clip": None},
        {"pairs": 8, "n_heads": 4, "positions": "rope", "lr": 3e-4, "filler": "zero", "power": 0.5},
        {"model": "attention,attention,attention", "n_heads": 2},
    ],
)
def test_a_config_comes_back_from_its_yaml(options, tmp_path):
    config = RunConfig.build(**options)
    path = tmp_path / "config.yaml"
    path.write_text(config.dump())
    again = RunConfig.load(path)
    assert again == config
    assert again.dump() == config.dump()


def test_yaml_holds_every_field_so_that_later_defaults_change_nothing():
    data = yaml.safe_load(RunConfig().dump())
    assert set(data) == {"schema", "model", "task", "train"}
    assert set(data["train"]) == set(TrainConfig.model_fields)
    assert set(data["model"]) == set(ModelConfig.model_fields)
    assert set(data["task"]) == set(type(cs.task("mqar")).model_fields)
    assert data["task"]["version"] == 1
    assert [set(m) for m in data["model"]["mixers"]] == [set(AttentionConfig.model_fields)] * 2


def test_the_default_run_is_a_two_layer_attention_model_on_mqar():
    config = RunConfig.parse({})
    assert config == RunConfig() == RunConfig.build()
    assert [m.name for m in config.model.mixers] == ["attention", "attention"]
    assert (config.model.d_model, config.model.mixers[0].n_heads, config.model.positions) == (64, 1, "learned")
    assert (config.task.name, config.task.length, config.task.pairs, config.task.vocab_size) == ("mqar", 64, 4, 8192)


@pytest.mark.parametrize(
    ("task", "vocab", "length"),
    [
        ({"length": 32, "vocab_size": 100}, 100, 32),
        ({"name": "ar"}, 50, 64),
        ({"name": "induction", "block": 5, "repeats": 3, "vocab_size": 30}, 30, 16),
    ],
)
def test_the_model_takes_vocabulary_and_length_from_the_task(task, vocab, length):
    config = RunConfig.parse({"task": task, "model": {"d_model": 8}})
    assert (config.model.vocab_size, config.model.max_length) == (vocab, length)
    larger = RunConfig.parse({"task": task, "model": {"vocab_size": vocab + 3, "max_length": length + 5}})
    assert (larger.model.vocab_size, larger.model.max_length) == (vocab + 3, length + 5)


# build: flat options find their part.


def test_build_sends_each_option_to_the_part_that_has_it():
    config = RunConfig.build("attention", "mqar", pairs=8, n_heads=2, lr=1e-3, n_layers=3, seed=4, tied=False)
    assert config.task.pairs == 8
    assert [m.n_heads for m in config.model.mixers] == [2, 2, 2]
    assert (config.train.lr, config.train.seed) == (1e-3, 4)
    assert (config.model.n_layers, config.model.tied) == (3, False)
    assert RunConfig.build(vocab_size=100).model.vocab_size == 100


def test_build_takes_names_mappings_and_objects():
    task = cs.task("mqar", pairs=2)
    model = ModelConfig(mixers=[{"name": "attention", "n_heads": 4}], n_layers=1)
    by_object = RunConfig.build(model, task)
    by_mapping = RunConfig.build({"mixers": [{"name": "attention", "n_heads": 4}], "n_layers": 1}, {"pairs": 2})
    assert by_object.task == by_mapping.task == task
    assert by_object.model == by_mapping.model == model


def test_a_config_object_inside_a_config_keeps_its_mixers():
    model = ModelConfig(mixers=[{"name": "attention", "n_heads": 4}], n_layers=1)
    assert RunConfig(model=model).model == model


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"n_head": 2}, "did you mean 'n_heads'"),
        ({"pair": 2}, "did you mean 'pairs'"),
        ({"save_evry": 2}, "did you mean 'save_every'"),
        ({"model": 5}, "model: expected a name or a mapping, got 5"),
        ({"model": {"mixers": 5}}, "mixers"),
        ({"model": {"mixers": None}}, "mixers"),
        ({"task": 5}, "task: expected a name or a mapping, got 5"),
    ],
)
def test_build_refuses_what_no_part_has(options, expected):
    with pytest.raises(cs.UserError, match=expected):
        RunConfig.build(**options)


# Overrides by dotted path.


def test_overrides_reach_every_level_and_leave_the_given_data_alone():
    data = {"model": {"mixers": ["attention", {"name": "attention", "n_heads": 4}]}, "task": "mqar"}
    before = yaml.safe_dump(data)
    changed = override(
        data, {"model.d_model": 128, "model.mixers.0.n_heads": 2, "task.pairs": 2, "train.lr": 0.5, "train.clip": None}
    )
    config = RunConfig.parse(changed)
    assert yaml.safe_dump(data) == before
    assert [m.n_heads for m in config.model.mixers] == [2, 4]
    assert (config.model.d_model, config.task.pairs, config.train.lr, config.train.clip) == (128, 2, 0.5, None)


@pytest.mark.parametrize("mixers", [None, "attention", "attention,attention", ["attention"], [{"name": "attention"}]])
def test_a_star_reaches_every_mixer_however_they_are_given(mixers):
    data = {} if mixers is None else {"model": {"mixers": mixers}}
    config = RunConfig.parse(override(data, {"model.mixers.*.n_heads": 2}))
    assert [m.n_heads for m in config.model.mixers] == [2, 2]


def test_a_model_given_by_name_can_be_overridden():
    config = RunConfig.parse(override({"model": "attention", "task": "ar"}, {"model.d_model": 32, "task.pairs": 2}))
    assert (config.model.d_model, config.task.name, config.task.pairs) == (32, "ar", 2)


def test_a_mixer_of_a_model_given_by_name_can_be_overridden():
    config = RunConfig.parse(override({"model": "mamba"}, {"model.mixers.*.d_state": 4}))
    assert [(m.name, m.d_state) for m in config.model.mixers] == [("mamba", 4), ("mamba", 4)]


def test_an_override_of_one_layer_leaves_the_other_layers_and_the_preset_alone():
    before = RunConfig.build("attention_conv_q")
    config = RunConfig.parse(override({"model": "attention_conv_q"}, {"model.mixers.0.n_heads": 2}))
    assert [m.n_heads for m in config.model.mixers] == [2, 1]
    assert RunConfig.build("attention_conv_q") == before


def test_a_section_is_set_before_its_keys_and_all_mixers_before_one():
    """So the order in which assignments are given loses none of them."""
    changes = {"model.mixers.0.n_heads": 2, "model.mixers.*.n_heads": 4, "model.d_model": 32, "model": "attention"}
    config = RunConfig.parse(override({}, changes))
    assert (config.model.d_model, [m.n_heads for m in config.model.mixers]) == (32, [2, 4])


@pytest.mark.parametrize("build", [RunConfig.build, cs.model])
def test_a_model_and_mixers_are_not_given_at_once(build):
    with pytest.raises(cs.UserError, match="not both: got 'mamba' and 'attention'"):
        build("mamba", mixers="attention")


def test_a_preset_is_not_silently_ignored_where_the_file_lists_mixers(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text(RunConfig.build("attention").dump())
    with pytest.raises(cs.UserError, match="expected a preset or mixers, got both: 'mamba'"):
        RunConfig.load(path, {"model.preset": "mamba"})


@pytest.mark.parametrize("name", cs.mixers.names())
def test_every_mixer_is_a_model_by_its_name(name):
    config = RunConfig.build(name, n_layers=3)
    assert name in {m.name for m in config.model.mixers}
    assert RunConfig.parse({"model": {"preset": name, "n_layers": 3}}) == config
    assert cs.model(name, d_model=32, n_layers=1).cfg.n_layers == 1


@pytest.mark.parametrize(
    ("data", "path"),
    [
        ({}, "model.mixers.7.n_heads"),
        ({}, "model.mixers.one.n_heads"),
        ({}, "model.mixers.-1.n_heads"),
        ({"model": {"mixers": []}}, "model.mixers.*.n_heads"),
        ({"model": {"mixers": []}}, "model.mixers.0.n_heads"),
        ({"model": {"d_model": 8}}, "model.d_model.deeper"),
        ({"model": None}, "model.d_model"),
        ({"train": [1]}, "train.lr"),
        ([], "model.d_model"),
        ({}, "model"),
        ({}, ""),
        ({}, "."),
        ({}, "model."),
        ({}, "model..d_model"),
    ],
)
def test_an_override_that_leads_nowhere_is_bad_input(data, path):
    with pytest.raises(cs.UserError) as error:
        RunConfig.parse(override(data, {path: 3}))
    assert "\n" not in str(error.value)


def test_assignments_are_read_as_yaml():
    pairs = ["model.d_model=128", "train.clip=null", "train.lr=1.0e-3", "task.filler=zero", "a=b=c", "x=[1, 2]"]
    assert parse_assignments(pairs) == {
        "model.d_model": 128,
        "train.clip": None,
        "train.lr": 1e-3,
        "task.filler": "zero",
        "a": "b=c",
        "x": [1, 2],
    }
    with pytest.raises(cs.UserError, match="--set y: the value is empty; give one, or null for none"):
        parse_assignments(["y="])


def test_a_learning_rate_may_be_written_as_people_write_it():
    assert RunConfig.parse(override({}, parse_assignments(["train.lr=1e-3"]))).train.lr == 1e-3


NASTY_YAML = [
    "[",
    "{",
    "=",
    "!!python/object/apply:os.getcwd []",
    "!!int abc",
    "2001-99-99",
    "0x_",
    "9" * 5000,
    "[" * 3000,
    "a: b: c",
    "\t- x",
    "&a [*a]",
    "*missing",
    "{[1]: 2}",
    "'",
]
nasty = pytest.mark.parametrize("text", NASTY_YAML, ids=[t[:16] for t in NASTY_YAML])


@nasty
def test_an_assignment_that_is_no_yaml_is_bad_input(text):
    with pytest.raises(cs.UserError) as error:
        RunConfig.parse(override({}, parse_assignments([f"model.d_model={text}"])))
    assert "\n" not in str(error.value)


@nasty
def test_a_file_that_is_no_config_is_bad_input(text, tmp_path):
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    with pytest.raises(cs.UserError) as error:
        RunConfig.load(path)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("content", [b"\xff\xfe\x00", b"\x00", b"model: \x07", b"[]", b"0", b"false", b"- a", b"hello"])
def test_a_file_that_holds_something_else_is_bad_input(content, tmp_path):
    path = tmp_path / "bad.yaml"
    path.write_bytes(content)
    with pytest.raises(cs.UserError):
        RunConfig.load(path)


@pytest.mark.parametrize(
    "text", ["train:\n  lr: 0.1\n  steps: 5\n  lr: 0.2\n", "train: {lr: 0.1, lr: 0.2}", "train: {}\n\ntrain: {lr: 0.2}"]
)
def test_a_key_that_stands_twice_in_a_file_is_bad_input(text, tmp_path):
    path = tmp_path / "twice.yaml"
    path.write_text(text)
    with pytest.raises(cs.UserError, match=r"twice\.yaml .*the key '(lr|train)' stands twice, in lines \d and \d$"):
        RunConfig.load(path)


def test_a_key_may_replace_one_that_is_merged_in(tmp_path):
    path = tmp_path / "merged.yaml"
    path.write_text("train: &a {lr: 0.1, steps: 5}\ntask: &b {<<: {pairs: 2}, pairs: 4}\n")
    assert RunConfig.load(path).task.pairs == 4


@pytest.mark.parametrize("text", ["train: {lr: fast}", "modle: {}", "schema: 99", "task: {pairs: 17}", "- a", "[", ""])
def test_what_is_wrong_with_a_file_comes_with_its_name(text, tmp_path):
    path = tmp_path / "wrong.yaml"
    path.write_text(text)
    with pytest.raises(cs.UserError, match=r"wrong\.yaml"):
        RunConfig.load(path, {"train.steps": "many"} if not text else None)


def test_an_empty_file_is_the_default_config(tmp_path):
    path = tmp_path / "empty.yaml"
    path.write_text("# nothing but a comment\n")
    assert RunConfig.load(path) == RunConfig()


@pytest.mark.parametrize("path", ["nowhere.yaml", "."])
def test_a_file_that_cannot_be_read_is_bad_input(path):
    with pytest.raises(cs.UserError, match="cannot read"):
        read_yaml(Path(path))


@pytest.mark.parametrize("pair", ["model.d_model", "=5", "", "="])
def test_an_assignment_needs_a_key_and_a_value(pair):
    with pytest.raises(cs.UserError, match="KEY=VALUE"):
        parse_assignments([pair])


# Anything at all: a config or one line.


def outcome(make):
    """(what was made, None), or (None, the line that says why not)."""
    try:
        return make(), None
    except cs.UserError as error:
        return None, str(error)


scalars = (
    st.none()
    | st.booleans()
    | st.integers(-3, 70)
    | st.sampled_from([10**12, -(10**30), 2**63, 2**31])
    | st.floats()
    | st.sampled_from(
        ["attention", "mqar", "ar", "induction", "rope", "none", "zero", "64", "", "a\nb", "attention,attention"]
    )
    | st.text(max_size=5)
)
anything = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5) | st.integers(), inner, max_size=3),
    max_leaves=6,
)


def section(*classes, extra: tuple[str, ...] = ()):
    """Mappings with real field names and values of any kind."""
    fields = sorted({f for c in classes for f in c.model_fields} | set(extra))
    return st.dictionaries(st.sampled_from(fields) | st.text(max_size=4), anything, max_size=4)


task_classes = [type(cs.task(n)) for n in cs.tasks.names()]
mixer_fields = st.dictionaries(st.sampled_from(["name", "n_heads", "qkv_bias"]), scalars, max_size=3)
model_section = st.builds(
    lambda fields, mixers: fields | ({} if mixers is None else {"mixers": mixers}),
    section(ModelConfig),
    st.none() | st.lists(mixer_fields | anything, max_size=3) | anything,
)
configs = st.fixed_dictionaries(
    {},
    optional={
        "model": model_section | anything,
        "task": section(*task_classes) | anything,
        "train": section(TrainConfig) | anything,
        "extra": anything,
    },
)


@settings(max_examples=400)
@given(data=configs | anything)
@example(data={"model": {"mixers": [{"name": "attention", "n_heads": 3}], "d_model": 64}})
@example(data={"model": {"n_layers": 10**30}})
@example(data={"task": {"name": ["mqar"]}})
@example(data={"task": {"name": None}})
def test_any_data_is_a_config_or_one_line_that_says_why_not(data):
    config, message = outcome(lambda: RunConfig.parse(data))
    if config is None:
        assert message
        assert "\n" not in message
    else:
        assert len(config.model.mixers) == config.model.n_layers
        assert RunConfig.parse(yaml.safe_load(config.dump())) == config


@settings(max_examples=60)
@given(
    heads=st.integers(1, 9),
    d_model=st.integers(1, 24),
    positions=st.sampled_from(["none", "learned", "sinusoidal", "rope", "alibi"]),
    layers=st.integers(1, 3),
    state_mixer=st.sampled_from(["mlp", "none"]),
)
def test_any_valid_sizes_make_a_model_that_runs_or_one_line_that_says_why_not(
    heads, d_model, positions, layers, state_mixer
):
    config = RunConfig.build(
        n_heads=heads,
        d_model=d_model,
        positions=positions,
        n_layers=layers,
        state_mixer=state_mixer,
        length=8,
        pairs=2,
        vocab_size=12,
    )
    model, message = outcome(lambda: cs.HookedLM(config.model))
    if model is None:
        assert "\n" not in message
        assert d_model % heads or (positions == "rope" and (d_model // heads) % 2)
    else:
        assert model(config.task.batch(0, size=2).tokens).isfinite().all()


@pytest.mark.parametrize(
    "options", [{"d_model": 10**30}, {"d_model": 10**12}, {"length": 10**14}, {"mlp_ratio": 10**12}], ids=str
)
def test_a_model_too_large_for_any_machine_is_bad_input(options):
    with pytest.raises(cs.UserError) as error:
        cs.HookedLM(RunConfig.build(**options).model)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("model", "positions", "said"),
    [
        ("mamba", "alibi", r"alibi acts only inside attention; mamba would ignore it; expected rope, learned, "),
        ("hyena", "rope", r"rope acts only inside attention, .*mamba2, s6; hyena would ignore it; expected learned, "),
        ({"mixers": [{"name": "s6", "rotary": False}]}, "rope", ".*s6 would ignore it; expected rotary: true, learned"),
    ],
)
def test_positions_that_every_mixer_ignores_are_refused_and_what_fits_is_offered(model, positions, said):
    with pytest.raises(cs.UserError, match=f"^model.positions: {said}"):
        RunConfig.build(model, positions=positions)
    hybrid = RunConfig.build({"mixers": "mamba,attention"}, positions=positions)
    assert hybrid.model.positions == positions


@pytest.mark.parametrize("model", ["mamba", "mamba2", "s6", "deltanet", "gated_deltanet"])
def test_rope_rotates_the_mixers_where_it_fits(model):
    config = RunConfig.build(model, positions="rope")
    assert all(mixer.rotary for mixer in config.model.mixers)
    assert RunConfig.parse(yaml.safe_load(config.dump())) == config
    assert config.digest != RunConfig.build(model).digest
    assert differences([config, RunConfig.build(model)])["model.mixers.rotary"] == [True, False]


def test_beside_attention_rope_stays_in_attention_unless_asked_for():
    """A hybrid with rope means what it meant before other mixers could rotate."""
    hybrid = RunConfig.build("standard_hybrid", positions="rope", vocab_size=64)
    assert not any(mixer.rotary for mixer in hybrid.model.mixers if mixer.name == "mamba")
    before = yaml.safe_load(hybrid.dump()) | {"schema": 2}
    for mixer in before["model"]["mixers"]:
        mixer.pop("rotary", None)
    assert RunConfig.parse(before).digest == hybrid.digest
    asked = RunConfig.build("standard_hybrid", positions="rope", vocab_size=64, rotary=True)
    assert all(mixer.rotary for mixer in asked.model.mixers if mixer.name == "mamba")


def test_rotary_means_rope():
    assert RunConfig.build("mamba", rotary=True).model.positions == "rope"
    with pytest.raises(cs.UserError, match="the rotary of mamba needs rope, got learned; expected rope, or rotary"):
        RunConfig.build("mamba", rotary=True, positions="learned")
    for model, name in {"mamba": "d_state", "mamba2": "d_state", "s6": "d_state", "deltanet": "d_key"}.items():
        with pytest.raises(cs.UserError, match=f"^rope needs an even {name}, got 5; nearest: 6$"):
            cs.HookedLM(RunConfig.build(model, positions="rope", **{name: 5}).model)


def test_an_old_run_whose_positions_were_ignored_is_read_as_what_it_was():
    data = yaml.safe_load(RunConfig.build("mamba").dump())
    data["model"]["positions"] = "rope"
    assert RunConfig.parse({**data, "schema": 1}).model.positions == "none"


def test_a_model_in_the_place_of_a_config_file_is_named():
    from circuitscope.api import train

    with pytest.raises(cs.UserError, match=r'for a model of that name: train\(model="mamba"\)'):
        train("mamba")


def test_the_number_of_a_mixer_may_have_any_number_of_digits_and_is_still_refused_in_one_line():
    with pytest.raises(cs.UserError, match="is not one of the mixers 0 to 0") as refused:
        override({}, {f"model.mixers.{'9' * 5000}.n_heads": 2})
    assert len(str(refused.value)) < 300
