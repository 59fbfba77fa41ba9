"""Analysis of every checkpoint of a run: weights swapped into a model, rows into one table."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from pathlib import Path

import pandas as pd

from circuitscope.analysis.causes import COLUMNS as CAUSE_COLUMNS
from circuitscope.analysis.causes import cause_rows
from circuitscope.analysis.checkpoint_rows import LeftOut, load_weights, readable_at_once, rows_in_order
from circuitscope.analysis.circuit import CIRCUIT_COLUMNS, Circuit, circuit_of, circuit_rows
from circuitscope.analysis.decay_rows import decay_rows
from circuitscope.analysis.score_rows import COLUMNS, Data, Row, check_scores, score_rows
from circuitscope.analysis.steps import Steps, choose_steps
from circuitscope.analysis.table import Table
from circuitscope.errors import UserError
from circuitscope.memory import keep_freed_memory
from circuitscope.mixers import has_phi
from circuitscope.models import HookedLM
from circuitscope.progress import Progress as Watcher
from circuitscope.progress import Silent
from circuitscope.runs.run import Run

SEQUENCES = 256
DECAY_COLUMNS = {
    "run": "string",
    "step": "int64",
    "layer": "int64",
    "head": "Int64",
    "factor": "string",
    "quantity": "string",
    "lag": "Int64",
    "value": "float64",
    "stderr": "float64",
    "n": "int64",
}
_VERSION = 1  # of what the tables hold


def analyze(
    run: Run | str | Path,
    scores: Sequence[str] | None = None,
    *,
    steps: Steps = None,
    sequences: int = SEQUENCES,
    watcher: Watcher | None = None,
) -> pd.DataFrame:
    """Circuit scores of a run's checkpoints: a tidy table, also kept in RUN/analysis/scores.parquet.

    Args:
        scores: names from `analysis.score_rows.SCORES`; all that the task can have unless told.
        steps: "all", "0:2000:100", or numbers.
        sequences: held-out sequences a score is averaged over.

    Returns:
        run, step, layer, head (none: the whole layer), factor, score, weighting, value, stderr, n.
    """
    run = run if isinstance(run, Run) else Run(run)
    names = check_scores(scores, run.config.task)
    data = data_of(run, sequences)
    every = check_scores(None, run.config.task)
    frame = over_checkpoints(
        run,
        "scores",
        COLUMNS,
        lambda model: score_rows(model, data, every),
        steps,
        sequences,
        watcher,
        at_once=readable_at_once(run.config.model),
    )
    return frame if scores is None else frame[frame.score.isin(_row_names(names))].reset_index(drop=True)


def _row_names(names: Iterable[str]) -> set[str]:
    """Names in the column `score` that a requested name stands for."""
    several = {
        "copying": {"copying", "copying_values"},
        "composition": {"q_composition", "k_composition", "v_composition"},
        "model": {"accuracy", "loss", "in_context", "loss_at_position", "accuracy_at_distance"},
    }
    return set().union(*(several.get(name, {name}) for name in names))


def circuits(
    run: Run | str | Path, *, steps: Steps = None, sequences: int = SEQUENCES, watcher: Watcher | None = None
) -> dict[int, Circuit]:
    """The recall circuit of checkpoints (the last unless told), by step; kept in RUN/analysis/circuit.parquet."""
    run = run if isinstance(run, Run) else Run(run)
    batch = data_of(run, sequences).own
    if not shows_phi(run):
        raise UserError(f"{run.path} has no layer with Φ, so there is no circuit to look for in it")
    chosen = saved_steps(run)[-1:] if steps is None else steps
    frame = over_checkpoints(
        run, "circuit", CIRCUIT_COLUMNS, lambda model: circuit_rows(model, batch), chosen, sequences, watcher
    )
    return {int(str(step)): circuit_of(rows) for step, rows in frame.groupby("step")}


def decay(
    run: Run | str | Path, *, steps: Steps = None, sequences: int = SEQUENCES, watcher: Watcher | None = None
) -> pd.DataFrame:
    """Decay of off-diagonal terms of a run's checkpoints, by layer, head and lag; kept in RUN/analysis/decay.parquet.

    `analysis.decay_rows` says what the quantities are.
    """
    run = run if isinstance(run, Run) else Run(run)
    tokens = data_of(run, sequences).own.tokens
    return over_checkpoints(
        run, "decay", DECAY_COLUMNS, lambda model: decay_rows(model, tokens), steps, sequences, watcher
    )


def causes(
    run: Run | str | Path, *, step: int | None = None, sequences: int = SEQUENCES, watcher: Watcher | None = None
) -> pd.DataFrame:
    """Ablations, knockouts by role and interchange patching at one checkpoint (the last unless told)."""
    run = run if isinstance(run, Run) else Run(run)
    batch = data_of(run, sequences).own
    chosen = saved_steps(run)[-1] if step is None else step
    return over_checkpoints(
        run, "causal", CAUSE_COLUMNS, lambda model: cause_rows(model, batch), chosen, sequences, watcher
    )


def data_of(run: Run, sequences: int = SEQUENCES) -> Data:
    """The held-out sequences on which a run is analyzed: of its test split, which training never sees."""
    if sequences < 2:
        raise UserError(f"sequences must be at least 2 for a standard error, got {sequences}")
    config = run.config
    seed = config.train.seed if config.train.data_seed is None else config.train.data_seed
    return Data(config.task, longest=config.model.max_length, sequences=sequences, seed=seed)


def over_checkpoints(
    run: Run,
    kind: str,
    columns: dict[str, str],
    rows_of: Callable[[HookedLM], Iterable[Row]],
    steps: Steps = None,
    sequences: int = SEQUENCES,
    watcher: Watcher | None = None,
    at_once: int = 1,
) -> pd.DataFrame:
    """Rows of every chosen checkpoint, those already on disk reused; interrupted, what is done is kept.

    Args:
        at_once: checkpoints read at the same time; with more than 1 `rows_of` is called from several threads.
    """
    watcher = watcher or Silent()
    keep_freed_memory()
    chosen = choose_steps(steps, saved_steps(run))
    settings = {"version": _VERSION, "sequences": sequences}
    suffix = "" if sequences == SEQUENCES else f"-{sequences}"
    with Table(run.path / "analysis" / f"{kind}{suffix}.parquet", columns, settings) as table:
        if table.warning:
            watcher.say(table.warning)
        missing = [s for s in chosen if s not in table.steps]
        if done := len(chosen) - len(missing):
            watcher.say(f"{kind}: {done} of {len(chosen)} checkpoints were analyzed before")
        watcher.start(kind, len(missing))
        with closing(rows_in_order(run, missing, rows_of, at_once)) as found:
            for step, rows in found:
                if isinstance(rows, LeftOut):
                    watcher.say(f"warning: {rows}")
                    continue
                table.add([{"run": run.name, "step": step, **row} for row in rows])
                watcher.advance(step)
        frame = table.frame()
    asked = frame[frame.step.isin(chosen)].reset_index(drop=True)
    if not len(asked):
        raise UserError(f"no checkpoint of {run.path} could be read")
    return asked


def shows_phi(run: Run) -> bool:
    """Whether some layer of a run's model has a mixing matrix."""
    return any(has_phi(mixer) for mixer in run.config.model.mixers)


def saved_steps(run: Run) -> list[int]:
    """Steps with a checkpoint; an error where there is none."""
    if not run.steps:
        raise UserError(f"{run.path} has no checkpoints to analyze")
    return run.steps


def checkpoints(run: Run, steps: Sequence[int], watcher: Watcher) -> Iterator[tuple[int, HookedLM]]:
    """One model with the weights of each step in turn; a damaged checkpoint is left out with a warning."""
    model = HookedLM(run.config.model).eval()
    for step in steps:
        try:
            load_weights(model, run, step)
        except LeftOut as error:
            watcher.say(f"warning: {error}")
            continue
        yield step, model
