"""`circuitscope runs`: the runs in a folder, how far they are and how they ended."""

import os
import time
from pathlib import Path
from typing import Annotated, Any

import typer


def runs(
    sweep: Annotated[str | None, typer.Option(help="Show the trials of this sweep.", show_default=False)] = None,
    folder: Annotated[
        Path | None,
        typer.Option("--runs", help="Folder that holds the runs.", show_default="$CIRCUITSCOPE_RUNS or runs"),
    ] = None,
) -> None:
    """List the runs: state, steps, validation metric, what a bad end looks like, and when they were started.

    The newest comes last.
    """
    from circuitscope.cli.table import print_table
    from circuitscope.errors import UserError, unknown
    from circuitscope.runs.run import runs_in, runs_root

    root = runs_root(folder)
    if sweep is not None and not os.path.isdir(root / sweep):
        raise unknown("sweep", sweep, sweeps_in(root))
    found = runs_in(root / sweep if sweep is not None else root)
    if not found:
        sweeps = sweeps_in(root)
        also = f"; sweeps: {', '.join(sweeps)} (see --sweep NAME)" if sweeps else "; make one with: circuitscope train"
        raise UserError(f"no runs in {root if sweep is None else root / sweep}{also if sweep is None else ''}")
    print_table(
        ["run", "model", "task", "state", "step", "validation", "looks like", "when"], [_row(run) for run in found]
    )
    if sweep is None and (sweeps := sweeps_in(root)):
        print(f"sweeps: {', '.join(sweeps)}; --sweep NAME lists the trials of one")


def sweeps_in(root: Path) -> list[str]:
    """The folders that hold the trials of a sweep."""
    try:
        return sorted({path.parent.parent.name for path in root.glob("[!.]*/[!.]*/config.yaml")})
    except OSError:  # a path that is too long
        return []


def _row(run: Any) -> list[str]:
    from circuitscope.errors import UserError
    from circuitscope.models.naming import preset_of

    try:
        config = run.config
    except UserError as error:
        return [run.name, f"unreadable: {error}", "", "", "", "", "", ""]
    status, rows = run.status, run.metrics
    held = rows[rows.split == "validation"] if len(rows) else rows
    shown = " ".join(config.task.shown(held[config.task.metric].iloc[-1]).split()) if len(held) else ""
    model = preset_of(config.model) or ", ".join(dict.fromkeys(mixer.name for mixer in config.model.mixers))
    step = status.get("step", "")
    when = time.strftime("%Y-%m-%d %H:%M", time.localtime(run.created / 1e9)) if run.created else ""
    return [
        run.name,
        f"{model} ×{config.model.n_layers}",
        config.task.name,
        str(status.get("state", "unknown")),
        f"{step}/{config.train.steps}",
        shown,
        str(status.get("looks", "")),
        when,
    ]
