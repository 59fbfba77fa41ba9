"""Runs analyses over the checkpoints of a run, and keeps the rows of each analysis in one table."""

import errno
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, nullcontext
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from circuitscope.analysis.causal.circuit import circuit_of
from circuitscope.analysis.causal.parts import Circuit
from circuitscope.analysis.checkpoints.estimate import seconds_per_checkpoint
from circuitscope.analysis.checkpoints.in_order import LeftOut, load_weights, rows_in_order
from circuitscope.analysis.checkpoints.results import Results
from circuitscope.analysis.checkpoints.steps import ChosenSteps, choose_steps
from circuitscope.analysis.checkpoints.table import Table, rows_on_disk
from circuitscope.analysis.registry import ANALYSES, Analysis, Row, with_needs
from circuitscope.analysis.scores.held_out import HeldOut, check_scores
from circuitscope.analysis.scores.registry import SCORES
from circuitscope.arguments import explained
from circuitscope.devices import reading_device
from circuitscope.errors import UserError
from circuitscope.lens import HookedModel
from circuitscope.memory import check_fits, keep_freed_memory
from circuitscope.models.dtype import default_dtype
from circuitscope.models.stack import HookedStack
from circuitscope.progress import Progress, Silent
from circuitscope.runs.damage import DamagedFile, OtherRun
from circuitscope.runs.run import Run
from circuitscope.runs.store import write_whole

SEQUENCES = 256
_VERSION = 6  # version of what the tables hold
_CANNOT_BE_WRITTEN = (errno.EROFS, errno.EACCES, errno.EPERM)


@explained
def analysis_results(
    run: Run | str | Path,
    names: Iterable[str],
    *,
    steps: ChosenSteps = None,
    sequences: int = SEQUENCES,
    progress: Progress | None = None,
) -> Results:
    """Runs several analyses and those that they need, and keeps their tables in RUN/analysis/NAME.parquet.

    Args:
        names: names of analyses in `analysis.registry.ANALYSES`, or one name.
        steps: "all" (the default), "0:2000:100", or numbers; an analysis that is meant for the last checkpoint gets
            only the last of these.
        sequences: how many held-out sequences each number is averaged over.
    """
    run = Run.of(run)
    wanted = with_needs([names] if isinstance(names, str) else names)
    for one in wanted:
        if why := one.refuses(run):
            raise UserError(f"{run.path}: {why}")
    saved = saved_steps(run)
    chosen = choose_steps(steps, saved)
    found = Results(run, chosen, sequences, partly=len(chosen) < len(saved))
    if not any(one.name == "circuit" for one in wanted):
        found.earlier = kept_circuit(run, sequences)
    for one in sorted(wanted, key=lambda one: one.run_rows is not None):  # what follows from tables comes after them
        if one.run_rows is not None:
            found.tables[one.name] = _run_table(found, one, progress or Silent())
            continue
        at = found.steps[-1:] if one.steps == "last" else found.steps
        found.tables[one.name], read = _checkpoint_table(run, one, at, sequences, progress)
        if one.steps == "all":  # damaged checkpoints are not in the table
            found.steps = read
    return found


@explained
def analysis_table(
    run: Run | str | Path,
    name: str,
    *,
    steps: ChosenSteps = None,
    sequences: int = SEQUENCES,
    progress: Progress | None = None,
) -> pd.DataFrame:
    """The table of one analysis of a run, also kept in RUN/analysis/NAME.parquet.

    Args:
        name: the name of an analysis in `analysis.registry.ANALYSES`.
        steps: "all", "0:2000:100", or numbers; by default those that the analysis is meant for.
        sequences: how many held-out sequences each number is averaged over.
    """
    run, wanted = Run.of(run), ANALYSES[name]
    if steps is None or wanted.run_rows is not None:
        return analysis_results(run, [name], steps=steps, sequences=sequences, progress=progress)[name]
    if why := wanted.refuses(run):
        raise UserError(f"{run.path}: {why}")
    return _checkpoint_table(run, wanted, steps, sequences, progress)[0]


@explained
def analyze(
    run: Run | str | Path | Sequence[Run | str | Path],
    scores: str | Sequence[str] | None = None,
    *,
    steps: ChosenSteps = None,
    sequences: int = SEQUENCES,
    progress: Progress | None = None,
) -> pd.DataFrame:
    """Circuit scores of a run's checkpoints: a tidy table, also kept in RUN/analysis/scores.parquet.

    Args:
        run: a run or its folder; or several, whose rows follow each other.
        scores: names of scores, or one name; by default all that the task can have.
        steps: "all" (the default), "0:2000:100", or numbers.
        sequences: how many held-out sequences each score is averaged over.

    Returns:
        Columns run, step, layer, head (empty for the whole layer), factor, unit, score, weighting, value, stderr, n,
        even (the score of a matrix with even rows).
    """
    if isinstance(run, Sequence) and not isinstance(run, str):
        runs = [Run.of(one) for one in run]
        if not runs:
            raise UserError("no runs are given; expected a run, its folder, or a list of them")
        found = [analyze(one, scores, steps=steps, sequences=sequences, progress=progress) for one in runs]
        return pd.concat(found, ignore_index=True)
    run = Run.of(run)
    names = check_scores(scores, run.config.task)
    frame = analysis_table(run, "scores", steps=steps, sequences=sequences, progress=progress)
    wanted = {row for name in names for row in SCORES[name].means}
    return frame if scores is None else frame[frame.score.isin(wanted)].reset_index(drop=True)


@explained
def circuits(
    run: Run | str | Path, *, steps: ChosenSteps = None, sequences: int = SEQUENCES, progress: Progress | None = None
) -> dict[int, Circuit]:
    """The recall circuit of checkpoints (the last by default), by step; kept in RUN/analysis/circuit.parquet."""
    frame = analysis_table(run, "circuit", steps=steps, sequences=sequences, progress=progress)
    return {int(str(step)): circuit_of(rows) for step, rows in frame.groupby("step")}


def kept_circuit(run: Run, sequences: int = SEQUENCES) -> Circuit | None:
    """The circuit of the last checkpoint in which it was looked for; None if it was in none. Nothing is computed."""
    name = table_path(run, "circuit", sequences).stem
    frame = kept_tables(run, name, ANALYSES["circuit"].table_columns).get(name)
    return None if frame is None else circuit_of(frame[frame.step == frame.step.max()])


def held_out(run: Run, sequences: int = SEQUENCES) -> HeldOut:
    """The held-out sequences on which a run is analyzed; they come from its test split, which training never sees."""
    check_sequences(run, sequences)
    config = run.config
    return HeldOut(config.task, longest=config.model.max_length, sequences=sequences, seed=config.train.batch_seed)


def check_sequences(run: Run, sequences: int) -> None:
    """Refuses too few sequences, and more than memory holds: a mask of edges, and what one layer makes of them."""
    if sequences < 2:
        raise UserError(f"sequences must be at least 2 for a standard error, got {sequences}")
    length, model = run.config.task.max_length, run.config.model
    per_position = length + 4 * model.d_model * (2 + (model.mlp_ratio if model.state_mixer == "mlp" else 0))
    what = f"an analysis on {sequences:,} sequences of length {length:,}"
    check_fits(sequences * length * per_position, reading_device(), what, "use fewer --sequences")


def over_checkpoints(
    run: Run,
    kind: str,
    columns: dict[str, str],
    rows_of: Callable[[HookedModel], Iterable[Row]],
    steps: ChosenSteps = None,
    sequences: int = SEQUENCES,
    progress: Progress | None = None,
    at_once: int = 1,
    depends_on: Any = None,
    estimate: Callable[[int], float | None] = lambda step: None,
) -> tuple[pd.DataFrame, list[int]]:
    """Rows of every chosen checkpoint, and the steps that could be read, also where a step gave no rows.

    Rows on disk are used again, and an interrupt keeps what is done. Nothing is written if all rows are on disk.

    Args:
        at_once: how many checkpoints are read at the same time; above 1, `rows_of` is called from several threads.
        depends_on: what the rows depend on besides the checkpoint and the sequences.
        estimate: gives from the first step that is missing how many seconds a checkpoint may take; None if that is not
            worth saying.
    """
    progress = progress or Silent()
    keep_freed_memory()
    chosen = choose_steps(steps, saved_steps(run))
    settings = {"version": _VERSION, "sequences": sequences}
    device = reading_device().type
    table = Table(table_path(run, kind, sequences), columns, settings, depends_on, _digests(run, chosen), device)
    with default_dtype(torch.float32), nullcontext() if table.holds(chosen) else table:
        for note in table.notes:
            progress.say(note)
        missing = [s for s in chosen if s not in table.steps]
        if done := len(chosen) - len(missing):
            progress.say(f"{kind}: {done} of {len(chosen)} checkpoints were analyzed before{table.elsewhere(chosen)}")
        if missing and (seconds := estimate(missing[0])) is not None:
            turns = -(-len(missing) // max(1, at_once))
            progress.say(f"{kind}: about {seconds:.0f} s for a checkpoint, {seconds * turns:.0f} s in all")
        progress.start(kind, len(missing))
        with closing(rows_in_order(run, missing, rows_of, at_once, progress.doing)) as found:
            for step, rows in found:
                if isinstance(rows, LeftOut):
                    progress.say(f"warning: {rows}")
                    continue
                table.add(step, [{**row, "run": run.name, "step": step} for row in rows])
                progress.advance(step)
        frame, read = table.frame(), [step for step in chosen if step in table.steps]
    if not read:
        raise UserError(f"no checkpoint of {run.path} could be read")
    return frame[frame.step.isin(chosen)].reset_index(drop=True), read


def kept_tables(run: Run, kind: str, columns: dict[str, str]) -> dict[str, pd.DataFrame]:
    """Tables of a kind that `over_checkpoints` kept, by the name of their file; only rows of checkpoints as they are.

    Args:
        kind: how the names of the tables start.
    """
    paths = sorted((run.path / "analysis").glob(f"{kind}*.parquet"))
    digests = _digests(run, run.steps)
    found = {p.stem: rows_on_disk(p, columns, _VERSION, digests) for p in paths if ".old-" not in p.name}
    return {name: frame for name, frame in found.items() if len(frame)}


def _checkpoint_table(
    run: Run, wanted: Analysis, steps: ChosenSteps, sequences: int, progress: Progress | None
) -> tuple[pd.DataFrame, list[int]]:
    rows_of, most = wanted.rows, wanted.at_most(run) if sequences == SEQUENCES else None
    assert rows_of is not None
    data = held_out(run, sequences if most is None else min(sequences, most))
    if progress is not None and data.sequences < sequences:
        progress.say(
            f"{wanted.name}: on {data.sequences} of the {sequences} sequences, because the matrices of this model are"
            f" large; a number of --sequences other than {SEQUENCES} is taken as it is"
        )
    return over_checkpoints(
        run,
        wanted.name,
        wanted.table_columns,
        lambda model: rows_of(model, data),
        steps,
        sequences,
        progress,
        at_once=wanted.at_once(run, sequences),
        depends_on=wanted.depends_on(run),
        estimate=lambda step: seconds_per_checkpoint(run, step, rows_of, data),
    )


def _run_table(found: Results, wanted: Analysis, progress: Progress) -> pd.DataFrame:
    """The table of an analysis of the run as a whole: it follows from tables on disk, so it is made anew.

    It is kept where it was made from all checkpoints, so that a look at some of them does not take its place.
    """
    assert wanted.run_rows is not None
    columns = wanted.table_columns
    rows = [{"run": found.run.name, **row} for row in wanted.run_rows(found)]
    frame = pd.DataFrame(rows, columns=list(columns)).astype(columns)
    if found.partly:
        return frame
    path, data = table_path(found.run, wanted.name, found.sequences), frame.to_parquet(index=False)
    try:
        if not (path.is_file() and path.read_bytes() == data):
            path.parent.mkdir(exist_ok=True)
            write_whole(path, lambda file: file.write(data))
    except OSError as error:
        if error.errno not in _CANNOT_BE_WRITTEN:
            raise UserError(f"cannot write {path}: {error.strerror}") from None
        progress.say(f"{path} is not kept: {error.strerror}")
    return frame


def table_path(run: Run, name: str, sequences: int = SEQUENCES) -> Path:
    """Where the table of an analysis is kept; another number of sequences has a file of its own."""
    suffix = "" if sequences == SEQUENCES else f"-{sequences}"
    return run.path / "analysis" / f"{name}{suffix}.parquet"


def _digests(run: Run, steps: Sequence[int]) -> dict[int, str]:
    """Digests of checkpoints, except those with an unreadable header: such a file is left out when it is loaded."""
    found: dict[int, str] = {}
    for step in steps:
        try:
            found[step] = run.checkpoints.file_digest(step)
        except OtherRun:
            found[step] = ""  # rows that were read from it are not of this run
        except (DamagedFile, OSError):
            pass
    return found


def saved_steps(run: Run) -> list[int]:
    """Steps that have a checkpoint; it is an error if there are none."""
    if not run.steps:
        raise UserError(f"{run.path} has no checkpoints to analyze")
    return run.steps


def checkpoints(run: Run, steps: Sequence[int], progress: Progress) -> Iterator[tuple[int, HookedStack]]:
    """One model with the weights of each step in turn; a damaged checkpoint is left out with a warning."""
    model = run.empty_model()
    for step in steps:
        try:
            load_weights(model, run, step)
        except LeftOut as error:
            progress.say(f"warning: {error}")
            continue
        yield step, model
