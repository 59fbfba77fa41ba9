"""Options that take several names or numbers, separated by commas."""

from circuitscope.errors import UserError, shown


def names(option: str, text: str) -> list[str]:
    """`--mark recall,binding` as ["recall", "binding"]."""
    parts = [part.strip() for part in text.split(",")]
    if not all(parts):
        raise UserError(f"{option}: expected names separated by commas, got {shown(text)}")
    return parts


def numbers(option: str, text: str, or_else: str = "") -> list[int]:
    """`--layers 0,2` as [0, 2].

    Args:
        or_else: what else the option takes, for the error.
    """
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and len(part) < 19 for part in parts):
        raise UserError(f"{option}: expected {or_else}numbers such as 0,2, got {shown(text)}")
    return [int(part) for part in parts]
