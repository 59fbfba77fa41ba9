"""Draws whose learning rate is too high: accuracy and AdamW's stability with one group of parameters slowed at a time.

    python studies/why_rates_fail/whose_rate.py

Reads the table of groups/ and writes figures/why_rates_fail-groups.png. Every trial runs at a rate at which its model
fails, and one group of parameters has a tenth of that rate. A row is a group, a point is a seed.
"""

from pathlib import Path

import pandas as pd
from matplotlib.ticker import LogLocator, NullLocator

from circuitscope.sweeps.grid import read_grid
from circuitscope.sweeps.results import ResultsTable
from circuitscope.sweeps.windows import THRESHOLD
from circuitscope.viz.style import COLOURS, GREY, Sheet, look, plain, save

HERE = Path(__file__).parent
FIGURE = HERE.parents[1] / "figures/why_rates_fail-groups.png"
MODELS = {"mamba": "one layer of Mamba", "attention": "two layers of attention"}
WORDS = {
    "none": "none slowed",
    "mixer": "mixer, all of it",
    "in_proj": "mixer: input projection",
    "conv": "mixer: conv",
}
WORDS |= {"scan": "mixer: scan (Δ, B, C, A, D)", "out": "mixer: output projection"}
COLUMNS = {"best_test_accuracy": "accuracy on test", "stability_ratio_max": "curvature over AdamW's limit"}


def measured() -> pd.DataFrame:
    """A row for each trial that is done: model, rate, group, seed, accuracy and stability."""
    grid, results = read_grid(HERE / "groups"), ResultsTable(HERE / "groups")
    return pd.DataFrame(
        {
            "model": trial.values["model.preset"],
            "rate": trial.config.train.lr,
            "group": trial.values["train.lr_groups"],
            "seed": trial.config.train.seed,
            **{column: results.rows[trial.digest].get(column) for column in COLUMNS},
        }
        for trial in grid.trials
        if results.done(trial.digest, grid.measure)
    )


def figure(table: pd.DataFrame) -> Sheet:
    """A row of panels for each model, one panel for accuracy and one for stability."""
    groups = list(dict.fromkeys(table.group))
    per_model = {model: [g for g in groups if g in set(table[table.model == model].group)] for model in MODELS}
    heights = [len(of_model) for of_model in per_model.values()]
    with look():
        sheet = Sheet(table=lambda: table, figsize=(7.2, 1.4 + 0.24 * sum(heights)), layout="constrained")
        panels = sheet.subplots(len(MODELS), len(COLUMNS), height_ratios=heights, sharey="row")
        for (model, of_model), row in zip(per_model.items(), panels, strict=True):
            rows = table[table.model == model]
            for axes, column in zip(row, COLUMNS, strict=True):
                for seed, colour in zip(sorted(set(rows.seed)), COLOURS, strict=False):
                    one = rows[rows.seed == seed]
                    axes.plot(
                        one[column], one.group.map(of_model.index), "o", color=colour, ms=4.5, label=f"seed {seed}"
                    )
                plain(axes)
            accuracy, stability = row
            accuracy.set_yticks(range(len(of_model)), [WORDS.get(group, group) for group in of_model])
            accuracy.set_ylim(len(of_model) - 0.5, -0.5)
            accuracy.axvline(THRESHOLD, color=GREY, ls="--", lw=0.8)
            accuracy.set_title(f"{MODELS[model]} at {rows.rate.iloc[0]:g}", loc="left")
            stability.set_xscale("log")
            stability.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            stability.xaxis.set_major_formatter("{x:g}")
            stability.xaxis.set_minor_locator(NullLocator())
            stability.axvline(1, color=GREY, ls=":", lw=0.8)
        for axes, words in zip(panels[-1], COLUMNS.values(), strict=True):
            axes.set_xlabel(words)
        sheet.legend(*panels[0, 0].get_legend_handles_labels(), loc="outside lower left", ncols=3, frameon=False)
        sheet.suptitle("One group of parameters at a tenth of the rate")
    return sheet


if __name__ == "__main__":
    save(figure(measured()), FIGURE)
