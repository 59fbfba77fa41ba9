"""RunConfig: the model, the task and the training of a run in one strict record."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from pydantic import Field, SerializeAsAny, ValidationError, model_validator

from circuitscope import mixers, tasks
from circuitscope.arguments import explained
from circuitscope.config import recipes
from circuitscope.config.identity import digest
from circuitscope.config.overrides import override, read_yaml
from circuitscope.config.schema import VERSION, as_before, to_current, upgraded, version_of
from circuitscope.config.train import TrainConfig
from circuitscope.errors import UserError, shown, unknown
from circuitscope.explain import explain
from circuitscope.models.config import ModelConfig
from circuitscope.models.presets import expand_preset, model_mapping
from circuitscope.section import Section
from circuitscope.tasks import Task


class RunConfig(Section):
    """Everything that a run needs. On one machine, equal configs give weights that are equal bit by bit."""

    model: ModelConfig = Field(default_factory=ModelConfig)
    task: SerializeAsAny[Task] = Field(default_factory=lambda: tasks.task("mqar"))
    train: TrainConfig = Field(default_factory=TrainConfig)

    @model_validator(mode="before")
    @classmethod
    def _resolve(cls, data: Any) -> Any:
        """Takes what the recipe says, turns names into configs, and takes the model's sizes from the task."""
        if not isinstance(data, dict):
            return data
        for key in data.keys() - {*cls.model_fields, "recipe"}:
            raise unknown("key", key, [*cls.model_fields, "recipe"], _paths())
        data = recipes.applied(data)
        task = data["task"] = tasks.task(data.get("task", "mqar"))
        model = data.get("model", {})
        if not isinstance(model, ModelConfig):
            model = {**task.needs(), **model_mapping(model)}
        data["model"] = model
        return data

    @model_validator(mode="after")
    def _model_fits_task(self) -> "RunConfig":
        for field, need in self.task.needs().items():
            have = getattr(self.model, field)
            if have is not None and have < need:
                raise UserError(f"model.{field} must be at least the task's {need}, got {have}")
        if self.model.reads != self.task.inputs:
            raise UserError(
                f"{self.task.name} has {self.task.inputs}, and a model with d_input {self.model.d_input} reads"
                f" {self.model.reads}; leave model.d_input and model.d_output out: the task gives them"
            )
        if self.task.metric == "accuracy" and (self.train.early_stop or 0) > 1:
            raise UserError(
                f"train.early_stop: {self.task.name} is stopped at an accuracy, so expected at most 1, got"
                f" {self.train.early_stop:g}"
            )
        if self.model.sees_ahead and _asks_for_next_tokens(self.task):
            self.model.check_causal(f"{self.task.name}, whose labels are the next tokens,")
        return self

    @classmethod
    @explained
    def parse(cls, data: Any) -> "RunConfig":
        """Reads plain data. It has today's layout by default; the key `schema` says that it has an older one.

        The key `recipe` names a recipe; what neither the data nor the recipe says has the default of its field.

        Raises:
            UserError: one line that says what is wrong.
        """
        if not isinstance(data, dict):
            raise UserError(f"a config is a mapping with model, task and train, got {type(data).__name__}")
        try:
            return cls.model_validate(_resolved(data) if "schema" in data else data)
        except ValidationError as error:
            raise explain(error, cls, elsewhere=_paths()) from None

    @classmethod
    @explained
    def load(cls, path: str | Path, overrides: dict[str, Any] | None = None) -> "RunConfig":
        """Reads a YAML file and applies dotted overrides. What the file does not say comes from its recipe."""
        data, changes = read_yaml(Path(path)), overrides or {}
        try:
            return cls.parse(_resolved(data, changes) if isinstance(data, dict) else override(data, changes))
        except UserError as error:
            raise UserError(f"{path}{' with the options given' if overrides else ''}: {error}") from None

    @classmethod
    def load_complete(cls, path: str | Path) -> "RunConfig":
        """Reads the config of a run, which `dump` wrote complete: a key that is missing is an error.

        A file of an earlier version need not have what was added later; it is read with the meaning it had.
        """
        config = cls.load(path)
        data = read_yaml(Path(path))
        absent = [part for part in cls.model_fields if part not in data]
        missing = absent or list(_missing(to_current(data), config.model_dump(mode="json")))
        if missing:
            more = f" (and {len(missing) - 1} more)" if len(missing) > 1 else ""
            raise UserError(f"{path} is incomplete: {missing[0]} is missing{more}; the config of a run has every value")
        return config

    @classmethod
    @explained
    def build(cls, model: Any = None, task: Any = None, *, recipe: Any = recipes.AUTO, **options: Any) -> "RunConfig":
        """Makes a config from names and flat options; each option goes to the part that has a field of that name.

        `build("attention", "mqar", pairs=8, n_heads=2, lr=1e-3)`. Where several parts
        have the field, the first of train, task, model, mixer takes the option. A model or a task that is given as an
        object stays as it is; what else is not given comes from the recipe.
        """
        if model is not None and "mixers" in options:
            raise UserError(f"give a model or mixers, not both: got {shown(model)} and {shown(options['mixers'])}")
        if "mixers" in options:
            model = {"mixers": options.pop("mixers")}
        given = tasks.task(task if task is not None else "mqar")
        as_given = given.describe() if isinstance(task, Task) else given.model_dump(mode="json", exclude_unset=True)
        data: dict[str, dict[str, Any]] = {
            "model": model_mapping("attention" if model is None else model),
            "task": {**as_given, "name": given.name},
            "train": {},
        }
        specs = [mixers.as_mapping(m) for m in expand_preset(data["model"])["mixers"]]
        mixer_fields = {f for m in specs for f in mixers.config_class(m["name"]).model_fields}
        places = {
            "train": set(TrainConfig.model_fields),
            "task": set(type(given).model_fields),
            "model": set(ModelConfig.model_fields),
        }
        of_mixers: dict[str, Any] = {}
        for key, value in options.items():
            place = next((p for p, fields in places.items() if key in fields), None)
            if place is not None:
                data[place][key] = value
            elif key in mixer_fields:
                of_mixers[key] = value
            else:
                raise unknown("option", key, set().union(*places.values(), mixer_fields) - {"name"})
        complete = recipes.applied({**data, "recipe": recipe})
        if of_mixers:
            opened = expand_preset(complete["model"])
            specs = [mixers.as_mapping(m) for m in opened["mixers"]]
            for key, value in of_mixers.items():
                mixers.set_option(specs, key, value)
            complete["model"] = {**opened, "mixers": specs}
        return cls.parse({**complete, "recipe": recipes.PLAIN})

    @property
    def digest(self) -> str:
        """The identity of a run with this config: a short digest of what determines its weights."""
        return digest(self)

    def dump(self) -> str:
        """The complete config as YAML: the version of the layout, then every value, defaults included."""
        text: str = yaml.safe_dump({"schema": VERSION, **self.model_dump(mode="json")}, sort_keys=False)
        return text


def _asks_for_next_tokens(task: Task) -> bool:
    """Whether every label is the token after it, which a model that sees ahead would just copy."""
    if task.inputs != "tokens":
        return False
    batch = task.batch(0, size=8)
    tokens, labels = batch.tokens[:, 1:], batch.labels[:, :-1]
    asked = labels != tasks.NO_LABEL
    return bool(asked.any()) and bool((tokens == labels)[asked].all())


def _resolved(data: dict[str, Any], overrides: dict[str, Any] | None = None) -> dict[str, Any]:
    """The data of a file with overrides, in today's layout, with what its recipe says and what its version meant.

    A recipe that is named but finds every field given is an error.
    """
    changed = override(upgraded(data), overrides or {})
    complete, taken = recipes.resolved(changed)
    if changed.get("recipe") in recipes.RECIPES and not taken:
        raise UserError(f"recipe {changed['recipe']} would change nothing: every field that it sets is given")
    return {**as_before(complete, version_of(data)), "recipe": recipes.PLAIN}


def _missing(data: Any, complete: Any, at: str = "") -> Iterator[str]:
    """The dotted paths that a complete config has and this data has not."""
    if isinstance(complete, list):
        complete = dict(enumerate(complete))
    for key, value in complete.items() if isinstance(complete, dict) else ():
        try:
            part = data[key]
        except (LookupError, TypeError):
            yield f"{at}{key}"
        else:
            yield from _missing(part, value, f"{at}{key}.")


def _paths() -> list[str]:
    """The dotted paths of all fields that some config can have."""
    parts: list[tuple[str, type[Section]]] = [("train", TrainConfig), ("model", ModelConfig)]
    parts += [("task", task) for task in tasks.TASKS.values()]
    parts += [("model.mixers.*", mixers.config_class(name)) for name in mixers.names()]
    return list(dict.fromkeys(f"{at}.{field}" for at, part in parts for field in part.model_fields if field != "name"))
