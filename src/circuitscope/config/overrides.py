"""Configs as plain data: reads YAML files and applies dotted overrides such as model.d_model=128."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml

from circuitscope.errors import UserError, shown
from circuitscope.models.presets import expand_preset, model_mapping


def read_yaml(path: Path) -> Any:
    """Reads a YAML file as plain data with the safe loader, which runs no code."""
    try:
        data = yaml.safe_load(path.read_text())
        return {} if data is None else data
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None
    except RecursionError:
        raise UserError(f"{path} is nested too deeply") from None
    except (yaml.YAMLError, ValueError) as error:  # ValueError: the date 2001-99-99, UnicodeDecodeError
        raise UserError(f"{path} is not valid YAML: {' '.join(str(error).split())}") from None


def parse_assignments(pairs: Iterable[str]) -> dict[str, Any]:
    """`["model.d_model=128"]` as {"model.d_model": 128}; values are read as YAML."""
    out = {}
    for pair in pairs:
        path, equals, text = pair.partition("=")
        if not equals or not path:
            raise UserError(f"--set takes KEY=VALUE, for example model.d_model=128, got '{pair}'")
        try:
            out[path] = yaml.safe_load(text)
        except (yaml.YAMLError, ValueError, RecursionError):
            raise UserError(f"--set {path}: {shown(text)} is not a YAML value") from None
    return out


def override(data: Any, assignments: dict[str, Any]) -> Any:
    """Returns a copy of plain data in which the dotted paths have the given values.

    In a list of mixers a number picks one and `*` picks all: `model.mixers.0.n_heads`. A model, task or
    mixer given by its name is opened into the mapping that it stands for.
    """
    if not assignments:
        return data
    if not isinstance(data, dict):
        raise UserError(f"a config is a mapping with model, task and train, got {type(data).__name__}")
    data = _copy(data)
    late = [path for path in assignments if path.startswith("model.mixers.")]
    for path in [p for p in assignments if p not in late]:
        _assign(data, path.split("."), assignments[path], path)
    if late:
        data["model"] = expand_preset(model_mapping(data.get("model", {})))
    for path in late:
        _assign(data, path.split("."), assignments[path], path)
    return data


def _assign(node: Any, parts: list[str], value: Any, path: str) -> None:
    first, rest = parts[0], parts[1:]
    if isinstance(node, list):
        picked: list[Any] = list(range(len(node))) if first == "*" else [_number(first)]
        if not picked or not 0 <= picked[0] < len(node):
            raise UserError(f"{shown(path)}: {shown(first)} is not one of the mixers 0 to {len(node) - 1}, nor *")
    elif isinstance(node, dict):
        picked = [first]
    else:
        raise UserError(f"'{path}': '{first}' cannot be set, because what it is in is not a section")
    for key in picked:
        if not rest:
            node[key] = value
            continue
        child = node[key] if isinstance(node, list) else node.get(key, {})
        if isinstance(child, str):
            child = model_mapping(child) if key == "model" else {"name": child}
        node[key] = child
        _assign(child, rest, value, path)


def _number(text: str) -> int:
    """The number that a part of a path is; −1 if it is none, or far too large."""
    return int(text) if text.isdecimal() and len(text) < 10 else -1


def _copy(data: Any) -> Any:
    if isinstance(data, dict):
        return {k: _copy(v) for k, v in data.items()}
    return [_copy(v) for v in data] if isinstance(data, list) else data
