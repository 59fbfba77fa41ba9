"""Turns pydantic's report on bad input into one line for the user."""

from typing import Any

from pydantic import BaseModel, ValidationError

from circuitscope.errors import UserError, shown, unknown


def explain(error: ValidationError, model: type[BaseModel], at: str = "") -> UserError:
    """The first thing that is wrong, by its dotted path; unknown keys with the nearest valid one."""
    first, *others = error.errors()
    path = ".".join(filter(None, [at, *(" ".join(str(part).split()) for part in first["loc"])]))
    if first["type"] == "extra_forbidden":
        return unknown(
            "key", path, [".".join(filter(None, [*path.split(".")[:-1], f])) for f in _fields(model, first["loc"])]
        )
    message = (
        first["msg"]
        .replace("Value error, ", "")
        .replace("Input should be", "expected")
        .replace("expected a valid i", "expected an i")
        .replace("expected a valid", "expected a")
    )
    more = f" (and {len(others)} more)" if others else ""
    return UserError(f"{path}: {message}, got {shown(first['input'])}{more}")


def _fields(model: Any, loc: tuple[int | str, ...]) -> list[str]:
    """The names of the fields that the part with the wrong key has."""
    for part in loc[:-1]:
        field = getattr(model, "model_fields", {}).get(part)
        model = getattr(field, "annotation", None)
    return list(getattr(model, "model_fields", {}))
