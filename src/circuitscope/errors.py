"""Errors that a user can act on: one line that says what was wrong, what was expected, and the nearest valid name.

A bug raises an ordinary exception instead, with its traceback.
"""

import difflib
from collections.abc import Iterable


class _OneLine(Exception):
    """An error whose message is one line, whatever names and values it quotes."""

    def __str__(self) -> str:
        return escaped(super().__str__())


class UserError(_OneLine):
    """The input was bad. The command line prints the message as one line and exits with code 2."""


class RunFailed(_OneLine):
    """A run started and could not continue. The command line exits with code 1."""


def unknown(kind: str, name: object, valid: Iterable[str]) -> UserError:
    """`unknown task 'mqra'; did you mean 'mqar'? valid: ar, induction, mqar`."""
    names = sorted(valid)
    close = difflib.get_close_matches(str(name), names, n=1, cutoff=0.5)
    hint = f"did you mean '{close[0]}'? " if close else ""
    return UserError(f"unknown {kind} {shown(name)}; {hint}valid: {', '.join(names)}")


def escaped(text: object) -> str:
    """A text without the characters that a terminal acts on: a newline in a name becomes \\n, an escape \\x1b.

    Names of runs, paths and the values of a config may come from anywhere. Whatever is printed goes through here.
    """
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in str(text))


def shown(value: object, most: int = 80) -> str:
    """A value as one short line."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # an integer of thousands of digits
        text = f"a very large {type(value).__name__}"
    return text if len(text) <= most else text[: most - 1] + "…"
