"""Recipes: how a model is trained, by name. A preset says what a model is.

A recipe gives values of a config's fields, or rules by which they follow from the task, the model and the fields
before. It fills in only what nobody gave, so what is given wins; then the task's own recipe (`Task.recipe`), then the
recipe of the model, then the defaults of the fields. A config that is resolved holds plain values and no recipe, and a
config that is complete, as in the folder of a run, is never touched.

    recipe: auto     the model's recipe and the task's; what a config without the word means
    recipe: plain    the defaults of the fields alone
    recipe: NAME     one of RECIPES, whatever the model
"""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from pydantic import ValidationError

from circuitscope import mixers, tasks
from circuitscope.config.train import TrainConfig
from circuitscope.errors import UserError, unknown
from circuitscope.models.config import ModelConfig
from circuitscope.models.presets import expand_preset, model_mapping
from circuitscope.section import Section
from circuitscope.tasks import Task

AUTO, PLAIN = "auto", "plain"
_INSTEAD = {"warmup_steps": "warmup"}  # a field that would win over another one that somebody gave


class Setting(NamedTuple):
    """What a rule may depend on: the config's parts, with what is given and what the fields before the rule say."""

    model: ModelConfig
    task: Task
    train: TrainConfig


@dataclass(frozen=True)
class Rule:
    """A value that follows from the setting, and the same in words."""

    words: str
    value: Callable[[Setting], Any]


@dataclass(frozen=True)
class Recipe:
    """Values and rules by field: `train.lr`, `model.init`, `task.examples`, or `mixer.dropout` for every mixer that
    has it. A rule sees the fields that stand before it.
    """

    about: str
    fields: Mapping[str, Any]


def _per_token(share: float, most: int) -> "Rule":
    """A number of examples that grows with the vocabulary, from 2,000 up to a limit."""

    def examples(setting: Setting) -> int | None:
        tokens = setting.task.needs().get("vocab_size")
        return None if tokens is None else max(2000, min(most, round(share * tokens)))

    return Rule(f"{share:g} for each token of the vocabulary, from 2,000 to {most:,}; none without tokens", examples)


def _pairs(setting: Setting) -> int:
    """Pairs of the task, up to 4; tasks without pairs count as having so many."""
    return min(4, getattr(setting.task, "pairs", 4))


def _long_with_many_pairs(setting: Setting) -> bool:
    return setting.task.max_length * getattr(setting.task, "pairs", 0) > 512


_FEW_PAIRS = Rule(
    "64, with fewer than 4 pairs 256 / pairs: as many labels as 4 pairs give",
    lambda setting: math.ceil(256 / _pairs(setting)),
)


# The six that were searched for (studies/recipes). Their values stand here alone; those of attention are also shown by
# `circuitscope train --help`, and a test says when the two differ. Attention and Based leave the plateau at 1/k
# sooner when they see the same examples again.

_WITH_REPEATS: dict[str, Any] = {
    "train.batch_size": _FEW_PAIRS,
    "train.lr": 1e-3,
    "train.weight_decay": 1.0,
    "train.steps": Rule("1500, with fewer than 4 pairs 2500", lambda setting: 1500 if _pairs(setting) >= 4 else 2500),
    "train.schedule": "constant",
    "train.warmup": 0.1,
}
_ENDLESS: dict[str, Any] = {
    "task.examples": None,
    "train.batch_size": _FEW_PAIRS,
    "train.weight_decay": 0.1,
    "train.schedule": "cosine",
    "train.warmup_steps": 100,
}
_SIX: dict[str, dict[str, Any]] = {
    "attention": {"task.examples": _per_token(2.5, 20_000), **_WITH_REPEATS},
    "based": {"task.examples": _per_token(1.25, 10_000), **_WITH_REPEATS},
    "mamba": {**_ENDLESS, "train.lr": 1.2e-2, "train.beta2": 0.95, "train.steps": 4000},
    "mamba2": {
        **_ENDLESS,
        "train.lr": 1e-2,
        "train.beta2": 0.95,
        "train.steps": Rule(
            "2500, where length · pairs is above 512 4000",
            lambda setting: 4000 if _long_with_many_pairs(setting) else 2500,
        ),
    },
    "deltanet": {**_ENDLESS, "train.lr": 5e-3, "train.steps": 800},
    "hyena": {**_ENDLESS, "train.lr": 2e-2, "train.weight_decay": 0.01, "train.beta2": 0.98, "train.steps": 4000},
}

# Whose recipe a mixer takes; the first mixer of a stack decides. A mixer that is not here takes attention's.
FAMILIES = {
    **{name: name for name in _SIX},
    "gated_conv": "based",
    "gated_deltanet": "deltanet",
    "h3": "hyena",
    "s4": "hyena",
    "s4_mamba": "mamba",
    "s6": "mamba",
    "rwkv": "mamba",
    "lstm": "mamba",
}


def _epoch(setting: Setting) -> int:
    """Steps in which every training example is seen once."""
    return math.ceil((setting.task.examples or 100_000) / setting.train.batch_size)


def _batch_size(setting: Setting) -> int:
    sizes = {128: 512, 256: 256, 512: 128}
    return next((size for length, size in sizes.items() if setting.task.max_length <= length), 64)


_PER_EPOCH = Rule("steps of one epoch", _epoch)
_AS_PUBLISHED: dict[str, Any] = {
    "task.examples": 100_000,
    "train.batch_size": Rule("512 up to length 128, 256 up to 256, 128 up to 512, else 64", _batch_size),
    "train.lr": 1e-3,
    "train.weight_decay": 0.1,
    "train.schedule": "cosine",
    "train.eval_every": _PER_EPOCH,
    "train.eval_batches": 30,
    "train.eval_batch_size": 100,
    "train.save_every": _PER_EPOCH,
}


def _has_own_start(setting: Setting) -> bool:
    """Whether the benchmark leaves the first weights of the model's blocks to the mixer: Mamba's and Mamba2's."""
    return all(mixer.name.startswith("mamba") for mixer in setting.model.mixers)


RECIPES: dict[str, Recipe] = {
    **{
        name: Recipe(f"What {name} is trained with; studies/recipes has the search and what it reaches.", fields)
        for name, fields in _SIX.items()
    },
    "paper": Recipe(
        "The first paper, appendix A.2: AdamW, 50 epochs of 100,000 examples, decay 0.1, a linear warmup over a tenth,"
        " 3,000 held-out examples, seeds 42, 123 and 777, of which the first is taken. The paper sweeps the learning"
        " rate; 1e-3 is taken. It does not say what the rate does after the warmup; the cosine of the benchmark that it"
        " builds on is taken. What it does not mention (clipping, dropout, first weights) stays at the defaults.",
        {
            **_AS_PUBLISHED,
            "train.steps": Rule("50 epochs", lambda setting: 50 * _epoch(setting)),
            "train.warmup": 0.1,
            "train.seed": 42,
        },
    ),
    "zoology": Recipe(
        "The public benchmark's figure 2: no MLP, learned positions for attention alone, 64 epochs of 100,000 examples,"
        " a cosine that falls once per epoch, no warmup, no clipping, embedding and attention dropout 0.1, decay 0.1 on"
        " all parameters, first weights N(0, 0.02²) with output projections divided by √(2 · layers) (Mamba keeps its"
        " own), and the end at 99% on 3,000 held-out examples. The benchmark sweeps the learning rate; 1e-3 is its"
        " trainer's default. The examples are those of the task: its own have task.filler=zero and"
        " task.slots_in_draw_order=true. Not repeated: without an MLP the benchmark adds the normalized stream to"
        " itself after each mixer, its H3 has a state of the sequence's length, and its Based has a long conv.",
        {
            **_AS_PUBLISHED,
            "train.steps": Rule("64 epochs", lambda setting: 64 * _epoch(setting)),
            "train.schedule_every": _PER_EPOCH,
            "train.warmup": 0.0,
            "train.clip": None,
            "train.decay_on": "all",
            "train.early_stop": 0.99,
            "train.seed": 123,
            "model.state_mixer": "none",
            "model.positions": Rule(
                "learned if every mixer is attention, else none",
                lambda setting: "learned" if {m.name for m in setting.model.mixers} == {"attention"} else "none",
            ),
            "model.embed_dropout": 0.1,
            "model.init": Rule(
                "native for Mamba and Mamba2, else gpt2",
                lambda setting: "native" if _has_own_start(setting) else "gpt2",
            ),
            "model.rescale_residual": True,
            "model.residual_branches": Rule(
                "1 for Mamba and Mamba2, else 2", lambda setting: 1 if _has_own_start(setting) else 2
            ),
            "mixer.dropout": 0.1,
            "mixer.filter_init": "gpt2",
        },
    ),
}


def names() -> list[str]:
    """The names that `recipe` takes."""
    return [AUTO, PLAIN, *RECIPES]


def applied(data: Mapping[str, Any]) -> dict[str, Any]:
    """A config as plain data without `recipe`, with what its recipe says where nothing is given.

    Data that is no config comes back as it is, for the validation to refuse.
    """
    return resolved(data)[0]


def words(data: Mapping[str, Any]) -> str:
    """Which recipe a config takes, in a few words; "" where a recipe has nothing to add."""
    name = data.get("recipe", AUTO)
    if not resolved(data)[1]:
        return ""
    if name != AUTO:
        return f"recipe: {name}"
    specs, task = _mixers(data), tasks.task(data.get("task", "mqar"))
    found = _family(specs)
    own = "" if _is_searched(specs, found) else ", untuned for this model"
    return f"recipe: {found}{own}" + (f", and that of the task {task.name}" if task.recipe else "")


def resolved(data: Mapping[str, Any]) -> tuple[dict[str, Any], set[str]]:
    """What `applied` gives, and the fields that the recipe has set."""
    rest = {key: value for key, value in data.items() if key != "recipe"}
    try:
        fields = _fields(data.get("recipe", AUTO), rest)
        parts = {section: _given(section, rest) for section in ("model", "task", "train")}
        done = {path for path, value in fields.items() if _set(parts, path, value)}
    except _Invalid:
        return rest, set()
    return rest | {section: parts[section] for section in {_home(path) for path in done}}, done


class _Invalid(Exception):
    """What is given is no config, which the validation that follows says better."""


def _fields(name: Any, data: dict[str, Any]) -> Mapping[str, Any]:
    if name == PLAIN:
        return {}
    if name != AUTO:
        if not isinstance(name, str) or name not in RECIPES:
            raise unknown("recipe", name, names())
        return RECIPES[name].fields
    return {**RECIPES[_family(_mixers(data))].fields, **_kind("task", _given("task", data)).recipe}  # type: ignore[attr-defined]


def _family(specs: list[dict[str, Any]]) -> str:
    return FAMILIES.get(specs[0]["name"], "attention")


def _is_searched(specs: list[dict[str, Any]], recipe: str) -> bool:
    """Whether a stack is made of the mixers of the preset that the recipe was searched for."""
    return _in_text(specs) <= _in_text(expand_preset({"preset": recipe})["mixers"])


def _in_text(specs: list[Any]) -> set[str]:
    return {json.dumps(mixers.mixer_config(spec).model_dump(mode="json"), sort_keys=True) for spec in specs}


def _mixers(data: Mapping[Any, Any]) -> list[dict[str, Any]]:
    """The mixers of the model, each as a mapping of its name and the options given."""
    try:
        return [mixers.as_mapping(mixer) for mixer in expand_preset(_given("model", data))["mixers"]]
    except (UserError, TypeError):
        raise _Invalid from None


def _given(section: str, data: Mapping[str, Any]) -> dict[Any, Any]:
    """The fields of a section that are given. A section that is an object gives all of its fields."""
    value = data.get(section, {})
    try:
        if section == "model":
            return model_mapping(value)
        if isinstance(value, Section):
            return value.model_dump(mode="json")
        return {"name": value} if isinstance(value, str) and section == "task" else dict(value)
    except (UserError, TypeError, ValueError):
        raise _Invalid from None


def _kind(section: str, given: Mapping[Any, Any]) -> type[Section]:
    """The class that has the fields of a section."""
    if section != "task":
        return ModelConfig if section == "model" else TrainConfig
    try:
        return tasks.TASKS[given.get("name", "mqar")]
    except (UserError, TypeError):
        raise _Invalid from None


def _home(path: str) -> str:
    section = path.partition(".")[0]
    return "model" if section == "mixer" else section


def _set(parts: dict[str, dict[Any, Any]], path: str, value: Any) -> bool:
    """Gives a field its value if nobody gave it one; says whether it did."""
    section, _, field = path.partition(".")
    if section == "mixer":
        return _set_on_mixers(parts, field, value)
    given = parts[section]
    kind = _kind(section, given)
    if field not in kind.model_fields or {field, _INSTEAD.get(field)} & given.keys() or _is_complete(given, kind):
        return False
    given[field] = value.value(_setting(parts)) if isinstance(value, Rule) else value
    return True


def _set_on_mixers(parts: dict[str, dict[Any, Any]], field: str, value: Any) -> bool:
    specs = _mixers(parts)
    open_to = [
        spec
        for spec in specs
        if field in (kind := mixers.config_class(spec["name"])).model_fields
        and field not in spec
        and not _is_complete(spec, kind)
    ]
    for spec in open_to:
        spec[field] = value.value(_setting(parts)) if isinstance(value, Rule) else value
    if open_to:
        parts["model"] = {**expand_preset(parts["model"]), "mixers": specs}
    return bool(open_to)


def _is_complete(given: Mapping[Any, Any], kind: type[Section]) -> bool:
    """Whether every field is given that the first version of a config had, as in the folder of a run."""
    return kind.model_fields.keys() - kind.added().keys() <= given.keys()


def _setting(parts: Mapping[str, dict[Any, Any]]) -> Setting:
    try:
        task = tasks.task(parts["task"])
        model = ModelConfig.model_validate({**task.needs(), **parts["model"]})
        return Setting(model, task, TrainConfig.model_validate(parts["train"]))
    except (UserError, ValidationError):
        raise _Invalid from None
