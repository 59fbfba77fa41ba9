"""Training dynamics: train and validation loss and accuracy on one step axis."""

from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure

from circuitscope.errors import UserError
from circuitscope.training.run import Run

_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")  # Okabe and Ito


def dynamics(runs: Sequence[Run]) -> Figure:
    """Loss above, accuracy below; the band is the spread over evaluation batches."""
    figure = Figure(figsize=(7, 5), layout="constrained")
    loss, accuracy = figure.subplots(2, 1, sharex=True)
    for run, colour in zip(runs, _COLOURS * len(runs), strict=False):
        rows = run.metrics
        if not len(rows) or not (rows.split == "validation").any():
            raise UserError(f"{run.path} has no metrics to draw yet")
        train, held = rows[rows.split == "train"], rows[rows.split == "validation"]
        loss.plot(train.step, train.loss, color=colour, alpha=0.35, lw=0.8, label=f"{run.name}, train")
        loss.plot(held.step, held.loss, color=colour, lw=1.8, label=f"{run.name}, validation")
        accuracy.plot(held.step, held.accuracy, color=colour, lw=1.8, label=run.name)
        low, high = held.accuracy_per_batch.map(min), held.accuracy_per_batch.map(max)
        accuracy.fill_between(held.step, low, high, color=colour, alpha=0.2, lw=0)
    for pairs in sorted({run.config.task.pairs for run in runs if hasattr(run.config.task, "pairs")}):
        accuracy.axhline(1 / pairs, color="0.5", ls=":", lw=1)
        accuracy.annotate(
            f"1/k = {1 / pairs:.3g}",
            (0, 1 / pairs),
            xytext=(4, 3),
            textcoords="offset points",
            color="0.35",
            fontsize=8,
        )
    loss.set_ylabel("loss")
    accuracy.set(xlabel="step", ylabel="query accuracy", ylim=(-0.02, 1.02))
    loss.legend(frameon=False, fontsize=8)
    for axes in (loss, accuracy):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25)
    return figure


def save_dynamics(runs: Sequence[Run], path: Path) -> Path:
    """Draws to a file and returns its path."""
    figure = dynamics(runs)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=150)
    except (OSError, ValueError) as error:
        raise UserError(f"cannot write {path}: {error}") from None
    return path
