"""The identity of a run: a digest of what determines its weights.

Configs with the same digest give the same weights at every step, on the same machine with the same number of threads,
and end at the same step. The digest covers the complete config, with every value written out, so a default that changes
later does not change it. It leaves out two kinds of fields: those that a section names in `without_effect` (how a run
is recorded and where it is computed; its name is not part of the config), and those that were added later and have the
value that means "as before", so that a new field marked with `Added` changes the digest of no existing run.
"""

import hashlib
import json
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
