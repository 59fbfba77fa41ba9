"""`circuitscope phi`: heatmaps of attention and Φ."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from circuitscope.cli.reading import OnDevice

if TYPE_CHECKING:
    from circuitscope.analysis.pictures.layer import UnitChoice

_WHAT, _LOOK = "What to show", "How"


def phi(
    run: Annotated[
        Path | None, typer.Argument(help="Run to look into; by default the newest.", show_default=False)
    ] = None,
    layer: Annotated[int, typer.Option(help="Layer, from 0.", rich_help_panel=_WHAT)] = 0,
    step: Annotated[
        int | None, typer.Option(help="Checkpoint.", rich_help_panel=_WHAT, show_default="the last")
    ] = None,
    steps: Annotated[
        str | None,
        typer.Option(help="Several, as a strip: 0,400,800 or 0:2000:400.", rich_help_panel=_WHAT, show_default=False),
    ] = None,
    example: Annotated[int, typer.Option(help="Held-out example, from 0.", rich_help_panel=_WHAT)] = 0,
    factors: Annotated[
        str | None,
        typer.Option(
            "--factors",
            "--factor",
            help="all, phi, composed, or names such as conv,ssm (docs/phi.md lists them).",
            rich_help_panel=_WHAT,
            show_default="all of them; over several steps composed",
        ),
    ] = None,
    heads: Annotated[
        str | None,
        typer.Option(
            "--heads",
            "--head",
            "--channels",
            "--channel",
            help="Heads or channels: 0,5, all, mean or mean_abs.",
            rich_help_panel=_WHAT,
            show_default="all of up to 8 heads; mean_abs of channels",
        ),
    ] = None,
    top: Annotated[
        int | None,
        typer.Option(
            help="How many of the strongest heads or channels to show, by a score.",
            rich_help_panel=_WHAT,
            show_default=False,
        ),
    ] = None,
    by: Annotated[
        str | None,
        typer.Option(
            help="The score that --top ranks by: recall, recall+1, binding, previous_token, query<-filler …",
            rich_help_panel=_WHAT,
            show_default="recall; induction on repeated blocks",
        ),
    ] = None,
    scale: Annotated[
        str | None,
        typer.Option(
            help="signed: colours centred on 0. share: |Φ| over its row sum. log: |Φ| on a log scale.",
            rich_help_panel=_LOOK,
            show_default="share for attention and mean_abs, otherwise signed",
        ),
    ] = None,
    mark: Annotated[
        str | None,
        typer.Option(help="Point at edges: recall,binding.", rich_help_panel=_LOOK, show_default=False),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="File to write: .png, .svg or .pdf.", rich_help_panel=_LOOK, show_default="in figures of the run"
        ),
    ] = None,
    data: Annotated[
        bool, typer.Option("--data", help="Also write the numbers, as CSV beside it.", rich_help_panel=_LOOK)
    ] = False,
    device: OnDevice = "auto",
) -> None:
    """Draw attention or Φ of a layer as a heatmap, tokens coloured by role.

    One held-out example at one checkpoint, or a strip over several; factors of Φ (conv, scan, gate,
    composed) side by side.
    """
    from typing import Any, cast

    from circuitscope.cli.listed import names
    from circuitscope.devices import reading_on
    from circuitscope.errors import UserError, escaped
    from circuitscope.runs.run import Run, newest_run
    from circuitscope.viz.phi_figure import phi_figure
    from circuitscope.viz.style import check_ending, save

    check_ending(out)
    if step is not None and steps is not None:
        raise UserError("give --step or --steps, not both")
    if top is not None and heads is not None:
        raise UserError("give --heads by number or --top, not both")
    if by is not None and top is None:
        raise UserError("--by says which score --top ranks by; give --top too")
    chosen = Run(run) if run is not None else newest_run()
    with reading_on(device):
        figure = phi_figure(
            chosen,
            layer,
            steps=step if step is not None else steps,
            example=example,
            factors=None if factors is None else names("--factors", factors),
            heads=None if heads is None else _heads(heads.strip().replace("-", "_")),
            top=top,
            by=by,
            scale=cast(Any, scale),
            mark=() if mark is None else names("--mark", mark),
        )
    asked = {"example": example or None, "": factors, "head": heads, "top": top, "by": by, "scale": scale, "mark": mark}
    parts = [f"{name}{value}" for name, value in asked.items() if value is not None]
    when = f"steps{_safe(steps)}" if steps is not None else f"step{step if step is not None else chosen.steps[-1]}"
    name = "-".join([f"phi-L{layer % chosen.config.model.n_layers}", when, *map(_safe, parts)])
    for path in save(figure, out or chosen.path / "figures" / f"{name}.png", data=data):
        print(escaped(path))


def _heads(text: str) -> "UnitChoice":
    from circuitscope.analysis.pictures.layer import MEANS
    from circuitscope.cli.listed import numbers

    if text in ("all", *MEANS):
        return text  # type: ignore[return-value]
    return numbers("--heads", text, f"all, {', '.join(MEANS)}, or ")


def _safe(text: str) -> str:
    """The text as part of a file name."""
    return "".join(c if c.isalnum() or c in "+_" else "-" for c in text)
