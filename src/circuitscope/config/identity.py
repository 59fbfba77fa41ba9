"""The identity of a run: a digest of what determines its weights.

Configs with the same digest give the same weights at every step, on the same machine with the same number of threads,
and end at the same step. The digest covers the complete config, with every value written out, so a default that changes
later does not change it. It leaves out two kinds of fields: those that a section names in `without_effect` (how a run
is recorded and where it is computed; its name is not part of the config), and those that were added later and have the
value that means "as before", so that a new field marked with `Added` changes the digest of no existing run.
"""

import hashlib
import json
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from pydantic_core import to_jsonable_python

from circuitscope.section import Section

if TYPE_CHECKING:
    from circuitscope.config.run import RunConfig

_DIGITS = 12


def digest(config: "RunConfig") -> str:
    """The digest of a config: twelve hexadecimal digits."""
    text = json.dumps(_seeded(config), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:_DIGITS]


def differ_in_seed_alone(one: "RunConfig", other: "RunConfig") -> bool:
    """Whether two runs differ in the seeds of their weights or examples, and in nothing else that counts."""
    return _seeds(one) != _seeds(other) and _seedless(one) == _seedless(other)


def differences(configs: "Sequence[RunConfig]") -> dict[str, list[Any]]:
    """The fields that count in some config and are not the same in all: by dotted name, the value in each config.

    The name of a mixer or task stands under the name of its section. What follows from other fields is left out: a
    field that some configs do not have, a field of the model that has what its mixers and its task give it in every
    config, and the seed of the examples where it is everywhere that of the weights.
    """
    every = [{name: value for name, value, _ in _fields(config)} for config in configs]
    counted = {name for config in configs for name, _, counts in _fields(config) if counts}
    given = [_given(config) for config in configs]
    out = {}
    for name in every[0] if every else ():
        values = [fields[name] for fields in every if name in fields]
        if name not in counted or len(values) < len(every) or all(value == values[0] for value in values):
            continue
        if not all(name in own and own[name] == value for own, value in zip(given, values, strict=True)):
            out[name] = values
    return out


def _fields(config: "RunConfig") -> Iterator[tuple[str, Any, bool]]:
    """Every field: its dotted name, its value and whether it counts."""
    for name, value, counts in _flat("", config):
        yield name, config.train.batch_seed if name == "train.data_seed" else value, counts


def _flat(name: str, value: Any, counts: bool = True) -> Iterator[tuple[str, Any, bool]]:
    """The fields of a section and of its parts. A field of several layers is a list, or one value if all are equal."""
    if isinstance(value, Section):
        silent = value.without_effect()
        for part, field in value:
            dotted = name if part == "name" else f"{name}.{part}".lstrip(".")
            yield from _flat(dotted, field, counts and part not in silent)
    elif isinstance(value, list | tuple) and value and all(isinstance(item, Section) for item in value):
        layers: dict[str, list[tuple[Any, bool]]] = {}
        for item in value:
            for part, field, does in _flat(name, item, counts):
                layers.setdefault(part, []).append((field, does))
        for part, found in layers.items():
            fields = [field for field, _ in found]
            same = all(field == fields[0] for field in fields)
            yield part, fields[0] if same else fields, any(does for _, does in found)
    else:
        yield name, to_jsonable_python(value), counts


def _given(config: "RunConfig") -> dict[str, Any]:
    """What fields have where nobody chose: the model's by its mixers and its task, the seed of the examples."""
    model = type(config.model)(mixers=config.model.mixers, n_layers=config.model.n_layers)
    by_mixers = {
        name: value
        for name, value, _ in _flat("model", model)
        if name != "model.n_layers" and not name.startswith("model.mixers")
    }
    by_task = {f"model.{name}": value for name, value in config.task.needs().items()}
    return by_mixers | by_task | {"train.data_seed": config.train.seed}


def _seeds(config: "RunConfig") -> dict[str, int]:
    return {"seed": config.train.seed, "data_seed": config.train.batch_seed}


def _seeded(config: "RunConfig") -> dict[str, Any]:
    data = _seedless(config)
    return data | {"train": data["train"] | _seeds(config)}


def _seedless(config: "RunConfig") -> dict[str, Any]:
    data: dict[str, Any] = _what_counts(config)
    return data | {"train": {name: value for name, value in data["train"].items() if name not in _seeds(config)}}


def _what_counts(value: Any) -> Any:
    """A value as plain data; a section gives only the fields that count."""
    if isinstance(value, Section):
        silent, added = value.without_effect(), value.added()
        return {
            name: _what_counts(field)
            for name, field in value
            if name not in silent and not (name in added and field == added[name].before)
        }
    if isinstance(value, list | tuple):
        return [_what_counts(item) for item in value]
    if isinstance(value, dict):
        return {str(key): _what_counts(item) for key, item in value.items()}
    return to_jsonable_python(value)
