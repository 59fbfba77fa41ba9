"""Groups of findings that are known and not repaired yet: a pattern for the group's name, and what it is.

A walk counts them apart and does not fail because of them. Take an entry out with its repair.
"""

KNOWN: dict[str, str] = {
    r"^call with another type: ": "an argument of another type than the function takes raises errors of Python's or torch's",
}
