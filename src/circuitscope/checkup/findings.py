"""What a checkup finds: one row for each thing it looked at, and all rows as a table to paste into an issue."""

from collections.abc import Iterable
from typing import NamedTuple


class Finding(NamedTuple):
    """One row: what was looked at, what computed it, what came out, and whether it is right (None: it is no test)."""

    what: str
    by: str
    result: str
    right: bool | None


def as_markdown(findings: Iterable[Finding]) -> str:
    """The rows as a table in Markdown, its columns aligned so that it also reads well in a terminal."""
    words = {True: "ok", False: "WRONG", None: ""}
    rows = [("checked", "computed by", "result", "right")]
    rows += [(found.what, found.by, found.result, words[found.right]) for found in findings]
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    lines = [f"| {' | '.join(map(str.ljust, row, widths))} |" for row in rows]
    return "\n".join([lines[0], "|".join(["", *("-" * (width + 2) for width in widths), ""]), *lines[1:]])
