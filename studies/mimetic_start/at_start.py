"""Sets the window of learning rates of every one-layer model against what it has before its first step.

    python studies/mimetic_start/at_start.py

For each model and seed of mimetic_start, newer_architectures and decay_or_delta it builds the untrained model and
measures on held-out sequences how fast Φ falls off with distance (κ), how far gradients reach, and what the transition
keeps over half of the sequence. The window of learning rates and the size of the state come from the tables. It writes
at_start.csv and figures/mimetic_start-at-start.png. Windows that reach an end of their grid are lower bounds. A model
of two studies counts once, with the more rates.
"""

from collections import defaultdict
from pathlib import Path
from typing import Any

import pandas as pd

from circuitscope.analysis import decay_rows
from circuitscope.models.build import build_model
from circuitscope.sweeps.grid import Trial, read_grid
from circuitscope.sweeps.results import ResultsTable
from circuitscope.sweeps.windows import window
from circuitscope.viz.style import COLOURS, Sheet, look, plain, save

HERE = Path(__file__).parent
TABLE = HERE / "at_start.csv"
STUDIES = ("mimetic_start", "newer_architectures", "decay_or_delta")
SEQUENCES, PROBES = 64, 8
FEWEST = 6  # rates; models that were trained at five alone pass at all of them, which says little
PANELS = {
    "kappa": "κ of Φ at the start, per position",
    "reach": "gradient over 8 positions, of that over 0",
    "kept": "kept over 8 positions at the start",
    "state_size": "numbers in the state",
}


def at_start(trial: Trial) -> dict[str, float]:
    """κ, gradient reach and transition of a model before its first step; nan where it has no such number."""
    config = trial.config
    half = config.task.max_length // 2
    model = build_model(config.model, seed=config.train.seed).eval()
    tokens = config.task.batch(0, split="test", size=SEQUENCES).tokens
    found = pd.DataFrame(decay_rows(model, tokens, probes=PROBES))

    def value(quantity: str, factor: str, lag: int | None = None) -> float:
        rows = found[(found.quantity == quantity) & (found.factor == factor)]
        rows = rows if lag is None else rows[rows.lag == lag]
        return float(rows.value.iloc[0]) if len(rows) else float("nan")

    reach = value("gradient_reach", "gradient", half) / value("gradient_reach", "gradient", 0)
    kept = value("transition_rms_median", "transition", half)
    return {"kappa": value("kappa_median", "phi"), "reach": reach, "kept": kept}


def rows_of(study: str) -> list[dict[str, Any]]:
    """One row for each one-layer model and seed of a study whose trials are done."""
    grid, results = read_grid(HERE.parent / study), ResultsTable(HERE.parent / study)
    (axis,) = set(grid.axes) - {"train.seed", "train.lr"}
    cells = defaultdict(list)
    for trial in grid.trials:
        if trial.config.model.n_layers == 1:
            cells[trial.values[axis], trial.config.train.seed].append(trial)
    rows = []
    for (name, seed), trials in cells.items():
        table = [results.rows[trial.digest] for trial in trials]
        found = window([t.config.train.lr for t in trials], [row["best_test_accuracy"] for row in table])
        start = at_start(trials[0])
        rows.append(
            {"study": study, "model": name, "seed": seed, **start, "state_size": table[0]["state_size"]}
            | {"rates": len(trials), "window": found.decades, "at_least": found.at_least}
        )
        print(rows[-1], flush=True)
    return rows


def figure(table: pd.DataFrame) -> Sheet:
    """A panel for each quantity: the window against it, a triangle where the window is a lower bound."""
    with look():
        sheet = Sheet(table=lambda: table, figsize=(8.6, 2.9), layout="constrained")
        kinds = {"Mamba": "Mamba", "Mamba2": "Mamba2", "delta": "delta rules"}
        for axes, (column, words) in zip(sheet.subplots(1, len(PANELS), sharey=True), PANELS.items(), strict=True):
            for (kind, label), colour in zip(kinds.items(), COLOURS, strict=False):
                of_kind = table[table.kind == kind]
                for bound, marker in ((False, "o"), (True, "^")):
                    some = of_kind[of_kind.at_least == bound]
                    named = label if not bound else None
                    axes.plot(some[column], some.window, marker, color=colour, ms=4.5, ls="", alpha=0.8, label=named)
            if column == "reach":
                axes.set_xscale("log")
            axes.set_xlabel(words, fontsize=7.5)
            plain(axes)
            axes.set_ylim(0, 3)
            if column == "kappa":
                axes.set_ylabel("window of learning rates, decades")
                axes.plot([], [], "^", color="0.4", ms=4.5, ls="", label="at least")
                axes.legend(frameon=False, fontsize=6.5, loc="lower right")
        sheet.suptitle("The window of learning rates against what a model has before its first step")
    return sheet


def main() -> None:
    """Measures, writes the table, and draws it."""
    table = pd.DataFrame([row for study in STUDIES for row in rows_of(study)])
    kinds = {"Mamba2": "Mamba2", "Mamba": "Mamba"}
    table["kind"] = [next((kind for word, kind in kinds.items() if word in one), "delta") for one in table.model]
    table = table.sort_values("rates", kind="stable").drop_duplicates(["seed", "reach"], keep="last")  # in two studies
    table = table[table.rates >= FEWEST].sort_index()
    table.to_csv(TABLE, index=False, float_format="%.4g")
    save(figure(pd.read_csv(TABLE)), HERE.parents[1] / "figures/mimetic_start-at-start.png")


if __name__ == "__main__":
    main()
