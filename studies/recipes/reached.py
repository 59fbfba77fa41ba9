"""Writes src/circuitscope/config/reached.csv, which `circuitscope models` shows, from the tables of this study.

    python studies/recipes/reached.py     # or: make reached

A row counts only if its trial is one of the grid with the recipes of today: after a recipe has changed, its presets are
left out until they are run again.
"""

from pathlib import Path

from circuitscope.config.reached import FILE, Reached, as_csv
from circuitscope.runs.store import write_text
from circuitscope.sweeps.grid import read_grid
from circuitscope.sweeps.results import ResultsTable

HERE = Path(__file__).parent
GRIDS = ("verify", "others")


def rows(study: Path = HERE) -> list[Reached]:
    """One row per preset that was run with all seeds of its grid; a run that diverged reached nothing."""
    found = []
    for name in GRIDS:
        trials, table = read_grid(study / name).trials, ResultsTable(study / name).rows
        for preset in dict.fromkeys(str(trial.values["model.preset"]) for trial in trials):
            several = [table.get(t.digest, {}) for t in trials if t.values["model.preset"] == preset]
            if all(row.get("state") in ("finished", "diverged") for row in several):
                accuracies = [float(row.get("last_test_accuracy", 0.0)) for row in several]
                found.append(Reached(preset, len(several), min(accuracies)))
    return found


if __name__ == "__main__":
    write_text(FILE, as_csv(rows()))
    print(FILE)
