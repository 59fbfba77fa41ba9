"""`circuitscope plot`: figures of runs and sweeps."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from circuitscope.runs.run import Run
    from circuitscope.viz.step_axis import StepAxis
    from circuitscope.viz.style import Sheet

_LONGEST = 80  # letters of the names of other runs in the name of a figure

app = typer.Typer(no_args_is_help=True, help="Draw figures of runs and sweeps.")

Runs = Annotated[list[Path] | None, typer.Argument(help="Runs to draw; by default the newest.", show_default=False)]
Out = Annotated[
    Path | None,
    typer.Option(help="File to write: .png, .svg or .pdf.", show_default="in the folder figures of the first run"),
]
Numbers = Annotated[bool, typer.Option("--data", help="Also write the numbers as a CSV file beside the figure.")]
Chosen = Annotated[str | None, typer.Option(help="Checkpoints: all, 0,400,800, or 0:2000:100.", show_default="all")]
LogSteps = Annotated[bool, typer.Option("--log-steps", help="Draw steps on a log scale: more room for early ones.")]
First = Annotated[int | None, typer.Option("--from", help="First step to draw.", show_default="the first")]
Last = Annotated[int | None, typer.Option("--to", help="Last step to draw.", show_default="the last")]
GridFile = Annotated[Path, typer.Argument(help="Grid: a YAML file, or a folder with a grid.yaml.", show_default=False)]
OutBeside = Annotated[
    Path | None, typer.Option(help="File to write: .png, .svg or .pdf.", show_default="in figures beside results.csv")
]
RunsRoot = Annotated[
    Path | None, typer.Option(help="Folder that holds the runs.", show_default="$CIRCUITSCOPE_RUNS or runs")
]
Sequences = Annotated[int, typer.Option(help="Held-out sequences that each number is averaged over.", min=2)]


@app.callback()
def plot() -> None:
    """Draw figures of runs. The numbers are computed once and kept in RUN/analysis."""


@app.command()
def dynamics(
    runs: Runs = None,
    out: Out = None,
    data: Numbers = False,
    steps: Chosen = None,
    sequences: Sequences = 256,
    scores: Annotated[bool, typer.Option(help="Draw scores, such as recall, below loss and accuracy.")] = True,
    together: Annotated[bool, typer.Option(help="Draw runs that differ only in their seed as one curve.")] = True,
    log_steps: LogSteps = False,
    first: First = None,
    last: Last = None,
) -> None:
    """Loss, the task's metric and scores over training steps, with the loss bump of each run.

    A dotted line shows the level of answering with any value of the context. Binding and recall are drawn where the
    circuit has them, if `analyze` has looked for it.
    """
    from circuitscope.analysis.checkpoints.runner import kept_circuit
    from circuitscope.analysis.phases.timeline import loss_bump
    from circuitscope.viz.dynamics import dynamics as draw

    axis = _axis(log_steps, first, last)
    chosen = _begin(runs, out)
    tables = _tables(chosen, "scores", steps, sequences, needed=False) if scores else None
    circuits = [kept_circuit(run, sequences) for run in chosen]
    bumps = [loss_bump(run) for run in chosen]
    figure = draw(chosen, scores=tables, circuits=circuits, bump=bumps, together=together, axis=axis)
    _end(figure, chosen, out, "dynamics", data)


@app.command()
def scores(
    runs: Runs = None,
    out: Out = None,
    data: Numbers = False,
    steps: Chosen = None,
    sequences: Sequences = 256,
    names: Annotated[
        str | None, typer.Option("--scores", help="Which scores, for example binding,recall.", show_default="all")
    ] = None,
    log_steps: LogSteps = False,
    first: First = None,
    last: Last = None,
) -> None:
    """Circuit scores over training steps: every place of one run, or the best place of several.

    Binding and recall are drawn on the edges that the circuit names, if `analyze` has looked for it. Dotted lines show
    what even weights would score.
    """
    from circuitscope.cli import listed

    axis = _axis(log_steps, first, last)
    chosen = None if names is None else listed.names("--scores", names)
    _draw_analysis("scores", runs, out, data, steps, sequences, bumps=True, circuits=True, names=chosen, axis=axis)


@app.command()
def decay(
    runs: Runs = None,
    out: Out = None,
    data: Numbers = False,
    steps: Chosen = None,
    sequences: Sequences = 256,
    factor: Annotated[str, typer.Option(help="phi, or phi_without_D if the mixer has a skip term D.")] = "phi",
    layers: Annotated[str | None, typer.Option(help="Layers, for example 0,2.", show_default="all")] = None,
    log_steps: LogSteps = False,
    first: First = None,
    last: Last = None,
) -> None:
    """Decay of off-diagonal terms: the profile m(δ) of |Φ| over training on a log axis, and its fitted rate."""
    from circuitscope.cli.listed import numbers

    axis = _axis(log_steps, first, last)
    wanted = None if layers is None else numbers("--layers", layers)
    _draw_analysis("decay", runs, out, data, steps, sequences, bumps=True, factor=factor, layers=wanted, axis=axis)


@app.command()
def analysis(
    name: Annotated[str, typer.Argument(help="Name of an analysis that has a figure.")],
    runs: Runs = None,
    out: Out = None,
    data: Numbers = False,
    steps: Chosen = None,
    sequences: Sequences = 256,
) -> None:
    """The figure of any analysis that has one, including those of other packages."""
    _draw_analysis(name, runs, out, data, steps, sequences)


@app.command()
def probes(
    runs: Runs = None,
    out: Out = None,
    data: Numbers = False,
    steps: Chosen = None,
    name: Annotated[str, typer.Option("--probe", help="Name of a probe, or a YAML file.")] = "bound-value",
    log_steps: LogSteps = False,
    first: First = None,
    last: Last = None,
) -> None:
    """What a linear probe reads, with its control and chance: by hook and over steps; of several runs a panel each."""
    import pandas as pd

    from circuitscope.analysis.phases.timeline import loss_bump
    from circuitscope.analysis.probes import Definition, probe
    from circuitscope.progress import watching
    from circuitscope.viz.probes import probes as draw
    from circuitscope.viz.registry import by_label

    axis = _axis(log_steps, first, last)
    chosen = _begin(runs, out)
    definition = Definition.load(name)
    with watching() as progress:
        tables = by_label(chosen, [probe(run, definition, steps=steps, progress=progress) for run in chosen])
    frame = pd.concat([table.assign(run=label) for label, table in tables.items()], ignore_index=True)
    bumps = by_label(chosen, [loss_bump(run) for run in chosen])
    _end(draw(frame, bump=bumps, axis=axis), chosen, out, f"probe-{definition.name}", data)


@app.command()
def sweep(
    grid: GridFile,
    out: OutBeside = None,
    data: Numbers = False,
    threshold: Annotated[
        float, typer.Option(help="Level at or above which a learning rate belongs to the window.")
    ] = 0.95,
    metric: Annotated[
        str | None,
        typer.Option(help="Column of results.csv to draw.", show_default="the task's metric on test, best checkpoint"),
    ] = None,
    runs: RunsRoot = None,
) -> None:
    """Accuracy by learning rate for each model of a sweep, the learning-rate window, and the missing step.

    It needs the grid and its results.csv, not the runs. Curves are means over seeds; rings mark the rates chosen on
    validation. The window is the decades of learning rate at or above --threshold.
    """
    from circuitscope.errors import UserError, escaped
    from circuitscope.progress import watching
    from circuitscope.sweeps.cells import Cells, level_words
    from circuitscope.sweeps.sweep import Sweep
    from circuitscope.sweeps.windows import choices, windows, windows_by_budget
    from circuitscope.viz.style import check_ending, save
    from circuitscope.viz.sweep import sweep as draw

    check_ending(out)
    found = Sweep.open(grid, runs)
    found.collect()
    cells = Cells.of(found.grid, found.results, metric)
    numbers: dict[str, Any] = {}
    notes = []
    if cells.by_rate and cells.is_metric:
        numbers = {"choices": choices(cells), "windows": windows(cells, threshold), "threshold": threshold}
        try:
            numbers["budgets"] = windows_by_budget(cells, found.grid, found.results, threshold)
        except UserError as error:
            notes.append(str(error))
    if missing := int((cells.trials["state"] == "").sum()):
        notes.append(
            f"{missing} of {len(cells.trials)} trials are not done; a seed has a window when all its rates are"
        )
    title = f"{found.grid.name}: {cells.value_words} by {cells.x_words}"
    numbers |= {"log": cells.by_rate or None, "level": level_words(found.grid)}
    figure = draw(cells.trials, title=title, x=cells.x_words, value=cells.value_words, **numbers)
    with watching() as progress:
        for note in notes:
            progress.say(note)
    for path in save(figure, out or found.results.folder / "figures" / "sweep.png", data=data):
        print(escaped(path))


@app.command()
def curves(grid: GridFile, out: OutBeside = None, data: Numbers = False, runs: RunsRoot = None) -> None:
    """How the models of a sweep learn: loss and metric by step, a column for each model, a line for each trial.

    It needs the grid, its results.csv and its curves.csv, not the runs. Lines have the colour of their learning rate,
    or of their seed if every model has one rate.
    """
    from circuitscope.errors import escaped
    from circuitscope.sweeps.cells import level_words, metric_of
    from circuitscope.sweeps.learning import learning_curves
    from circuitscope.sweeps.sweep import Sweep
    from circuitscope.viz.learning import learning
    from circuitscope.viz.style import check_ending, save

    check_ending(out)
    found = Sweep.open(grid, runs)
    found.collect()
    figure = learning(
        learning_curves(found.grid, found.results),
        title=f"{found.grid.name}: loss and {metric_of(found.grid)} over training",
        value=metric_of(found.grid),
        level=level_words(found.grid),
    )
    for path in save(figure, out or found.results.folder / "figures" / "curves.png", data=data):
        print(escaped(path))


@app.command()
def why(
    grid: GridFile,
    out: OutBeside = None,
    data: Numbers = False,
    threshold: Annotated[float, typer.Option(help="Level at or above which a learning rate succeeds.")] = 0.95,
    runs: RunsRoot = None,
) -> None:
    """Why learning rates fail: the steps of the circuit that formed at each, AdamW's stability, gradients by group.

    It needs the grid and its results.csv, not the runs, and trials that measured their circuit (measure: [circuit,
    curvature] in the grid). Every model is a column.
    """
    from circuitscope.errors import UserError, escaped
    from circuitscope.sweeps.cells import Cells, level_words
    from circuitscope.sweeps.reasons import reasons
    from circuitscope.sweeps.sweep import Sweep
    from circuitscope.viz.style import check_ending, save
    from circuitscope.viz.why import why as draw

    check_ending(out)
    found = Sweep.open(grid, runs)
    found.collect()
    cells = Cells.of(found.grid, found.results)
    if not cells.by_rate:
        raise UserError(f"{found.grid.name} has fewer than two learning rates; this figure is by learning rate")
    title = f"{found.grid.name}: what is missing at each learning rate"
    words = {"title": title, "value": cells.value_words, "level": level_words(found.grid)}
    figure = draw(reasons(cells, found.results), **words, threshold=threshold)
    for path in save(figure, out or found.results.folder / "figures" / "why.png", data=data):
        print(escaped(path))


def _axis(log_steps: bool, first: int | None, last: int | None) -> "StepAxis":
    from circuitscope.viz.step_axis import StepAxis

    return StepAxis(log_steps, first, last)


def _begin(runs: Sequence[Path] | None, out: Path | None) -> "list[Run]":
    """The runs. A bad file ending is refused here, before any work is done."""
    from circuitscope.runs.run import Run, newest_run
    from circuitscope.viz.style import check_ending

    check_ending(out)
    return [Run(path) for path in runs] if runs else [newest_run()]


def _end(figure: "Sheet", runs: "Sequence[Run]", out: Path | None, name: str, data: bool) -> None:
    from circuitscope.errors import escaped
    from circuitscope.viz.style import save

    default = runs[0].path / "figures" / f"{name}{_also(runs[1:])}.png"
    for path in save(figure, out or default, data=data):
        print(escaped(path))


def _also(others: "Sequence[Run]") -> str:
    """What a figure of several runs has in its name, so that it does not take the place of that of the first run."""
    named = "-with-" + "-".join(run.name for run in others)
    if len(named) > _LONGEST:
        named = f"-with-{len(others)}-others"
    return named if others else ""


def _draw_analysis(
    name: str,
    runs: Sequence[Path] | None,
    out: Path | None,
    data: bool,
    steps: str | None,
    sequences: int,
    bumps: bool = False,
    circuits: bool = False,
    **options: Any,
) -> None:
    """Computes an analysis of the runs, unless that was done before, and draws its figure.

    If asked, the figure gets the loss bumps of the runs, and their circuits where they are known.
    """
    from circuitscope.analysis.checkpoints.runner import kept_circuit
    from circuitscope.analysis.phases.timeline import loss_bump
    from circuitscope.analysis.registry import ANALYSES
    from circuitscope.errors import UserError, unknown
    from circuitscope.viz.registry import FIGURES, by_label

    if name in ANALYSES and name not in FIGURES:
        raise UserError(f"the analysis '{name}' has no figure; those with one: {', '.join(sorted(FIGURES))}")
    if name not in ANALYSES or name not in FIGURES:
        raise unknown("figure of an analysis", name, FIGURES)
    chosen = _begin(runs, out)
    tables = _tables(chosen, name, steps, sequences)
    if bumps:
        options["bump"] = by_label(chosen, [loss_bump(run) for run in chosen])
    if circuits:
        options["circuits"] = by_label(chosen, [kept_circuit(run, sequences) for run in chosen])
    _end(FIGURES[name](by_label(chosen, tables), **options), chosen, out, name, data)


def _tables(runs: "Sequence[Run]", name: str, steps: str | None, sequences: int, needed: bool = True) -> list[Any]:
    """The table of each run; None, with a message, for a run without checkpoints if its table is not `needed`."""
    from circuitscope.analysis.checkpoints.runner import analysis_table
    from circuitscope.progress import watching

    tables: list[Any] = []
    with watching() as progress:
        for run in runs:
            if not run.steps and not needed:
                progress.say(f"{run.path} has no checkpoints, so no {name} are drawn")
                tables.append(None)
                continue
            tables.append(analysis_table(run, name, steps=steps, sequences=sequences, progress=progress))
    return tables
