"""Versions of config.yaml: a file of an earlier version is read with the meaning it had then.

A file says its version in the key `schema`; one without it has version 1. To change the layout, raise VERSION and add
to UPGRADES the function that turns data of the version before into data of the new one. To add a field, raise VERSION
and mark the field with `Added`. What a file gives by its name alone, such as a preset, means what the name stands for
today.
"""

from collections.abc import Callable, Iterator
from copy import deepcopy
from typing import Any

from circuitscope import mixers, tasks
from circuitscope.config.train import TrainConfig
from circuitscope.errors import UserError, shown
from circuitscope.models.config import ModelConfig
from circuitscope.section import Section

VERSION = 6


def _without_ignored_positions(data: dict[str, Any]) -> dict[str, Any]:
    """Version 1 accepted rope and alibi for mixers that ignored them, and trained without positions."""
    model = data.get("model")
    listed = model.get("mixers") if isinstance(model, dict) else None
    if not isinstance(model, dict) or not isinstance(listed, list) or model.get("positions") not in ("rope", "alibi"):
        return data
    kinds = [mixers.config_class(mixer.get("name") if isinstance(mixer, dict) else mixer) for mixer in listed]
    if any(model["positions"] in kind.positions_inside for kind in kinds):
        return data
    return {**data, "model": {**model, "positions": "none"}}


UPGRADES: dict[int, Callable[[dict[str, Any]], dict[str, Any]]] = {  # by the version that they lead to
    2: _without_ignored_positions
}


def to_current(data: dict[str, Any]) -> dict[str, Any]:
    """The data of a config file in today's layout, without its version and complete as of its version."""
    return as_before(upgraded(data), version_of(data))


def version_of(data: dict[str, Any]) -> int:
    """The version that a config file says it has."""
    version = data.get("schema", 1)
    if not isinstance(version, int) or isinstance(version, bool) or version < 1:
        raise UserError(f"schema: expected a version from 1 to {VERSION}, got {shown(version)}")
    if version > VERSION:
        raise UserError(
            f"schema: this config has version {shown(version)}, and this release of circuitscope reads versions up to"
            f" {VERSION}; install a newer release"
        )
    return version


def upgraded(data: dict[str, Any]) -> dict[str, Any]:
    """The data of a config file in today's layout, without its version. Fields that came later are still missing."""
    version = version_of(data)
    data = {key: value for key, value in data.items() if key != "schema"}
    if version < VERSION:
        data = deepcopy(data)
        for upgrade in (UPGRADES[v] for v in range(version + 1, VERSION + 1) if v in UPGRADES):
            data = upgrade(data)
    return data


def as_before(data: dict[str, Any], version: int) -> dict[str, Any]:
    """Data of that version with the fields that came later, each with the value that means "as before"."""
    if version == VERSION:
        return data
    data = deepcopy(data)
    for part, kind in _parts(data):
        later = {name: mark.before for name, mark in kind.added().items() if version < mark.schema}
        part.update(later | part)
    return data


def _parts(data: dict[str, Any]) -> Iterator[tuple[dict[str, Any], type[Section]]]:
    """The mappings in a config, each with the class that has its fields."""
    model, task, train = (data.setdefault(name, {}) for name in ("model", "task", "train"))
    if isinstance(model, dict):
        yield model, ModelConfig
        for mixer in model["mixers"] if isinstance(model.get("mixers"), list) else []:
            if isinstance(mixer, dict):
                yield mixer, mixers.config_class(mixer.get("name"))
    if isinstance(task, dict):
        yield task, tasks.TASKS[task.get("name", "mqar")]
    if isinstance(train, dict):
        yield train, TrainConfig
