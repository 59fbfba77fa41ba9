"""Training and resuming as Python functions, which the command line calls too."""

from pathlib import Path
from typing import Any

from circuitscope import models
from circuitscope.arguments import explained
from circuitscope.config import RunConfig
from circuitscope.errors import UserError
from circuitscope.progress import Lines, Progress
from circuitscope.runs.run import Run
from circuitscope.training import trainer


@explained
def train(
    config: RunConfig | str | Path | None = None,
    *,
    model: Any = None,
    task: Any = None,
    recipe: str | None = None,
    name: str | None = None,
    root: str | Path | None = None,
    progress: bool | Progress = False,
    **options: Any,
) -> Run:
    """Trains a new run and returns it.

    Args:
        config: a RunConfig or a YAML file; without it, give a model, a task and options.
        model: the name of a preset or mixer, a list such as "attention,attention", or a mapping of model fields.
        task: a task's name, a mapping of its fields, or a Task.
        recipe: where the options come from that are not given: "auto" (by default: the model's own recipe), "plain"
            (the fields' defaults), "paper", "zoology" or the name of another recipe.
        name: the name of the run's folder (by default MIXER-TASK-NUMBER); an existing run is never overwritten.
        root: the folder of all runs; by default $CIRCUITSCOPE_RUNS, or ./runs.
        progress: True prints a line at each evaluation; a `circuitscope.progress.Progress` receives the reports.
        options: fields of train, task, model or mixer: `save_every=100, pairs=8, n_layers=1, n_heads=2`.
    """
    if config is not None:
        if model is not None or task is not None or recipe is not None or options:
            raise UserError("give a config, or a model, a task, a recipe and options, not both")
        if isinstance(config, str) and config in models.names():
            raise UserError(f'a config is a RunConfig or a file; for a model of that name: train(model="{config}")')
        resolved = config if isinstance(config, RunConfig) else RunConfig.load(config)
    else:
        resolved = RunConfig.build(model, task, recipe="auto" if recipe is None else recipe, **options)
    return trainer.train(resolved, root=root, name=name, progress=_progress(progress))


@explained
def resume(run: Run | str | Path, *, progress: bool | Progress = False) -> Run:
    """Continues a run that was stopped or killed."""
    return trainer.resume(Run.of(run), progress=_progress(progress))


def _progress(progress: bool | Progress) -> Progress | None:
    if isinstance(progress, bool):
        return Lines() if progress else None
    return progress
