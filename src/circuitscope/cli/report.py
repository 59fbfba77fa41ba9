"""`circuitscope report`: runs as one interactive page."""

from pathlib import Path
from typing import Annotated

import typer

from circuitscope.cli.reading import OnDevice
from circuitscope.errors import Stopped


def report(
    runs: Annotated[
        list[Path] | None,
        typer.Argument(help="Runs to show side by side; by default the newest.", show_default=False),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="File to write.", show_default="report.html in the run; of several, beside the first"),
    ] = None,
    steps: Annotated[
        str | None, typer.Option(help="Checkpoints: all, 0,400,800, or 0:2000:100.", show_default="all")
    ] = None,
    examples: Annotated[int, typer.Option(help="At most how many examples to show.", min=1)] = 8,
    channels: Annotated[
        int,
        typer.Option(help="At most how many heads or channels of a matrix to show: those that score highest.", min=1),
    ] = 12,
    sequences: Annotated[int, typer.Option(help="Held-out sequences that a score is averaged over.", min=2)] = 256,
    device: OnDevice = "auto",
) -> None:
    """Write an interactive report of runs: one HTML file that opens from disk, offline.

    A slider over the checkpoints moves through loss, accuracy, scores and the mixing matrices of every
    layer and head. Several runs are compared in a table and in one chart, and those you check stand side by side.
    Checkpoints that were not analyzed yet are analyzed first; their tables are kept. What `analyze` (for example
    --decay or --causal) and `probe` found before is in the report too.
    """
    from circuitscope.devices import reading_on
    from circuitscope.errors import escaped
    from circuitscope.progress import watching
    from circuitscope.viz.report import report as make

    try:
        with reading_on(device), watching() as progress:
            made = make(
                runs or None, steps=steps, examples=examples, channels=channels, sequences=sequences, progress=progress
            )
    except KeyboardInterrupt:
        raise Stopped("stopped; what was analyzed is kept and will be reused") from None
    path = made.save(out)
    print(f"{escaped(path)} ({path.stat().st_size / 1e6:.1f} MB): open it in a browser")
