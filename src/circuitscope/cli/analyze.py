"""`circuitscope analyze`: computes the analyses of runs and prints what they say."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from circuitscope.cli.executors import Where, check_fits, rows_from
from circuitscope.cli.reading import OnDevice
from circuitscope.errors import RunFailed, Stopped, UserError

if TYPE_CHECKING:
    from circuitscope.runs.run import Run
    from circuitscope.sweeps.executor import Executor
    from circuitscope.viz.registry import Said

_WHAT, _ON, _AT_ONCE = "What to read", "On what", "Several runs at once"
_WITH_SCORES = ("phases", "circuit")  # what --induction adds to the scores, if a run can have it


def analyze(
    runs: Annotated[
        list[Path] | None, typer.Argument(help="Runs to analyze; by default the newest.", show_default=False)
    ] = None,
    induction: Annotated[
        bool,
        typer.Option(
            "--induction",
            help="Binding, recall and the other circuit scores of every layer, head and channel."
            " Also says when they rise, and which knockouts back them. This is the default.",
            rich_help_panel=_WHAT,
        ),
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
            "--circuit",
            help="The parts of the recall circuit, each with the knockout that proves it.",
            rich_help_panel=_WHAT,
        ),
    ] = False,
    causal: Annotated[
        bool,
        typer.Option(
            "--causal",
            help="Ablations of every head or layer, knockouts between roles, and interchange patching.",
            rich_help_panel=_WHAT,
        ),
    ] = False,
    decay: Annotated[
        bool,
        typer.Option(
            "--decay",
            help="Decay of off-diagonal terms by lag, transition products, and the reach of gradients."
            " Several runs are shown side by side.",
            rich_help_panel=_WHAT,
        ),
    ] = False,
    analysis: Annotated[
        list[str] | None,
        typer.Option(
            "--analysis",
            metavar="NAME",
            help="Any analysis by its name, including those of other packages; can be repeated.",
            rich_help_panel=_WHAT,
            show_default=False,
        ),
    ] = None,
    everything: Annotated[
        bool,
        typer.Option("--all", help="Every analysis that is possible for the runs.", rich_help_panel=_WHAT),
    ] = False,
    steps: Annotated[
        str | None,
        typer.Option(help="Checkpoints: all, 0,400,800, or 0:2000:100.", rich_help_panel=_ON, show_default="all"),
    ] = None,
    sequences: Annotated[
        int, typer.Option(help="Held-out sequences that each number is averaged over.", min=2, rich_help_panel=_ON)
    ] = 256,
    device: OnDevice = "auto",
    executor: Annotated[
        Where | None,
        typer.Option(
            help="Analyze each run in a process of this machine, or in a task of Ray, on one thread each.",
            rich_help_panel=_AT_ONCE,
            show_default="one run after the other, here",
        ),
    ] = None,
    jobs: Annotated[
        int | None,
        typer.Option(
            help="Runs at the same time.", min=1, max=1024, rich_help_panel=_AT_ONCE, show_default="one per core"
        ),
    ] = None,
    address: Annotated[
        str | None,
        typer.Option(
            help="A cluster of Ray: auto, HOST:PORT or ray://HOST:PORT.",
            rich_help_panel=_AT_ONCE,
            show_default="a Ray that is started here",
        ),
    ] = None,
) -> None:
    """Read circuits out of every checkpoint of a run.

    Tables are kept as parquet in RUN/analysis and used again as long as the
    checkpoints stay the same. Ctrl-C keeps what is done.
    """
    from circuitscope.cli.importing import no_garbage_collection

    with no_garbage_collection():
        from circuitscope.analysis.registry import ANALYSES
        from circuitscope.devices import reading_on
        from circuitscope.runs.run import Run, newest_run

        own = {"phases": phases, "circuit": circuit, "causal": causal, "decay": decay}
        asked = {ANALYSES[name].name for name in [*(name for name, on in own.items() if on), *(analysis or ())]}
    check_fits(executor, {"--address": address})
    if jobs is not None and executor is None:
        raise UserError("--jobs needs --executor local or ray")
    chosen = [Run(path) for path in runs] if runs else [newest_run()]
    induction = induction or not (asked or everything)
    asked |= {"scores"} if induction else set()
    added = set(ANALYSES) if everything else set(_WITH_SCORES) if induction else set()
    try:
        if executor is not None:
            _at_once(chosen, asked | added, rows_from(executor, jobs=jobs, address=address), steps, sequences, device)
        with reading_on(device):
            _analyze(chosen, asked, added, everything, steps, sequences)
    except KeyboardInterrupt:
        raise Stopped("stopped; what is done is kept and will be used again") from None


def _analyze(
    runs: "Sequence[Run]", asked: set[str], added: set[str], everything: bool, steps: str | None, sequences: int
) -> None:
    """Computes the analyses and prints them in the order of the registry; those shown side by side come last.

    Analyses that are added to those asked for are left out without a word if a run cannot have them.
    """
    from circuitscope.analysis.checkpoints.runner import analysis_results, saved_steps
    from circuitscope.analysis.checkpoints.steps import choose_steps
    from circuitscope.analysis.registry import ANALYSES
    from circuitscope.progress import watching
    from circuitscope.viz.registry import words_of
    from circuitscope.viz.words.heading import heading, state

    found = []
    for run in runs:
        _print(heading(run, choose_steps(steps, saved_steps(run)), sequences))
        if ended := state(run):
            _print(f"the run is not finished: {ended}")
        names, refused = _possible(run, asked | added)
        for name, why in refused.items():
            if everything or name in asked:
                _print(f"{name} is left out: {why}")
        for name in names if everything else ():
            for sentence in ANALYSES[name].leaves_out(run):
                _print(sentence)
        with watching() as progress:
            found.append(analysis_results(run, names, steps=steps, sequences=sequences, progress=progress))
        for name in names:
            words = words_of(name)
            if words.side_by_side:
                continue
            backs = name in added - asked and not everything
            for said in words.in_brief(found[-1]) if backs and words.in_brief else words.say(found[-1]):
                _print(said)
        _print(f"tables: {run.path / 'analysis'}")
    for name in ANALYSES:
        having = [one for one in found if name in one]
        if having and words_of(name).side_by_side:
            for said in words_of(name).say(*having):
                _print(said)


def _possible(run: "Run", wanted: set[str]) -> tuple[list[str], dict[str, str]]:
    """The analyses that a run can have, in the order of the registry, and why it cannot have the others."""
    from circuitscope.analysis.registry import ANALYSES, refusal

    refused = {name: why for name in ANALYSES if name in wanted and (why := refusal(name, run))}
    names = [name for name in ANALYSES if name in wanted and name not in refused]
    if not names:
        raise UserError(f"{run.path}: {next(iter(refused.values()))}")
    return names, refused


def _at_once(
    runs: "Sequence[Run]", wanted: set[str], executor: "Executor", steps: str | None, sequences: int, device: str
) -> None:
    """Computes the tables of all runs, several at a time; `_analyze` then finds them on disk."""
    import sys
    from contextlib import closing

    from circuitscope.analysis.checkpoints.runner import saved_steps
    from circuitscope.analysis.checkpoints.steps import choose_steps
    from circuitscope.cli.trials import watching_trials
    from circuitscope.sweeps.executor import Job

    jobs = {}
    for run in runs:
        choose_steps(steps, saved_steps(run))  # refused here, before anything is started
        job = Job.analysis(run, _possible(run, wanted)[0], steps, sequences, device)
        jobs[job.digest] = job
    failed = []
    with (
        watching_trials({digest: Path(digest).name for digest in jobs}, 0, sys.stderr) as watch,
        closing(executor(list(jobs.values()), watch)) as rows,  # type: ignore[type-var]
    ):
        for row in rows:
            watch.ended(str(row["digest"]), " ".join([row["state"], row.get("message", "")]).strip())
            if row["state"] == "failed":
                failed.append(f"{row['digest']}: {row['message']}")
    if failed:
        raise RunFailed(f"{len(failed)} of {len(jobs)} runs were not analyzed; {failed[0]}")


def _print(said: "Said") -> None:
    """Prints a line or a plain table."""
    from circuitscope.cli.table import print_table
    from circuitscope.errors import escaped

    if isinstance(said, str):
        print(escaped(said))
    else:
        print_table(said.columns, said.rows)
