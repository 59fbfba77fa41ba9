"""Turns pydantic's report on bad input into one line for the user."""

import re
from collections.abc import Iterable
from typing import Any

from pydantic import BaseModel, ValidationError

from circuitscope.errors import UserError, shown, unknown

_WORDS = {  # what pydantic says, in our words
    "Input should be": "expected",
    "expected greater than or equal to": "expected at least",
    "expected less than or equal to": "expected at most",
    "expected greater than": "expected more than",
    r"\ba valid (?=[aeiou])": "an ",
    r"\ba valid ": "a ",
    ", (unable to parse|got a number).*": "",
}


def explain(error: ValidationError, model: type[BaseModel], at: str = "", elsewhere: Iterable[str] = ()) -> UserError:
    """The first thing that is wrong, by its dotted path; unknown keys with the nearest valid one.

    Args:
        elsewhere: dotted paths of keys in other parts, any of which may be what was meant.
    """
    first, *others = error.errors()
    path = ".".join(filter(None, [at, *map(str, first["loc"])]))
    if first["type"] == "extra_forbidden":
        fields = [".".join(filter(None, [*path.split(".")[:-1], f])) for f in _fields(model, first["loc"])]
        return unknown("key", path, fields, elsewhere)
    more = f" (and {len(others)} more)" if others else ""
    return UserError(f"{path}: {problem(error)}{more}")


def problem(error: ValidationError) -> str:
    """The first thing that is wrong, without where it is: `expected an integer, got 'abc'`."""
    first = error.errors()[0]
    said = first["msg"].removeprefix("Value error, ")
    for pattern, words in _WORDS.items():
        said = re.sub(pattern, words, said)
    return f"{said}, got {shown(first['input'])}"


def _fields(model: Any, loc: tuple[int | str, ...]) -> list[str]:
    """The names of the fields that the part with the wrong key has."""
    for part in loc[:-1]:
        field = getattr(model, "model_fields", {}).get(part)
        model = getattr(field, "annotation", None)
    return list(getattr(model, "model_fields", {}))
