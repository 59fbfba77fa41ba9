"""What each preset reaches on MQAR (64, 4), vocabulary 8,192, with the recipe that it takes.

The numbers are in reached.csv, which `make reached` writes from the tables of studies/recipes. A preset that has no row
was not run with the recipe of this release.
"""

import csv
from functools import cache
from pathlib import Path
from typing import NamedTuple

from circuitscope.config.recipes import FAMILIES
from circuitscope.models.presets import PRESETS

FILE = Path(__file__).with_name("reached.csv")


class Reached(NamedTuple):
    """The lowest test accuracy over the seeds."""

    preset: str
    seeds: int
    lowest_accuracy: float


@cache
def reached() -> dict[str, Reached]:
    """What was measured, by preset."""
    with open(FILE, encoding="utf-8", newline="") as file:
        rows = [
            Reached(row["preset"], int(row["seeds"]), float(row["lowest_accuracy"])) for row in csv.DictReader(file)
        ]
    return {row.preset: row for row in rows}


def as_csv(rows: list[Reached]) -> str:
    """The file with these rows, in the order of the presets."""
    order = list(PRESETS)
    lines = [
        f"{row.preset},{row.seeds},{row.lowest_accuracy:.4f}"
        for row in sorted(rows, key=lambda row: order.index(row.preset))
    ]
    return "\n".join([",".join(Reached._fields), *lines]) + "\n"


def in_words(preset: str) -> str:
    """`99%`, `untuned: 24%` or `not run`. No times: trials train beside others, or are held still."""
    found = reached().get(preset)
    if found is None:
        return "not run"
    accuracy = f"{int(100 * found.lowest_accuracy)}%"  # 94.9% is not yet 95%
    tuned = FAMILIES.get(preset) == preset
    return accuracy if tuned else f"untuned: {accuracy}"
