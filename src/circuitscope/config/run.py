"""RunConfig: model, task and training in one strict record."""

from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ConfigDict, Field, SerializeAsAny, ValidationError, model_validator

from circuitscope import mixers, tasks
from circuitscope.config.overrides import override, read_yaml
from circuitscope.config.train import TrainConfig
from circuitscope.errors import UserError, shown, unknown
from circuitscope.explain import explain
from circuitscope.models.config import ModelConfig
from circuitscope.models.presets import PRESETS, expand_preset, named_model
from circuitscope.tasks import Task


class RunConfig(BaseModel):
    """Everything a run needs; equal configs on one machine give equal weights, bit by bit."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: ModelConfig = Field(default_factory=ModelConfig)
    task: SerializeAsAny[Task] = Field(default_factory=lambda: tasks.task("mqar"))
    train: TrainConfig = Field(default_factory=TrainConfig)

    @model_validator(mode="before")
    @classmethod
    def _resolve(cls, data: Any) -> Any:
        """Names become configs; the model's vocabulary and length come from the task."""
        if not isinstance(data, dict):
            return data
        data = dict(data)
        task = data["task"] = _task(data.get("task", "mqar"))
        model = data.get("model", {})
        if isinstance(model, str):
            model = named_model(model)
        if isinstance(model, dict):
            model = {**task.needs(), **model}
        data["model"] = model
        return data

    @model_validator(mode="after")
    def _model_fits_task(self) -> "RunConfig":
        for field, need in self.task.needs().items():
            have = getattr(self.model, field)
            if have < need:
                raise UserError(f"model.{field} must be at least the task's {need}, got {have}")
        return self

    @classmethod
    def parse(cls, data: Any) -> "RunConfig":
        """From plain data; what is wrong comes back as one line."""
        if not isinstance(data, dict):
            raise UserError(f"a config is a mapping with model, task and train, got {type(data).__name__}")
        try:
            return cls.model_validate(data)
        except ValidationError as error:
            raise explain(error, cls) from None

    @classmethod
    def load(cls, path: str | Path, overrides: dict[str, Any] | None = None) -> "RunConfig":
        """From a YAML file, with dotted overrides applied."""
        return cls.parse(override(read_yaml(Path(path)), overrides or {}))

    @classmethod
    def build(cls, model: Any = None, task: Any = None, **options: Any) -> "RunConfig":
        """From names and flat options, each sent to the part that has a field of that name.

        `build("attention", "mqar", pairs=8, n_heads=2, lr=1e-3)`. Where two parts share a name the
        order is train, task, model, mixer.
        """
        task = _task(task if task is not None else "mqar")
        model = _model(model)
        if "n_layers" in options and "preset" in model:
            model["n_layers"] = options.pop("n_layers")
        model = expand_preset(model)
        specs = model["mixers"] = [mixers.as_mapping(m) for m in model["mixers"]]
        data: dict[str, Any] = {"task": task.describe(), "train": {}, "model": model}
        mixer_fields = {f for m in specs for f in mixers.config_class(m["name"]).model_fields}
        places = {
            "train": set(TrainConfig.model_fields),
            "task": set(type(task).model_fields),
            "model": set(ModelConfig.model_fields),
        }
        for key, value in options.items():
            place = next((p for p, fields in places.items() if key in fields), None)
            if place is not None:
                data[place][key] = value
            elif key in mixer_fields:
                mixers.set_option(specs, key, value)
            else:
                raise unknown("option", key, set().union(*places.values(), mixer_fields) - {"name"})
        return cls.parse(data)

    def dump(self) -> str:
        """As YAML, complete: every default is written out."""
        text: str = yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False)
        return text


def _task(spec: Any) -> Task:
    if isinstance(spec, Task):
        return spec
    if isinstance(spec, str):
        spec = {"name": spec}
    if not isinstance(spec, dict):
        raise UserError(f"task: expected a name or a mapping, got {shown(spec)}; names: {', '.join(tasks.names())}")
    options = {str(k): v for k, v in spec.items() if k != "name"}
    return tasks.task(spec.get("name", "mqar"), **options)


def _model(spec: Any) -> dict[str, Any]:
    """A model given as a name, a mapping or a config, as a mapping with a list of mixers."""
    if isinstance(spec, ModelConfig):
        return spec.model_dump(mode="json")
    if spec is None or isinstance(spec, str):
        spec = named_model(spec or "attention")
    if not isinstance(spec, dict):
        raise UserError(f"model: expected a name or a mapping, got {shown(spec)}; names: {', '.join(PRESETS)}")
    if "preset" in spec:
        return dict(spec)
    listed = spec.get("mixers", "attention")
    if isinstance(listed, str):
        listed = [m.strip() for m in listed.split(",")]
    if not isinstance(listed, list | tuple):
        raise UserError(f"model.mixers: expected a list of mixers, got {shown(listed)}")
    return {**spec, "mixers": list(listed)}
