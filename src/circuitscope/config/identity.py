"""The identity of a run: a digest of what determines its weights.

Configs with one digest give, on one machine and number of threads, the same weights at every step, and end at the
same step. The digest is over the complete config, with every value written out, so a default that changes later does
not change it. Left out are the fields that a part names in `without_effect` (how a run is recorded and where it is
computed; its name is no part of the config), and fields that were added later and have the value that means "as
before": a new field marked with `Added` changes the digest of no run that exists.
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
    """Twelve hexadecimal digits."""
    text = json.dumps(_seeded(config), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:_DIGITS]


def differ_in_seed_alone(one: "RunConfig", other: "RunConfig") -> bool:
    """Whether two runs are the same but for the seeds of their weights or examples, which do differ."""
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
    """A value as plain data; of a section, the fields that count."""
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
