"""`circuitscope evaluate`: what a run scores on held-out examples, beside the baselines of its task."""

from pathlib import Path
from typing import Annotated

import typer

from circuitscope.cli.reading import OnDevice


def evaluate(
    run: Annotated[Path | None, typer.Argument(help="Run to evaluate.", show_default="the newest")] = None,
    step: Annotated[int | None, typer.Option(help="Checkpoint.", show_default="the last")] = None,
    sequences: Annotated[
        int | None,
        typer.Option(help="Examples of the test split.", min=2, max=100_000, show_default="the task's, for most 3000"),
    ] = None,
    device: OnDevice = "auto",
) -> None:
    """Print the measures of the task on its test split, of the model and of simple rules, with 95% intervals.

    The intervals come from drawing whole sequences again. Training never sees the test split.
    """
    from circuitscope.analysis.evaluation import evaluate as evaluated
    from circuitscope.analysis.evaluation import left_out
    from circuitscope.cli.table import print_table
    from circuitscope.devices import reading_on
    from circuitscope.errors import escaped
    from circuitscope.runs.run import Run, newest_run

    chosen = Run(run) if run is not None else newest_run()
    with reading_on(device) as where:
        table = evaluated(chosen, step=step, sequences=sequences)
        missing = left_out(chosen, step=step)
    task, on = chosen.config.task, "" if where.type == "cpu" else f", on {where.type}"
    print(escaped(f"{chosen.name}: {task.name}, {table.sequences.iloc[0]:,} sequences of the test split{on}"))
    rows = [
        (str(row.measure), str(row.of), f"{row.value:.4f}", f"{row.low:.4f} to {row.high:.4f}")
        for row in table.itertuples(index=False)
    ]
    print_table(("measure", "of", "value", "95% interval"), rows)
    for name, why in missing.items():
        print(escaped(f"{name} is not measured: {why}"))
