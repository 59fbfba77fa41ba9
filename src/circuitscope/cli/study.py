"""`circuitscope study`: the studies of a folder, what they claim, how far they are, and what their tables say."""

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

app = typer.Typer(
    help="Studies: claims of papers with criteria that were fixed before the runs, and their verdicts.",
    no_args_is_help=True,
)
Name = Annotated[str, typer.Argument(help="Name of a study, or its folder.", show_default=False)]
Root = Annotated[Path, typer.Option("--studies", help="Folder that holds the studies.")]
Runs = Annotated[
    Path | None, typer.Option(help="Folder that holds the runs.", show_default="$CIRCUITSCOPE_RUNS or runs")
]
Which = Annotated[Literal["laptop", "paper"], typer.Option(help="The size of the study: laptop or paper.")]
_HERE = Path("studies")


@app.command("list")
def list_studies(studies: Root = _HERE) -> None:
    """List the studies with their claims, how many trials are done, and their verdicts."""
    from circuitscope.cli.table import print_table
    from circuitscope.errors import UserError
    from circuitscope.studies.study import studies_in

    rows = [
        [one.study.name, one.scale, f"{one.done}/{one.trials}", one.words, one.study.file.claim]
        for one in _verdicts(studies_in(studies))
    ]
    if not rows:
        raise UserError(f"no study with a grid in {studies}")
    print_table(["study", "scale", "trials", "verdict", "claim"], rows)


@app.command("run")
def run(
    name: Name,
    scale: Which = "laptop",
    minutes: Annotated[
        float | None,
        typer.Option(help="Start no further trial after this time; the next call goes on.", min=0, show_default=False),
    ] = None,
    jobs: Annotated[
        int | None, typer.Option(help="Trials at the same time.", min=1, max=1024, show_default="one per core")
    ] = None,
    runs: Runs = None,
    studies: Root = _HERE,
) -> None:
    """Train the trials of a study that its tables lack; `circuitscope sweep FOLDER` has more options."""
    import time

    from circuitscope.cli.sweep import sweep

    _, folders = _grids(studies, name, scale)
    end = None if minutes is None else time.monotonic() + 60 * minutes
    failed = 0
    for folder in folders:
        left = None if end is None else max(0.0, (end - time.monotonic()) / 60)
        try:
            sweep(folder, jobs=jobs, minutes=left, runs=runs)
        except typer.Exit as end_of_one:  # a trial failed; the other grids go on
            failed = failed or end_of_one.exit_code
    if failed:
        raise typer.Exit(failed)


@app.command("plot")
def plot_study(
    name: Name,
    scale: Which = "laptop",
    out: Annotated[Path, typer.Option(help="Folder of the figures.")] = Path("figures"),
    runs: Runs = None,
    studies: Root = _HERE,
) -> None:
    """Draw a study from its tables, without runs: the evidence for each criterion, and accuracy over each grid."""
    import sys

    from circuitscope.cli.plot import sweep
    from circuitscope.errors import UserError, escaped
    from circuitscope.studies.verdict import evidence, verdict
    from circuitscope.viz.evidence import evidence as draw
    from circuitscope.viz.style import save

    study, folders = _grids(studies, name, scale)
    found = verdict(study, scale)
    if found is None:
        raise UserError(f"{study.name} lacks some of its grids at the {scale} scale")
    figure = draw(evidence(found), title=f"{study.file.claim} ({found.words})")
    for path in save(figure, out / f"{study.name if scale == 'laptop' else f'{study.name}-{scale}'}.png"):
        print(escaped(path))
    own = [folder for folder in folders if folder.resolve().is_relative_to(study.folder.resolve())]
    for folder in own:
        parts = folder.relative_to(study.folder).parts
        try:
            sweep(folder, out=out / f"{'-'.join((study.name, *parts, 'grid'))}.png", runs=runs)
        except UserError as error:  # a grid without an axis of numbers, or without a trial; the others are drawn
            print(f"not drawn: {escaped(error)}", file=sys.stderr)


@app.command("verdict")
def verdict(
    name: Annotated[str | None, typer.Argument(help="Print this study only.", show_default=False)] = None,
    studies: Root = _HERE,
) -> None:
    """Judge every claim from the result tables and write CLAIMS.md beside the studies; with a name, print that one."""
    from circuitscope.errors import UserError
    from circuitscope.runs.store import write_text
    from circuitscope.studies.study import find_study, studies_in
    from circuitscope.studies.verdict import claims

    if name is not None:
        print(claims(_verdicts([find_study(studies, name)])), end="")
        return
    if not (found := _verdicts(studies_in(studies))):
        raise UserError(f"no study with a grid in {studies}")
    try:
        write_text(studies / "CLAIMS.md", claims(found))
    except OSError as error:
        raise UserError(f"cannot write {studies / 'CLAIMS.md'}: {error.strerror}") from None
    print(studies / "CLAIMS.md")


def _grids(studies: Path, name: str, scale: Literal["laptop", "paper"]) -> tuple[Any, list[Path]]:
    """The study of this name, and the folders of its grids at a scale."""
    from circuitscope.errors import UserError
    from circuitscope.studies.study import find_study

    study = find_study(studies, name)
    if not (folders := study.grids(scale)):
        raise UserError(f"{study.name} has no grid at the {scale} scale")
    return study, folders


def _verdicts(studies: Any) -> list[Any]:
    """The verdicts of the studies, at every scale for which they have a grid."""
    from circuitscope.studies.verdict import verdict

    found = [verdict(study, scale) for study in studies for scale in ("laptop", "paper")]
    return [one for one in found if one is not None]
