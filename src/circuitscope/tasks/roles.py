"""The roles of positions in a sequence, each with its one colour for figures, the report and the terminal.

Thirteen roles come with the package. A task can add another: `NOISE = Role.add("noise", "#CC79A7", "to ignore")`.
"""

import re
from collections.abc import Iterator
from typing import ClassVar

from circuitscope.errors import UserError, unknown

_MOST = 127  # layouts store roles as 8-bit integers


class _Listed(type):
    """Makes `for role in Role` and `len(Role)` cover all roles that are known."""

    def __iter__(cls) -> Iterator["Role"]:
        return iter(list(_KNOWN.values()))

    def __len__(cls) -> int:
        return len(_KNOWN)


class Role(int, metaclass=_Listed):
    """A role is its number in `Layout.roles`, with a name, a colour and a few words about it.

    `Role(3)` and `Role.named("query")` look a role up. Roles are numbered in the order in which they are added, which
    may differ from one process to the next, so only names are saved to disk.
    """

    name: str
    colour: str  # "#RRGGBB"
    about: str

    FILLER: ClassVar["Role"]
    KEY: ClassVar["Role"]
    VALUE: ClassVar["Role"]
    QUERY: ClassVar["Role"]
    START: ClassVar["Role"]
    BLOCK: ClassVar["Role"]
    PAIR: ClassVar["Role"]
    INPUT: ClassVar["Role"]
    OUTPUT: ClassVar["Role"]
    HIDDEN: ClassVar["Role"]
    OUTLIER: ClassVar["Role"]
    SEPARATOR: ClassVar["Role"]
    SYMBOL: ClassVar["Role"]

    def __new__(cls, number: int) -> "Role":
        roles = list(_KNOWN.values())
        if not 0 <= number < len(roles):
            raise UserError(f"there is no role number {number}; expected 0 to {len(roles) - 1}")
        return roles[number]

    @classmethod
    def add(cls, name: str, colour: str, about: str) -> "Role":
        """Adds a role, or returns the known role of that name if its colour and description are the same."""
        if name in _KNOWN:
            known = _KNOWN[name]
            if (known.colour, known.about) != (colour, about):
                raise UserError(
                    f"the role '{name}' exists already, {known.colour}, \"{known.about}\";"
                    f' use Role.named("{name}"), or choose another name'
                )
            return known
        if not re.fullmatch("#[0-9A-Fa-f]{6}", colour) or not re.fullmatch("[a-z][a-z0-9_]*", name):
            raise UserError(
                "a role needs a name in small letters and a colour such as #0072B2,"
                f" got name '{name}' and colour '{colour}'"
            )
        if len(_KNOWN) > _MOST:
            raise UserError(f"there are {len(_KNOWN)} roles already, and a layout can hold no more")
        role = int.__new__(cls, len(_KNOWN))
        role.name, role.colour, role.about = name, colour, about
        _KNOWN[name] = role
        return role

    @classmethod
    def named(cls, name: str) -> "Role":
        """The role of that name, which may be in small or capital letters."""
        if name.lower() not in _KNOWN:
            raise unknown("role", name, _KNOWN)
        return _KNOWN[name.lower()]

    def __repr__(self) -> str:
        return f"Role.named({self.name!r})"


_KNOWN: dict[str, Role] = {}

# Colours of Okabe and Ito, without black and white, so that all are visible on light and on dark backgrounds.
Role.FILLER = Role.add("filler", "#B3B3B3", "says nothing about the answer")
Role.KEY = Role.add("key", "#0072B2", "what a value is bound to")
Role.VALUE = Role.add("value", "#D55E00", "what a key stands for, right after it")
Role.QUERY = Role.add("query", "#009E73", "a key again: its value is asked for")
Role.START = Role.add("start", "#CC79A7", "the first token, always the same")
Role.BLOCK = Role.add("block", "#56B4E9", "a token of the block that is repeated")
Role.PAIR = Role.add("pair", "#A6761D", "a key and its value in one token")
Role.INPUT = Role.add("input", "#7570B3", "x: the value of a function there is asked for")
Role.OUTPUT = Role.add("output", "#E7298A", "y, the value of the function at the x before it")
Role.HIDDEN = Role.add("hidden", "#1B9E77", "s, what the function computes on its way from x to y")
Role.OUTLIER = Role.add("outlier", "#8C8C5A", "x or y that says nothing about the function")
Role.SEPARATOR = Role.add("separator", "#8C6BB1", "stands between strings")
Role.SYMBOL = Role.add("symbol", "#4E9A57", "a token of a string")
