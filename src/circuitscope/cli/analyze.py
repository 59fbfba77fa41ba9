"""`circuitscope analyze`."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

_WHAT, _ON = "What to read", "On what"


def analyze(
    runs: Annotated[
        list[Path] | None, typer.Argument(help="Runs to analyze; the newest unless told.", show_default=False)
    ] = None,
    induction: Annotated[
        bool,
        typer.Option(
            "--induction",
            help="Binding, recall and the other circuit scores, when they rise, and knockouts that back them"
            " (this, unless told otherwise).",
            rich_help_panel=_WHAT,
        ),
    ] = False,
    decay: Annotated[
        bool,
        typer.Option("--decay", help="Decay of off-diagonal terms; several runs side by side.", rich_help_panel=_WHAT),
    ] = False,
    phases: Annotated[
        bool,
        typer.Option(
            "--phases", help="Transitions in loss, accuracy and scores, their order and lags.", rich_help_panel=_WHAT
        ),
    ] = False,
    circuit: Annotated[
        bool,
        typer.Option(
            "--circuit", help="The parts of the recall circuit, each with its knockout.", rich_help_panel=_WHAT
        ),
    ] = False,
    causal: Annotated[
        bool,
        typer.Option(
            "--causal", help="Ablations of every head or layer, and interchange patching.", rich_help_panel=_WHAT
        ),
    ] = False,
    everything: Annotated[bool, typer.Option("--all", help="All of these.", rich_help_panel=_WHAT)] = False,
    steps: Annotated[
        str | None,
        typer.Option(help="Checkpoints: all, 0,400,800, or 0:2000:100.", rich_help_panel=_ON, show_default="all"),
    ] = None,
    sequences: Annotated[
        int, typer.Option(help="Held-out sequences a number is averaged over.", min=2, rich_help_panel=_ON)
    ] = 256,
) -> None:
    """Read circuits out of every checkpoint of a run.

    Tables land as parquet in RUN/analysis and are reused: what was computed once is not computed
    again, and Ctrl-C keeps what is done.
    """
    from circuitscope.cli.importing import no_garbage_collection

    with no_garbage_collection():
        from circuitscope.analysis import over_training, summary  # noqa: F401  what `_analyze` needs
        from circuitscope.runs.run import Run, newest_run

    chosen = [Run(path) for path in runs] if runs else [newest_run()]
    if not (decay or phases or circuit or causal or everything):
        induction = True
    wanted = {
        "induction": induction or everything,
        "phases": phases or everything,
        "circuit": circuit or everything,
        "causal": causal or everything,
        "decay": decay or everything,
    }
    try:
        _analyze(chosen, wanted, steps, sequences)
    except KeyboardInterrupt:
        typer.echo("circuitscope: stopped; what is done is kept and will be reused", err=True)
        raise typer.Exit(130) from None


def _analyze(runs: Sequence[Any], wanted: dict[str, bool], steps: str | None, sequences: int) -> None:
    from circuitscope.analysis import over_training, summary
    from circuitscope.analysis.checkpoints.steps import choose_steps
    from circuitscope.analysis.phases.timeline import timeline
    from circuitscope.cli.table import print_table
    from circuitscope.progress import watching

    decays = {}
    for run in runs:
        chosen = choose_steps(steps, over_training.saved_steps(run))
        print(summary.heading(run, chosen, sequences))
        with watching() as watcher:
            if wanted["induction"] or wanted["phases"]:
                frame = over_training.analyze(run, steps=chosen, sequences=sequences, watcher=watcher)
                chosen = sorted(int(step) for step in frame.step.unique())  # without damaged ones
            on_pairs = run.config.task.batch(0, size=1).layout.value_pos is not None
            found = None
            if wanted["circuit"] or (wanted["induction"] and on_pairs and over_training.shows_phi(run)):
                found = over_training.circuits(run, steps=chosen[-1:], sequences=sequences, watcher=watcher)[chosen[-1]]
            if wanted["decay"]:
                decays[run.name] = over_training.decay(run, steps=chosen, sequences=sequences, watcher=watcher)
            if wanted["causal"]:
                causes = over_training.causes(run, step=chosen[-1], sequences=sequences, watcher=watcher)
        if wanted["induction"]:
            at_end, at_start = (f"step {s}" for s in (chosen[-1], chosen[0]))
            columns = ("score", "where", at_end, at_start, "strongest channels", "share of the weight, or as said")
            print_table(columns, summary.score_lines(frame, run.config.task.name))
        since: dict[str, float] = {}
        if wanted["induction"] or wanted["phases"]:
            when = timeline(run, frame)
            when.save(run)
            for line in summary.timeline_lines(when):
                print(line)
            since = summary.since(when, found)
        if wanted["circuit"] and found is not None:
            print_table(
                ("part", "edges", "where", "weight there", "strongest", "accuracy lost"), summary.circuit_lines(found)
            )
        if wanted["causal"]:
            print_table(("intervention", "where", "effect"), summary.cause_lines(causes))
        if found is not None:
            for line in found.sentences(since):
                print(line)
        print(f"tables: {run.path / 'analysis'}")
    if decays:
        print_table(("", "decay", *decays), summary.decay_lines(decays))
