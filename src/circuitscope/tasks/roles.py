"""What a position of a sequence is for, with the one colour it has in figures, in the report and in the terminal.

Six roles come with the package; a task that needs another adds it: `NOISE = Role.add("noise", "#CC79A7", "to ignore")`.
"""

import re
from collections.abc import Iterator
from typing import ClassVar

from circuitscope.errors import UserError, unknown

_MOST = 127  # roles stand in tensors of 8-bit integers


class _Listed(type):
    """Lets `for role in Role` and `len(Role)` go over all roles that are known."""

    def __iter__(cls) -> Iterator["Role"]:
        return iter(list(_KNOWN.values()))

    def __len__(cls) -> int:
        return len(_KNOWN)


class Role(int, metaclass=_Listed):
    """A role is its number in `Layout.roles`, with a name, a colour and a few words about it.

    `Role(3)` and `Role.named("query")` look a role up. Numbers are given in the order of adding and may differ from
    one process to the next, so only names are saved to disk.
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

    def __new__(cls, number: int) -> "Role":
        roles = list(_KNOWN.values())
        if not 0 <= number < len(roles):
            raise UserError(f"there is no role number {number}; expected 0 to {len(roles) - 1}")
        return roles[number]

    @classmethod
    def add(cls, name: str, colour: str, about: str) -> "Role":
        """A new role, or the one of that name if it is described in the same way."""
        if name in _KNOWN:
            known = _KNOWN[name]
            if (known.colour, known.about) != (colour, about):
                raise UserError(
                    f"the role '{name}' is there already, {known.colour}, \"{known.about}\";"
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
        """The role of that name, in small or capital letters."""
        if name.lower() not in _KNOWN:
            raise unknown("role", name, _KNOWN)
        return _KNOWN[name.lower()]

    def __repr__(self) -> str:
        return f"Role.named({self.name!r})"


_KNOWN: dict[str, Role] = {}

# Colours of Okabe and Ito; no black and no white, so that they can be seen on light and on dark.
Role.FILLER = Role.add("filler", "#B3B3B3", "says nothing about the answer")
Role.KEY = Role.add("key", "#0072B2", "what a value is bound to")
Role.VALUE = Role.add("value", "#D55E00", "what a key stands for, right after it")
Role.QUERY = Role.add("query", "#009E73", "a key again: its value is asked for")
Role.START = Role.add("start", "#CC79A7", "the first token, always the same")
Role.BLOCK = Role.add("block", "#56B4E9", "a token of the block that is repeated")
