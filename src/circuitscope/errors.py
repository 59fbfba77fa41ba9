"""Errors that a user can act on: one line that says what was wrong, what was expected, and the nearest valid name.

A bug raises an ordinary exception instead, with its traceback.
"""

import difflib
from collections.abc import Iterable


class UserError(Exception):
    """The input was bad. The command line prints the message as one line and exits with code 2."""


class RunFailed(Exception):
    """A run started and could not continue. The command line exits with code 1."""


class Stopped(Exception):
    """Ctrl-C or another signal stopped the work. The command line prints the message and exits with this code."""

    def __init__(self, message: str, exit_code: int = 130):
        super().__init__(message)
        self.exit_code = exit_code


def unknown(kind: str, name: object, valid: Iterable[str]) -> UserError:
    """`unknown task 'mqra'; did you mean 'mqar'? valid: ar, induction, mqar`."""
    names = sorted(valid)
    close = difflib.get_close_matches(str(name), names, n=1, cutoff=0.5)
    hint = f"did you mean '{close[0]}'? " if close else ""
    return UserError(f"unknown {kind} {shown(name)}; {hint}valid: {', '.join(names)}")


def shown(value: object, most: int = 80) -> str:
    """A value as one short line."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # an integer of thousands of digits
        text = f"a very large {type(value).__name__}"
    return text if len(text) <= most else text[: most - 1] + "…"
