"""`circuitscope plot`: figures of runs."""

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(no_args_is_help=True, help="Draw figures of runs.")


@app.callback()
def plot() -> None:
    """Draw figures of runs."""


@app.command()
def dynamics(
    runs: Annotated[
        list[Path] | None, typer.Argument(help="Runs to draw; the newest unless told.", show_default=False)
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="File to write: .png, .svg or .pdf.", show_default="figures/dynamics.png in the run"),
    ] = None,
) -> None:
    """Loss and accuracy over training steps, with the chance level 1/k."""
    from circuitscope.training.run import Run, newest_run
    from circuitscope.viz.dynamics import save_dynamics

    chosen = [Run(path) for path in runs] if runs else [newest_run()]
    print(save_dynamics(chosen, out or chosen[0].path / "figures" / "dynamics.png"))
