"""Configs as plain data: reads YAML files and applies dotted overrides such as model.d_model=128."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml

from circuitscope.config import recipes
from circuitscope.errors import UserError, shown
from circuitscope.models.presets import expand_preset, model_mapping

_MERGE = "tag:yaml.org,2002:merge"


class _OnceEach(yaml.SafeLoader):
    """The safe loader, which runs no code; a key that stands twice in a mapping is an error."""

    def compose_mapping_node(self, anchor: Any) -> Any:
        node = super().compose_mapping_node(anchor)
        lines: dict[Any, int] = {}
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode) and key.tag != _MERGE):
            name, line = (key.tag, key.value), key.start_mark.line + 1
            if name in lines:
                raise yaml.YAMLError(f"the key {shown(key.value)} stands twice, in lines {lines[name]} and {line}")
            lines[name] = line
        return node


def read_yaml(path: Path) -> Any:
    """Reads a YAML file as plain data. Reading runs no code, and a key that stands twice is an error."""
    try:
        data = _plain_data(path.read_text())
        return {} if data is None else data
    except IsADirectoryError:
        has = f"; did you mean {path / 'config.yaml'}?" if (path / "config.yaml").is_file() else ""
        raise UserError(f"cannot read {path}: it is a folder, and a config is a file{has}") from None
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None
    except RecursionError:
        raise UserError(f"{path} is nested too deeply") from None
    except (yaml.YAMLError, ValueError) as error:  # ValueError: the date 2001-99-99, UnicodeDecodeError
        raise UserError(f"{path} is not valid YAML: {_without_source(error)}") from None


def _without_source(error: Exception) -> str:
    """What YAML says, in one line, without the name that it gives to a text."""
    return " ".join(str(error).replace('in "<unicode string>", ', "in ").split())


def parse_assignments(pairs: Iterable[str]) -> dict[str, Any]:
    """`["model.d_model=128"]` as {"model.d_model": 128}; values are read as YAML, and each key is given once."""
    out: dict[str, Any] = {}
    for pair in pairs:
        path, equals, text = pair.partition("=")
        if not equals or not path:
            raise UserError(f"--set takes KEY=VALUE, for example model.d_model=128, got {shown(pair)}")
        if not text.strip():
            raise UserError(f"--set {path}: the value is empty; give one, or null for none")
        if path in out:
            raise UserError(f"--set gives '{path}' twice; give it once")
        try:
            out[path] = _plain_data(text)
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
    _check_no_section_contradicts(assignments)
    in_order = sorted(assignments, key=lambda path: (path.count("."), "*" not in path))  # what holds more goes first
    late = [path for path in in_order if path.startswith("model.mixers.")]
    for path in [p for p in in_order if p not in late]:
        _assign(data, path.split("."), assignments[path], path)
    if late:  # this opens the preset; its recipe comes first, because it wins over what the preset says
        data = recipes.applied(data) | {"recipe": recipes.PLAIN}
        data["model"] = expand_preset(model_mapping(data.get("model", {})))
    for path in late:
        _assign(data, path.split("."), assignments[path], path)
    return data


def _plain_data(text: str) -> Any:
    loader = _OnceEach(text)
    try:
        return loader.get_single_data()
    finally:
        loader.dispose()


def _check_no_section_contradicts(assignments: dict[str, Any]) -> None:
    """Refuses a whole section that says a key which is also given by itself: one of the two would be lost."""
    for section in [path for path in assignments if "." not in path]:
        value = assignments[section]
        if isinstance(value, str):
            value = model_mapping(value) if section == "model" else {"name": value}
        for key in value if isinstance(value, dict) else ():
            if f"{section}.{key}" in assignments:
                raise UserError(f"'{section}.{key}' is given twice: by itself and in '{section}'; give it once")


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
