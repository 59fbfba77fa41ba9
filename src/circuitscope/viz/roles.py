"""How a role looks, in figures and in the report: its name, its colour, and whether it stays in the background."""

from typing import NamedTuple

from circuitscope.errors import UserError
from circuitscope.tasks import Role
from circuitscope.viz.style import COLOURS


class RoleLook(NamedTuple):
    """`quiet` positions have no part in the task: their tokens are labelled last, in grey."""

    name: str
    colour: str
    quiet: bool


def role_look(number: int) -> RoleLook:
    """The look of a role by its number in `Layout.roles`; a number that no role has is shown as such."""
    try:
        role = Role(int(number))
    except UserError:
        return RoleLook(f"role {int(number)}", COLOURS[int(number) % len(COLOURS)], quiet=False)
    return RoleLook(role.name, role.colour, quiet=role == Role.FILLER)
