"""`circuitscope zoom`."""

from pathlib import Path
from typing import Annotated

import typer


def zoom(
    run: Annotated[Path | None, typer.Argument(help="Run to zoom into.", show_default="the newest")] = None,
    first: Annotated[
        int | None, typer.Option("--from", help="First step of the stretch.", show_default="before the bump")
    ] = None,
    last: Annotated[
        int | None, typer.Option("--to", help="Last step of the stretch.", show_default="after the bump")
    ] = None,
    every: Annotated[
        int | None, typer.Option(help="Steps between checkpoints.", show_default="about 50 checkpoints in all")
    ] = None,
    sequences: Annotated[int, typer.Option(help="Held-out sequences that each number is averaged over.", min=2)] = 256,
) -> None:
    """Find the loss bump, repeat that stretch of the run saving every few steps, and analyze all checkpoints.

    Training starts again from the nearest resume point and makes the same updates; wherever the run had
    saved a checkpoint, the weights are compared bit by bit. New checkpoints join the run's own.
    """
    from circuitscope.analysis.checkpoints.runner import check_sequences
    from circuitscope.cli.analyze import analyze
    from circuitscope.errors import escaped
    from circuitscope.progress import watching
    from circuitscope.runs.run import Run, newest_run
    from circuitscope.zoom import zoom_in

    chosen = Run(run) if run is not None else newest_run()
    check_sequences(chosen, sequences)  # before the stretch is repeated
    found = zoom_in(chosen, first=first, last=last, every=every, progress=watching())
    for line in found.sentences():
        print(escaped(line))
    analyze([chosen.path], induction=True, sequences=sequences)
