"""`circuitscope probe`: what can be read from the activations of a run, checkpoint by checkpoint."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from circuitscope.cli.reading import OnDevice
from circuitscope.cli.table import print_table
from circuitscope.errors import Stopped, escaped

if TYPE_CHECKING:
    import pandas as pd


def probe(
    run: Annotated[Path | None, typer.Argument(help="Run; by default the newest.", show_default=False)] = None,
    probes: Annotated[
        list[str] | None,
        typer.Option(
            "--probe",
            metavar="NAME",
            help="Name of a probe, or a YAML file; can be repeated. Without it: the list of probes.",
            show_default=False,
        ),
    ] = None,
    steps: Annotated[
        str | None, typer.Option(help="Checkpoints: all, 0,400,800, or 0:2000:100.", show_default="all")
    ] = None,
    hooks: Annotated[
        str | None,
        typer.Option(
            help='Hooks to read, with * for any part: "blocks.*.hook_resid_post"; separate several with commas.',
            show_default="the probe's own",
        ),
    ] = None,
    sequences: Annotated[
        int | None,
        typer.Option(help="Held-out sequences; two thirds train a probe, one third tests it.", show_default="1536"),
    ] = None,
    causal: Annotated[
        bool,
        typer.Option("--causal", help="Also project out what the probe reads: how much accuracy does the model lose?"),
    ] = False,
    directions: Annotated[
        int | None,
        typer.Option(help="How many directions to project out.", show_default="those that hold 99% of the covariance"),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Figure to write: .png, .svg or .pdf.", show_default="figures/probe-NAME.png in the run"),
    ] = None,
    data: Annotated[bool, typer.Option("--data", help="Also write the figure's numbers, as CSV beside it.")] = False,
    device: OnDevice = "auto",
) -> None:
    """Fit linear probes on the checkpoints of a run, print a table, and draw a figure by layer and over training.

    Without --probe it lists the probes that come with the package. Tables are kept as parquet files in RUN/analysis and
    reused: nothing is computed twice, and Ctrl-C keeps what is done.
    """
    if not probes:
        _list()
        return
    from circuitscope.devices import reading_on

    try:
        with reading_on(device):
            _probe(run, probes, steps, hooks, sequences, causal, directions, out, data)
    except KeyboardInterrupt:
        raise Stopped("stopped; what is done is kept and will be reused") from None


def _probe(
    path: Path | None,
    names: list[str],
    steps: str | None,
    hooks: str | None,
    sequences: int | None,
    causal: bool,
    directions: int | None,
    out: Path | None,
    data: bool,
) -> None:
    from circuitscope.analysis import probes as engine
    from circuitscope.cli import listed
    from circuitscope.errors import UserError
    from circuitscope.progress import watching
    from circuitscope.runs.run import Run, newest_run
    from circuitscope.viz.probes import probes as draw
    from circuitscope.viz.style import check_ending, save

    check_ending(out)
    if out is not None and len(names) > 1:
        raise UserError("--out names one figure, and every probe draws its own; give only one --probe")
    if directions is not None and not causal:
        raise UserError("--directions says how much --causal projects out; give --causal too")
    definitions = [engine.Definition.load(name) for name in names]
    run = Run(path) if path else newest_run()
    for definition in definitions:
        with watching() as progress:
            frame = engine.probe(
                run,
                definition,
                steps=steps,
                hooks=None if hooks is None else listed.names("--hooks", hooks),
                sequences=engine.SEQUENCES if sequences is None else sequences,
                causal=causal,
                directions=directions,
                progress=progress,
            )
        _print(frame, definition.about, causal)
        for written in save(draw(frame), out or run.path / "figures" / f"probe-{definition.name}.png", data=data):
            print(escaped(written))


def _list() -> None:
    from circuitscope.analysis.probes import Definition, shipped

    definitions = [Definition.load(name) for name in shipped()]
    print_table(["probe", "model", "what it asks"], [[d.name, d.model, d.about] for d in definitions])
    print("run one: circuitscope probe --probe bound-value; or give a YAML file of your own")


def _print(frame: "pd.DataFrame", about: str, causal: bool) -> None:
    """Prints the rows of the last checkpoint, with the accuracy at the first beside them."""
    from circuitscope.viz.words.probes import control_lines

    first, last = frame.step.min(), frame.step.max()
    before = frame[frame.step == first].set_index(["hook", "role"]).accuracy
    rows = frame[frame.step == last]
    columns = ["hook", "role", "R²" if (rows.metric == "r2").all() else "accuracy", "95% interval"]
    columns += ["control", "selectivity", "majority", "chance", "tested on"]
    columns += [f"step {first}"] if first != last else []
    lines = []
    for _, row in rows.iterrows():
        cells = [row.hook, row.role, _share(row.accuracy), f"{_share(row.low)} to {_share(row.high)}"]
        cells += [_share(row[name]) for name in ("control", "selectivity", "majority", "chance")]
        cells += [f"{row.n_test:,}"]
        cells += [_share(before[row.hook, row.role])] if first != last else []
        lines.append(cells)
    print(escaped(f"{rows['run'].iloc[0]}, step {last}, {rows.probe.iloc[0]}: {about}"))
    print_table(columns, lines)
    if rows.accuracy.isna().any():
        print("a dash stands where the activations are not finite: the run diverged")
    elif rows.control.isna().any():
        print("a dash stands where no control was fitted: the probe says control: none")
    for line in control_lines(rows):
        print(escaped(line))
    if causal:
        print("the same directions projected out of the model at these positions:")
        print_table(
            ["hook", "role", "directions", "still read", "model's accuracy", "loses", "control's", "random"],
            [_removed(row) for _, row in rows.iterrows()],
        )


def _removed(row: Any) -> list[str]:
    """What a removal costs, beside what it costs to remove as many directions of the control task, or random ones."""
    from circuitscope.analysis.measured import measured

    if row.left != row.left:
        return [row.hook, row.role, *["–"] * 6]
    lost = measured(row.lost, row.lost_stderr)
    return [
        *(row.hook, row.role, str(row.directions), _share(row.left), _share(row.model_accuracy), lost),
        *(_share(row.lost_control), _share(row.lost_random)),
    ]


def _share(value: float) -> str:
    return "–" if value != value else f"{value:.3f}"
