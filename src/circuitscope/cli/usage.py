"""What is wrong with the words of a command line, before any command runs."""

from collections.abc import Sequence
from itertools import pairwise

import typer


def empty(words: Sequence[str]) -> str:
    """The first option or argument that is given an empty text, as an unset variable of a shell gives it; or ""."""
    for before, word in pairwise(["", *words]):
        option, equals, value = word.partition("=")
        if not word.strip():
            return before if before.startswith("--") and "=" not in before else "an argument"
        if option.startswith("--") and equals and not value.strip():
            return option
    return ""


def told(error: typer.TyperException) -> str:
    """Typer's message; where an option cannot take a value, the option and that value in our words."""
    option, cause = getattr(error, "param", None), error.__cause__
    if option is None or cause is None:
        return error.format_message()
    from pydantic import ValidationError  # loaded already: Typer checks values with it

    from circuitscope.explain import problem

    return f"{option.opts[0]}: {problem(cause)}" if isinstance(cause, ValidationError) else error.format_message()
