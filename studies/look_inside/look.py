"""Trains four small models, one for each of four tasks, and looks inside: a figure each, with its numbers.

    python studies/look_inside/look.py runs/look               # trains what is missing, then draws all four
    python studies/look_inside/look.py runs/look parity-state  # only this one

The figures go to figures/ and their numbers to CSV files beside this script. The README says what is to be seen.
"""

import argparse
from collections.abc import Callable, Iterator
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import torch
from matplotlib.axes import Axes
from numpy.typing import NDArray

import circuitscope as cs
from circuitscope import analysis
from circuitscope.analysis import probes
from circuitscope.analysis.causal.parts import Circuit
from circuitscope.tasks import Batch, Role
from circuitscope.viz.labels import legend_below, line_entry, shade_entry
from circuitscope.viz.marks import draw_marks, mark_entries
from circuitscope.viz.style import COLOURS, GREY, SEQUENTIAL, Sheet, look, plain, save

HERE = Path(__file__).parent
FIGURES = HERE.parents[1] / "figures"
BLUE, ORANGE, GREEN, *_ = COLOURS
BLACK = COLOURS[-1]
COMMON: dict[str, Any] = {"n_layers": 2, "seed": 0, "eval_every": 50, "save_every": 5000, "threads": 1}
Floats = NDArray[np.float64]


def weights_by_point(run: cs.Run) -> Sheet:
    """How much of w a linear map reads at each y, from the residual stream and from the recurrent states."""
    batch, last = run.batch(size=900), run.config.model.n_layers - 1
    hooks = {
        "residual stream after the last layer": (f"blocks.{last}.hook_resid_post", BLUE),
        **{
            f"recurrent state of layer {layer}": (f"blocks.{layer}.mixer.hook_state", colour)
            for layer, colour in zip(range(last + 1), (GREEN, ORANGE), strict=True)
        },
    }
    tables = [
        probes.weights_by_point(run.load(step=step), batch, hook).assign(read_from=name, step=step)
        for name, (hook, _) in hooks.items()
        for step in (0, run.steps[-1])
    ]
    table = pd.concat(tables).rename(columns={"weights": "r2_of_w", "estimate": "r2_of_estimate"})
    with look():
        figure = Sheet(table=lambda: table, figsize=(5.6, 3.4), layout="constrained")
        axes = figure.subplots()
        known = tables[0]
        axes.plot(known.points, known.least_squares, color=BLACK, lw=1.8, marker="o", ms=3)
        for (name, step), rows in table.groupby(["read_from", "step"], sort=False):
            untrained = step == 0
            axes.plot(rows.points, rows.r2_of_w, color=hooks[name][1], ls=":" if untrained else "-", lw=1.4)
        plain(axes)
        axes.set(xlabel="points seen", ylabel="R² of a linear map to w", ylim=(-0.05, 1.03))
        figure.suptitle(_size(run), x=0.01, ha="left")
        entries = [line_entry("least squares on the same points", BLACK, marker="o", ms=3)]
        entries += [line_entry(name, colour) for name, (_, colour) in hooks.items()]
        legend_below(figure, [*entries, line_entry("the same before training", GREY, ls=":")])
    return figure


def vector_mqar(run: cs.Run) -> Sheet:
    """Attention of both layers with the edges of binding and recall, and the accuracy without these edges."""
    model, batch = run.load(), run.batch(size=512)
    found = analysis.find_circuit(model, batch)
    table = pd.DataFrame(_knockouts(found))
    _, cache = model.run_with_cache(batch.inputs[:1])
    marks = {
        "binding: value ← its key": _edges("binding", batch, 0),
        "recall: query ← the value of its key": _edges("recall", batch, 0),
    }
    names = _pair_names(batch)
    with look():
        figure = Sheet(table=lambda: table, figsize=(8.4, 3.0), layout="constrained")
        first, second, bars = figure.subplots(1, 3, width_ratios=[1, 1, 0.9])
        for layer, axes in enumerate((first, second)):
            pattern = cache["pattern", layer][0].mean(dim=0).detach().numpy()
            picture = _pattern(axes, pattern, names, names)
            axes.set_title(f"attention of layer {layer}", loc="left")
        figure.colorbar(picture, ax=second, shrink=0.7, label="weight")
        side = first.get_window_extent().height / figure.dpi * 72
        for axes in (first, second):
            draw_marks(axes, marks, 0.5 * side / len(names))
        _bars(bars, table, found.chance)
        figure.suptitle(_size(run), x=0.01, ha="left")
        legend_below(figure, mark_entries(marks))
    return figure


def _knockouts(found: Circuit) -> Iterator[dict[str, Any]]:
    """The accuracy of the whole model, then without the edges of each step of the circuit in their layer."""
    whole = found.tried[0].effect
    yield {"without": "nothing", "place": "", "weight": np.nan, "accuracy": whole.before, "stderr_of_loss": np.nan}
    for step in ("binding", "recall"):
        for part in (part for part in found.tried if part.step == step):
            e = part.effect
            yield {
                "without": step,
                "place": part.place,
                "weight": part.weight,
                "accuracy": e.after,
                "stderr_of_loss": e.stderr,
            }


def parity_state(run: cs.Run) -> Sheet:
    """The entry of a Mamba state that follows the evidence for one pair of coordinates, over the points of a sequence.

    The evidence for the pair (a, b) after i points is Σ_{j ≤ i} y_j x_ja x_jb: i where the pair is the hidden one,
    and a random walk of i steps where it is another. The entry is chosen on one half of the sequences, by its
    correlation with that sum over sequences at one point, averaged over points. Figure and numbers show the other half.
    """
    batch = run.batch(size=1000)
    x, y = batch.inputs[:, ::2].numpy(), batch.inputs[:, 1::2, 0].numpy()
    pairs = list(combinations(range(x.shape[2]), 2))
    evidence = np.stack([(y * x[..., a] * x[..., b]).cumsum(axis=1) for a, b in pairs])  # [pair, sequence, point]
    half = len(y) // 2
    rows = []
    for step in (0, run.steps[-1]):
        states = _states(run, step, batch)
        for layer, state in enumerate(states):
            chosen = _correlations(state[:half], evidence[:, :half]).mean(axis=0)  # [entry, pair]
            entry, pair = np.unravel_index(np.abs(chosen).argmax(), chosen.shape)
            held = _correlations(state[half:, :, entry : entry + 1], evidence[pair : pair + 1, half:])[:, 0, 0]
            rows.append((abs(held.mean()), step, layer, int(entry), int(pair), held, state[half:, :, entry]))
    _, step, layer, entry, pair, held, state = max((r for r in rows if r[1] > 0), key=lambda r: r[0])
    best = {s: max((r for r in rows if r[1] == s), key=lambda r: r[0]) for s in (0, step)}
    state = state * np.sign(held.mean())
    d_state = run.load().blocks[layer].mixer.ssm.A.shape[1]
    which = f"layer {layer}, channel {entry // d_state}, entry {entry % d_state}"
    a, b = (i + 1 for i in pairs[pair])
    hidden = evidence[pair, half:, -1] == y.shape[1]
    among_others = _correlations(state[~hidden, :, None], evidence[pair : pair + 1, half:][:, ~hidden])[:, 0, 0]
    point = np.arange(1, y.shape[1] + 1)
    table = pd.DataFrame(
        {
            "points": point,
            "entry": which,
            "pair": f"x{a} x{b}",
            "correlation": np.abs(held),
            "correlation_if_other": among_others,
            "correlation_before_training": np.abs(best[0][5]),
            "mean_if_hidden": state[hidden].mean(axis=0),
            "mean_if_other": state[~hidden].mean(axis=0),
        }
    )
    kinds = ((hidden, BLUE, f"x{a} x{b} is the hidden product"), (~hidden, ORANGE, "another product is"))
    with look():
        figure = Sheet(table=lambda: table, figsize=(8.4, 2.9), layout="constrained")
        over, against, by_point = figure.subplots(1, 3)
        for rows_of, colour, _ in kinds:
            low, middle, high = np.quantile(state[rows_of], [0.1, 0.5, 0.9], axis=0)
            over.fill_between(point, low, high, color=colour, alpha=0.25, lw=0)
            over.plot(point, middle, color=colour, lw=1.8)
            jitter = np.random.default_rng(0).uniform(-0.3, 0.3, rows_of.sum())
            total = evidence[pair, half:, -1][rows_of] + jitter
            against.plot(total, state[rows_of, -1], ".", ms=2.5, color=colour, alpha=0.6)
        by_point.plot(point, np.abs(held), color=BLACK, lw=1.8)
        by_point.plot(point, among_others, color=ORANGE, lw=1.4)
        by_point.plot(point, np.abs(best[0][5]), color=GREY, ls=":", lw=1.4)
        over.set(xlabel="points seen", ylabel="entry of the state", title="over a sequence")
        against.set(
            xlabel=f"evidence for x{a} x{b}: Σ y x{a} x{b}", ylabel="entry of the state", title="at the last point"
        )
        by_point.set(xlabel="points seen", ylabel="correlation with the evidence", ylim=(0, 1), title="at each point")
        for axes in (over, against, by_point):
            plain(axes)
        figure.suptitle(f"{_size(run)}: {which}", x=0.01, ha="left")
        entries = [line_entry(name, colour) for _, colour, name in kinds]
        entries += [shade_entry("10% to 90% of sequences"), line_entry("all sequences", BLACK)]
        entries += [line_entry("all, best entry before training", GREY, ls=":", lw=1.4)]
        legend_below(figure, entries)
    return figure


def _states(run: cs.Run, step: int, batch: Batch) -> list[Floats]:
    """The recurrent state of each layer at every y [sequence, point, entry]."""
    model = run.load(step=step)
    hooks = [f"blocks.{layer}.mixer.hook_state" for layer in range(run.config.model.n_layers)]
    with torch.no_grad():
        _, cache = model.run_with_cache(batch.inputs, names_filter=hooks)
    return [cache[hook][:, 1::2].flatten(2).double().numpy() for hook in hooks]


def _correlations(state: Floats, evidence: Floats) -> Floats:
    """Over sequences, at each point: [point, entry, pair]; 0 where one of the two does not vary."""

    def standard(values: Floats) -> Floats:
        values = values - values.mean(axis=0)
        deviation = np.sqrt((values**2).mean(axis=0))
        scaled: Floats = np.divide(values, deviation, out=np.zeros_like(values), where=deviation > 1e-9)
        return scaled

    found: Floats = standard(state).transpose(1, 2, 0) @ standard(evidence.transpose(1, 2, 0)).transpose(1, 0, 2)
    return found / len(state)


def copy_reading(run: cs.Run) -> Sheet:
    """Where attention reads while a string is said again: the weight by distance from the letter to say next."""
    model, batch = run.load(), run.batch(size=512)
    at = batch.layout
    assert at.value_pos is not None
    assert at.query_pos is not None
    with torch.no_grad():
        _, cache = model.run_with_cache(batch.inputs)
    letters = (at.roles == Role.VALUE).sum(dim=1)
    longest = int(letters.max())
    layers, rows = range(run.config.model.n_layers), []
    for layer in layers:
        pattern = cache["pattern", layer].mean(dim=1)
        by_offset: dict[int, list[float]] = {offset: [] for offset in range(1 - longest, longest)}
        by_place: list[list[float]] = []
        for i, n in enumerate(letters.tolist()):
            here = pattern[i][at.query_pos[i, :n]][:, at.value_pos[i, :n]]  # [place, letter]
            for offset in range(1 - n, n):
                by_offset[offset] += here.diagonal(offset).tolist()
            if n == longest:
                by_place.append(here.diagonal().tolist())
        rows += [(layer, "weight by offset", offset, np.mean(found)) for offset, found in by_offset.items()]
        means = np.mean(by_place, axis=0)
        rows += [(layer, f"weight at offset 0, {longest} letters", i + 1, mean) for i, mean in enumerate(means)]
    cuts = {str(layer): analysis.knock_out(model, batch, "recall", layer=layer) for layer in layers}
    cuts["both"] = analysis.knock_out(model, batch, "recall", layer=list(layers))
    rows += [(layer, "accuracy without offset 0", np.nan, cut.after) for layer, cut in cuts.items()]
    rows.append(("none", "accuracy", np.nan, cuts["both"].before))
    table = pd.DataFrame(rows, columns=["layer", "quantity", "at", "value"])
    example = int((letters == longest).nonzero()[0])
    marks = {"the letter to say next": _edges("recall", batch, example)}
    names = [_letter(int(token)) for token in batch.inputs[example]]
    with look():
        figure = Sheet(table=lambda: table, figsize=(8.4, 3.3), layout="constrained")
        panels = figure.subplot_mosaic([["0", "1", "offset"], ["0", "1", "place"]], width_ratios=[1, 1, 0.8])
        for layer in layers:
            picture = _pattern(panels[str(layer)], cache["pattern", layer][example].mean(dim=0).numpy(), names, names)
            panels[str(layer)].set_title(f"attention of layer {layer}", loc="left")
        figure.colorbar(picture, ax=panels["1"], shrink=0.7, label="weight")
        for axes in (panels["0"], panels["1"]):
            draw_marks(axes, marks, 0.4 * axes.get_window_extent().height / figure.dpi * 72 / len(names))
        entries = mark_entries(marks)
        for layer, colour in zip(layers, (ORANGE, BLUE), strict=True):
            for name, quantity in (("offset", "weight by"), ("place", "weight at")):
                rows_of = table[(table.layer == layer) & table.quantity.str.startswith(quantity)]
                panels[name].plot(rows_of["at"], rows_of.value, color=colour, marker="o", ms=2.5, lw=1.4)
            cut = f"layer {layer}; accuracy without its marked edges: {cuts[str(layer)].after:.2f}"
            entries.append(line_entry(cut, colour, marker="o", ms=3))
        panels["offset"].set(xlabel="offset in letters", ylabel="mean weight")
        panels["offset"].set_title("around the letter to say next", loc="left")
        panels["place"].set_title(f"on it, in strings of {longest}", loc="left")
        panels["place"].set(xlabel="place of that letter", ylabel="mean weight")
        for axes in (panels["offset"], panels["place"]):
            axes.set_ylim(-0.05, 1.05)
            plain(axes)
        figure.suptitle(_size(run), x=0.01, ha="left")
        entries.append(line_entry(f"accuracy without them in both: {cuts['both'].after:.2f}", GREY, lw=0))
        legend_below(figure, entries)
    return figure


def _edges(name: str, batch: Batch, row: int) -> tuple[list[int], list[int]]:
    """Destinations and sources of a set of edges in one sequence."""
    found = analysis.named_edges(name, batch.part(slice(row, row + 1)).layout)
    return found.dest.tolist(), found.src.tolist()


def _letter(token: int) -> str:
    """A token of the copy task as one character: its four marks, then letters."""
    return "$|.·"[token] if token < 4 else chr(ord("a") + token - 4)


def _pair_names(batch: Batch) -> list[str]:
    """k1 v1 k2 v2 …, and q with the number of the pair that it asks for, of the first sequence."""
    names = [f"{Role(role).name[0]}{pos // 2 + 1}" for pos, role in enumerate(batch.layout.roles[0].tolist())]
    dest, src = _edges("recall", batch, 0)
    for query, value in zip(dest, src, strict=True):
        names[query] = f"q{value // 2 + 1}"
    return names


def _pattern(axes: Axes, pattern: Floats, dest: list[str], src: list[str]) -> Any:
    """Attention [dest, src] as a picture with a name at each position."""
    shown = np.ma.masked_where(~np.tri(len(pattern), dtype=bool), pattern)
    axes.set_facecolor("#E8E8E8")
    picture = axes.imshow(shown, cmap=SEQUENTIAL, vmin=0, vmax=1, interpolation="none")
    axes.set_xticks(range(len(src)), src, fontsize=6)
    axes.set_yticks(range(len(dest)), dest, fontsize=6)
    axes.tick_params(length=0)
    axes.set(xlabel="source", ylabel="destination")
    return picture


def _bars(axes: Axes, table: pd.DataFrame, chance: float) -> None:
    """The accuracy of the whole model and without the edges of each step in each layer, beside any value's."""
    axes.bar(range(len(table)), table.accuracy, color=[BLUE, *[ORANGE] * (len(table) - 1)], width=0.65)
    axes.axhline(chance, color=GREY, ls=":", lw=1)
    axes.annotate("any value", (1, chance), ha="center", va="bottom", color=GREY, fontsize=6.5)
    for i, height in enumerate(table.accuracy):
        axes.annotate(f"{height:.2f}", (i, height), ha="center", va="bottom", fontsize=7)
    names = ["whole\nmodel", *(f"{row.without}\n{row.place}" for row in table[1:].itertuples())]
    axes.set_xticks(range(len(names)), names, fontsize=6.5)
    axes.set_title("accuracy without these edges", loc="left")
    axes.set(ylim=(0, 1.1))
    plain(axes)


def _size(run: cs.Run) -> str:
    """The task, its sizes, the model, and what it reached on held-out sequences."""
    task, model = run.config.task, run.config.model
    held = run.metrics.query("split == 'validation'").iloc[-1]
    sizes = ", ".join(f"{name} {number}" for name, number in task.sizes().items())
    reached = f"{task.metric.replace('_', ' ')} {held[task.metric]:.2f}"
    return f"{task.name} ({sizes}), {model.mixers[0].name}, {model.n_layers} layers, width {model.d_model}, {reached}"


class Part(NamedTuple):
    """How a model is trained, and what is drawn of it."""

    train: dict[str, Any]
    draw: Callable[[cs.Run], Sheet]


PARTS = {
    "weights-by-point": Part(
        {"model": "mamba", "task": "linear_regression", "d_model": 32, "dims": 3, "points": 8, "steps": 500},
        weights_by_point,
    ),
    "vector-mqar": Part(
        {"model": "attention", "task": "vector_mqar", "d_model": 32, "dims": 8, "pairs": 4, "queries": 4}
        | {"steps": 1200, "early_stop": 0.05},
        vector_mqar,
    ),
    "parity-state": Part(
        {"model": "mamba", "task": "sparse_parity", "d_model": 32, "dims": 4, "points": 16}
        | {"steps": 1200, "early_stop": 0.91},
        parity_state,
    ),
    "copy-reading": Part(
        {"model": "attention", "task": "copy", "d_model": 64, "shortest": 4, "longest": 8, "vocab_size": 14}
        | {"lr": 3e-3, "steps": 1000, "early_stop": 0.99},
        copy_reading,
    ),
}


def trained(name: str, root: Path) -> cs.Run:
    """The run of a part, trained unless it is there."""
    if (root / name / "config.yaml").exists():
        return cs.Run(root / name)
    return cs.train(root=root, name=name, **COMMON | PARTS[name].train)


def main() -> None:
    """Trains, looks, draws."""
    parse = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parse.add_argument("runs", type=Path)
    parse.add_argument("parts", nargs="*", help=f"some of: {', '.join(PARTS)}; by default all")
    given = parse.parse_args()
    if unknown := [name for name in given.parts if name not in PARTS]:
        parse.error(f"unknown part {unknown[0]!r}; expected some of: {', '.join(PARTS)}")
    for name in given.parts or PARTS:
        figure = PARTS[name].draw(trained(name, given.runs))
        save(figure, FIGURES / f"{name}.png")
        figure.data.round(4).to_csv(HERE / f"{name}.csv", index=False)
        print(f"## {name}", figure.data.round(3).to_string(index=False), sep="\n", flush=True)


if __name__ == "__main__":
    main()
