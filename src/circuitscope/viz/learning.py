"""How the models of a sweep learn: loss and metric by step, a column for each model, a line for each trial."""

import math
import textwrap

import pandas as pd
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.colors import to_hex

from circuitscope.viz.labels import legend_below, line_entry
from circuitscope.viz.style import GREY, SEQUENTIAL, Sheet, look, pens, plain, written

_WIDTH, _HEIGHT, _ASIDE = 1.75, 1.5, 0.7  # inches of a panel, and beside them
_PER_ROW = 5  # columns
_LETTERS = 28  # in a line of a model's name


def learning(curves: pd.DataFrame, *, title: str, value: str, level: str) -> Sheet:
    """The figure of a sweep's curves.

    Lines have the colour of their learning rate, or of their seed if every model has one rate.

    Args:
        curves: a row per trial and step; see `sweeps.learning`.
        value: the name of the metric.
        level: what the dotted line is the metric of.
    """
    models = list(dict.fromkeys(curves["model"]))
    across = min(len(models), _PER_ROW)
    down = math.ceil(len(models) / across)
    key, colours = _colours(curves)
    with look():
        size = (_ASIDE + _WIDTH * max(across, 2), 2 * _HEIGHT * down + 0.6)
        figure = Sheet(table=lambda: curves, figsize=size, layout="constrained")
        grid = figure.add_gridspec(2 * down, across)
        top = float(curves["loss"].max()) * 1.03
        for i, model in enumerate(models):
            of_model = curves[curves["model"] == model]
            row, column = divmod(i, across)
            upper, lower = (figure.add_subplot(grid[2 * row + k, column]) for k in (0, 1))
            for _, trial in of_model.groupby(["rate", "seed"]):
                for axes, name in ((upper, "loss"), (lower, "value")):
                    axes.plot(trial["step"], trial[name], color=colours[trial[key].iloc[0]], lw=1)
            for height in sorted(set(of_model["chance"].dropna())):
                lower.axhline(height, color=GREY, ls=":", lw=1)
            upper.set_ylim(0, top)
            if value == "accuracy":
                lower.set_ylim(-0.03, 1.03)
            _dress(upper, lower, model, first=column == 0, value=value)
        figure.suptitle(written(title), x=0.01, ha="left")
        entries = [line_entry(_name(key, one), colour) for one, colour in colours.items()]
        if curves["chance"].notna().any():
            entries.append(line_entry(level, GREY, ls=":", lw=1))
        legend_below(figure, entries)
    return figure


def _colours(curves: pd.DataFrame) -> tuple[str, dict[object, str]]:
    """The column that colours the lines, and the colour of each of its values."""
    if curves.groupby("model")["rate"].nunique().max() > 1:
        rates = sorted(set(curves["rate"]))
        shades = colormaps[SEQUENTIAL]
        return "rate", {rate: to_hex(shades(0.9 * i / max(len(rates) - 1, 1))) for i, rate in enumerate(rates)}
    seeds = list(dict.fromkeys(curves["seed"]))
    return "seed", {seed: colour for seed, (colour, _) in zip(seeds, pens(len(seeds)), strict=True)}


def _name(key: str, one: object) -> str:
    if key == "rate":
        return f"{one:.1e}".replace(".0e", "e").replace("e-0", "e-")
    return f"seed {one}" if one else "one run"


def _dress(upper: Axes, lower: Axes, model: str, *, first: bool, value: str) -> None:
    upper.set_title("\n".join(map(written, textwrap.wrap(model, _LETTERS))), loc="left", fontsize=7)
    upper.tick_params(axis="x", labelbottom=False)
    lower.set_xlabel("step")
    for axes, name in ((upper, "loss"), (lower, value)):
        plain(axes)
        if first:
            axes.set_ylabel(name)
        else:
            axes.tick_params(axis="y", labelleft=False)
