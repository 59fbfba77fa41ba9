"""`circuitscope sweep`: trains the trials of a grid and keeps one table of results."""

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from circuitscope.cli.executors import WhereTrials, check_fits, rows_from
from circuitscope.errors import Stopped, UserError

if TYPE_CHECKING:
    from circuitscope.sweeps.executor import Executor
    from circuitscope.sweeps.slurm import SlurmExecutor
    from circuitscope.sweeps.sweep import Sweep

_ELSEWHERE = "Other machines"


def sweep(
    grid: Annotated[Path, typer.Argument(help="Grid: a YAML file, or a folder with a grid.yaml.", show_default=False)],
    jobs: Annotated[
        int | None, typer.Option(help="Trials at the same time.", min=1, max=1024, show_default="one per core")
    ] = None,
    minutes: Annotated[
        float | None,
        typer.Option(help="Start no further trial after this time; the next call goes on.", min=0, show_default=False),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="List the trials, what is done and how long the rest takes, and stop.")
    ] = False,
    trial: Annotated[
        str | None, typer.Option(help="Run this trial alone, given by its digest, in this process.", show_default=False)
    ] = None,
    runs: Annotated[
        Path | None, typer.Option(help="Folder that holds the runs.", show_default="$CIRCUITSCOPE_RUNS or runs")
    ] = None,
    pause: Annotated[bool, typer.Option("--pause", help="Hold the running sweep of this grid still.")] = False,
    go_on: Annotated[bool, typer.Option("--continue", help="Let a sweep that is held still go on.")] = False,
    executor: Annotated[
        WhereTrials,
        typer.Option(
            help="What runs the trials: processes of this machine, tasks of Ray, or one job array of Slurm.",
            rich_help_panel=_ELSEWHERE,
        ),
    ] = WhereTrials.local,
    address: Annotated[
        str | None,
        typer.Option(
            help="A cluster of Ray: auto, HOST:PORT or ray://HOST:PORT.",
            rich_help_panel=_ELSEWHERE,
            show_default="a Ray that is started here",
        ),
    ] = None,
    cpus: Annotated[
        float | None,
        typer.Option(
            help="Cores of each trial, for Ray and Slurm.", min=0.01, rich_help_panel=_ELSEWHERE, show_default="1"
        ),
    ] = None,
    gpus: Annotated[
        float | None,
        typer.Option(
            help="GPUs of each trial, for Ray and Slurm; with Ray, four trials with 0.25 share one.",
            min=0,
            rich_help_panel=_ELSEWHERE,
            show_default="0",
        ),
    ] = None,
    time: Annotated[
        str | None,
        typer.Option(
            help="Time limit of each trial, as Slurm takes it; a trial that meets it goes on in the queue.",
            rich_help_panel=_ELSEWHERE,
            show_default=False,
        ),
    ] = None,
    slurm: Annotated[
        list[str] | None,
        typer.Option(
            help="A further option of sbatch, such as --partition=NAME; can be repeated.",
            metavar="OPTION",
            rich_help_panel=_ELSEWHERE,
            show_default=False,
        ),
    ] = None,
) -> None:
    """Train every trial of a grid, and keep one table of results.

    A grid is a base config with axes over its fields:

        base: {model: mamba, train: {steps: 2000}}
        axes: {train.lr: {log: [1e-4, 1e-2], points: 4}, train.seed: {seeds: 3}}

    A trial is trained once: what stands in results.csv is done, and runs that were stopped or killed go on. A trial
    that diverges or fails is recorded while the rest goes on. Each trial uses one thread. Ctrl-C stops the sweep and
    loses nothing.

    With --executor ray the runs must be on a disk that all nodes see. With --executor slurm the trials are submitted,
    and a later call collects their rows; --dry-run prints the script.
    """
    from circuitscope.sweeps.sweep import Sweep

    if sum([pause, go_on, dry_run, trial is not None]) > 1:
        raise UserError("give one of --pause, --continue, --dry-run and --trial")
    given = {"--address": address, "--cpus": cpus, "--gpus": gpus, "--minutes": minutes, "--time": time}
    check_fits(executor, {**given, "--slurm": slurm})
    found = Sweep.open(grid, runs)
    if pause or go_on:
        count = found.hold(still=pause)
        print(f"{found.grid.name}: {count} trial{'s' if count != 1 else ''} {'held still' if pause else 'going on'}")
    elif trial is not None:
        _one(found, trial)
    elif executor == WhereTrials.slurm:
        from circuitscope.sweeps.slurm import SlurmExecutor

        whole = {"--cpus": 1 if cpus is None else cpus, "--gpus": gpus or 0}
        for option, number in whole.items():
            if number != int(number):
                raise UserError(f"{option} {number:g}: Slurm gives whole cores and GPUs")
        array = SlurmExecutor(found, grid, jobs, int(whole["--cpus"]), int(whole["--gpus"]), time, slurm or ())
        _submit(found, array, dry_run)
    elif dry_run:
        _list(found)
    else:
        _all(
            found,
            rows_from(executor, jobs=jobs, minutes=minutes, pids=found.pids, address=address, cpus=cpus, gpus=gpus),
        )


def _list(found: "Sweep") -> None:
    """Every trial: its values, whether it is done, and about how long it takes."""
    from circuitscope.cli.table import print_table
    from circuitscope.sweeps.local import cores

    found.collect()
    seconds = found.estimated_seconds()
    rows = []
    for trial in found.grid.trials:
        row = found.results.rows.get(trial.digest, {})
        left = f"{seconds[trial.digest] / 60:.1f} min" if trial.digest in seconds else ""
        rows.append([trial.digest, *(str(v) for v in trial.values.values()), str(row.get("state", "")), left])
    print_table(["trial", *found.grid.axes, "state", "estimate"], rows)
    done = len(found.grid.trials) - len(seconds)
    minutes = sum(seconds.values()) / 60
    print(
        f"{len(found.grid.trials)} trials, {done} done; the rest takes about {minutes:.0f} minutes on one core,"
        f" {minutes / cores():.0f} on the {cores()} of this machine, if none stops early"
    )


def _one(found: "Sweep", digest: str) -> None:
    """One trial in this process, for job arrays: it leaves its row in its run, where the next sweep collects it."""
    import sys

    from circuitscope.progress import watching
    from circuitscope.sweeps.executor import Job, run_job

    trial = found.grid.trial(digest)
    row = run_job(Job.of(trial, found.grid, found.runs), watching(sys.stdout, stays=True))
    print(f"{trial.label}: {_outcome(row)}")
    if row["state"] == "failed":
        raise typer.Exit(1)


def _submit(found: "Sweep", array: "SlurmExecutor", dry_run: bool) -> None:
    """Submits the trials that are missing as one job array, or prints its script."""
    import sys

    from circuitscope.cli.trials import TrialLines
    from circuitscope.sweeps.executor import Job

    found.collect()
    every, left = len(found.grid.trials), found.missing
    if dry_run and left:
        print(array.script([Job.of(trial, found.grid, found.runs) for trial in left]), end="")
        return
    if not dry_run:
        list(found.go(array, TrialLines({}, 0, sys.stdout)))
    if array.submitted is None:
        print(f"{found.grid.name}: {every} of {every} trials done; {found.results.path}")
        return
    print(f"{found.grid.name}: {every} trials, {every - len(left)} done before; script in {array.path}")
    print(f"submitted {len(left)} as job {array.submitted}; follow them with: squeue -j {array.submitted}")
    again = f"circuitscope sweep {shlex.quote(str(array.grid))} --runs {shlex.quote(str(found.runs.parent))}"
    print(f"when they have ended, collect their rows with: {again} --minutes 0")


def _all(found: "Sweep", executor: "Executor") -> None:
    import sys

    from circuitscope.cli.trials import watching_trials

    collected = found.collect()
    missing, every = len(found.missing), len(found.grid.trials)
    also = f", {collected} of them from other tables or from runs that had ended" if collected else ""
    print(f"{found.grid.name}: {every} trials, {every - missing} done before{also}; runs in {found.runs}", flush=True)
    ended: list[dict[str, Any]] = []
    stopped = False
    labels = {trial.digest: trial.label for trial in found.grid.trials}
    with watching_trials(labels, every - missing, sys.stdout) as watch:
        try:
            for row in found.go(executor, watch):
                ended.append(row)
                watch.ended(str(row["digest"]), _outcome(row))
        except KeyboardInterrupt:
            stopped = True
    _summarize(found)
    left = len(found.missing)
    failed = [row for row in ended if row["state"] == "failed"]
    print(f"{every - left} of {every} trials done{f', {len(failed)} failed' if failed else ''}; {found.results.path}")
    again = f"{left} left: the same command goes on with them"
    if stopped:
        raise Stopped(f"stopped; {again}")
    if left:
        print(again)
    if failed:
        raise typer.Exit(1)


def _summarize(found: "Sweep") -> None:
    """For each model the learning rate chosen on validation, its metric on test, and its window; nothing without rates.

    Intervals are 95% intervals over seeds.
    """
    from circuitscope.cli.table import print_table
    from circuitscope.sweeps.cells import Cells
    from circuitscope.sweeps.windows import THRESHOLD, choices, windows

    try:
        cells = Cells.of(found.grid, found.results)
    except UserError:  # no axis of numbers, or nothing is done
        return
    wide = {(row.panel, row.line): row for row in windows(cells).itertuples()}
    rows: list[list[str]] = []
    chosen: list[Any] = list(choices(cells).itertuples())
    for row in chosen:
        window: Any = wide.get((row.panel, row.line))
        decades = "" if window is None else ("at least " if window.at_least else "") + _interval(window, ".2f")
        cell = (str(row.line), str(row.panel))
        rows.append([*cell, f"{row.rate:.3g}", _interval(row, ".3f"), str(row.seeds), decades])
    columns = ["", "", "rate chosen on validation", cells.value_words, "seeds", f"decades of rate ≥ {THRESHOLD:g}"]
    print_table(columns, rows)


def _interval(mean: Any, form: str) -> str:
    """A mean with its interval, if it has one: `0.981 (0.962 to 1.000)`."""
    ends = f" ({mean.low:{form}} to {mean.high:{form}})" if mean.low == mean.low else ""
    return f"{mean.value:{form}}{ends}"


def _outcome(row: dict[str, Any]) -> str:
    """How a trial ended, in a few words."""
    last = next(
        (f"{name.removeprefix('last_').replace('_', ' ')} {row[name]:.3f}" for name in row if _is_last(name)), ""
    )
    seconds = f"{row['seconds']:.0f} s" if "seconds" in row else ""
    return ", ".join(part for part in (str(row["state"]), last, seconds, str(row.get("message") or "")) if part)


def _is_last(name: str) -> bool:
    return name.startswith("last_test_") and not name.endswith("loss")
