"""`circuitscope phi`: heatmaps of attention and Φ."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

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
) -> None:
    """Draw attention or Φ of a layer as a heatmap, tokens coloured by role.

    One held-out example at one checkpoint, or a strip over several; factors of Φ (conv, scan, gate,
    composed) side by side.
    """
    from typing import Any, cast

    from circuitscope.errors import UserError
    from circuitscope.runs.run import Run, newest_run
    from circuitscope.viz.phi_figure import phi_figure
    from circuitscope.viz.style import check_ending, save

    check_ending(out)
    if step is not None and steps is not None:
        raise UserError("give --step or --steps, not both")
    chosen = Run(run) if run is not None else newest_run()
    figure = phi_figure(
        chosen,
        layer,
        steps=step if step is not None else steps,
        example=example,
        factors=None if factors is None else _names(factors),
        heads=None if heads is None else _heads(heads),
        top=top,
        by=by,
        scale=cast(Any, scale),
        mark=_listed(mark) if mark else (),
    )
    asked = {"example": example or None, "": factors, "head": heads, "top": top, "by": by, "scale": scale}
    parts = [f"{name}{value}" for name, value in asked.items() if value is not None]
    when = f"steps{_safe(steps)}" if steps is not None else f"step{step if step is not None else chosen.steps[-1]}"
    name = "-".join([f"phi-L{layer % chosen.config.model.n_layers}", when, *map(_safe, parts)])
    for path in save(figure, out or chosen.path / "figures" / f"{name}.png", data=data):
        print(path)


def _listed(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _names(text: str) -> str | list[str]:
    names = _listed(text)
    return "all" if names == ["all"] else names


def _heads(text: str) -> "UnitChoice":
    from circuitscope.analysis.pictures.layer import MEANS
    from circuitscope.errors import unknown

    parts = _listed(text.replace("mean-abs", "mean_abs"))
    if parts in (["all"], ["mean"], ["mean_abs"]):
        return parts[0]  # type: ignore[return-value]
    for part in parts or [text]:
        if not part.isdecimal() or len(part) > 18:
            raise unknown("choice of heads", part, ["all", *MEANS, "numbers such as 0,5"])
    return [int(part) for part in parts]


def _safe(text: str) -> str:
    """The text as part of a file name."""
    return "".join(c if c.isalnum() or c in "+_" else "-" for c in text)
