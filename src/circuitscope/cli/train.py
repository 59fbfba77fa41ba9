"""`circuitscope train`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from circuitscope.errors import UserError, escaped

if TYPE_CHECKING:
    from circuitscope.config import RunConfig

# Shown defaults are typed here, because looking them up would load pydantic and torch for --help. The first word of
# each is a value; tests/cli/test_command_line.py checks that giving it changes nothing.
_MODEL, _TASK, _OPTIMIZE, _SAVE, _RUN = "Model", "Task", "Optimization", "Saving", "Run"


def train(
    config: Annotated[
        Path | None,
        typer.Argument(help="A config file, for example runs/NAME/config.yaml to repeat a run.", show_default=False),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(help="Model; `circuitscope models` lists them.", rich_help_panel=_MODEL, show_default="attention"),
    ] = None,
    mixers: Annotated[
        str | None,
        typer.Option(
            help="Instead of a model: one token mixer for all layers, or one per layer: mamba,attention.",
            rich_help_panel=_MODEL,
            show_default="attention",
        ),
    ] = None,
    layers: Annotated[
        int | None, typer.Option(help="Number of layers.", rich_help_panel=_MODEL, show_default="2 for most models")
    ] = None,
    d_model: Annotated[
        int | None, typer.Option(help="Width of the residual stream.", rich_help_panel=_MODEL, show_default="64")
    ] = None,
    heads: Annotated[
        int | None,
        typer.Option(help="Attention heads in every layer.", rich_help_panel=_MODEL, show_default="1 for most models"),
    ] = None,
    positions: Annotated[
        str | None,
        typer.Option(
            help="none, learned, sinusoidal, rope or alibi.",
            rich_help_panel=_MODEL,
            show_default="learned where no mixer sees the order by itself, else none",
        ),
    ] = None,
    task: Annotated[
        str | None,
        typer.Option(help="Task; `circuitscope tasks` lists them.", rich_help_panel=_TASK, show_default="mqar"),
    ] = None,
    length: Annotated[
        int | None, typer.Option(help="Sequence length.", rich_help_panel=_TASK, show_default="64 for mqar")
    ] = None,
    pairs: Annotated[
        int | None,
        typer.Option(help="Key-value pairs in a sequence.", rich_help_panel=_TASK, show_default="4 for mqar"),
    ] = None,
    vocab_size: Annotated[
        int | None, typer.Option(help="Vocabulary.", rich_help_panel=_TASK, show_default="8192 for mqar")
    ] = None,
    examples: Annotated[
        str | None,
        typer.Option(
            help="Training examples, repeated in a new order each epoch; none: never repeat.",
            rich_help_panel=_TASK,
            show_default="20000 for mqar",
        ),
    ] = None,
    recipe: Annotated[
        str | None,
        typer.Option(
            help="What is not given: auto (the model's own settings), plain (the fields' defaults), paper, zoology or a"
            " model's name; `circuitscope train --fields recipe` shows them.",
            rich_help_panel=_OPTIMIZE,
            show_default="auto",
        ),
    ] = None,
    steps: Annotated[
        int | None, typer.Option(help="Optimizer steps.", rich_help_panel=_OPTIMIZE, show_default="1500 for attention")
    ] = None,
    batch_size: Annotated[
        int | None, typer.Option(help="Examples per step.", rich_help_panel=_OPTIMIZE, show_default="64")
    ] = None,
    lr: Annotated[
        float | None,
        typer.Option(help="Peak learning rate.", rich_help_panel=_OPTIMIZE, show_default="0.001 for attention"),
    ] = None,
    weight_decay: Annotated[
        float | None,
        typer.Option(help="AdamW's decay of matrices.", rich_help_panel=_OPTIMIZE, show_default="1.0 for attention"),
    ] = None,
    warmup: Annotated[
        float | None,
        typer.Option(
            help="Share of the steps with a rising rate.", rich_help_panel=_OPTIMIZE, show_default="0.1 for attention"
        ),
    ] = None,
    schedule: Annotated[
        str | None,
        typer.Option(
            help="Rate after the warmup: constant, linear or cosine.",
            rich_help_panel=_OPTIMIZE,
            show_default="constant for attention",
        ),
    ] = None,
    clip: Annotated[
        str | None,
        typer.Option(help="Largest gradient norm; none: no clipping.", rich_help_panel=_OPTIMIZE, show_default="1.0"),
    ] = None,
    seed: Annotated[
        int | None, typer.Option(help="Seed of weights and examples.", rich_help_panel=_OPTIMIZE, show_default="0")
    ] = None,
    eval_every: Annotated[
        int | None, typer.Option(help="Evaluate every N steps.", rich_help_panel=_OPTIMIZE, show_default="50")
    ] = None,
    early_stop: Annotated[
        float | None,
        typer.Option(
            help="Stop at this validation accuracy, for example 0.99.", rich_help_panel=_OPTIMIZE, show_default=False
        ),
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="auto, cpu, cuda or mps.", rich_help_panel=_OPTIMIZE, show_default="auto")
    ] = None,
    precision: Annotated[
        str | None,
        typer.Option(
            help="auto (bfloat16 on CUDA), float32 or bfloat16.", rich_help_panel=_OPTIMIZE, show_default="auto"
        ),
    ] = None,
    deterministic: Annotated[
        bool,
        typer.Option(
            "--deterministic",
            help="On a GPU, only kernels that give the same bits each time; on a CPU all do.",
            rich_help_panel=_OPTIMIZE,
        ),
    ] = False,
    threads: Annotated[
        int | None, typer.Option(help="CPU threads.", rich_help_panel=_OPTIMIZE, show_default="torch's choice")
    ] = None,
    save_every: Annotated[
        int | None,
        typer.Option(
            help="Save a checkpoint every N steps; the first and the last always.",
            rich_help_panel=_SAVE,
            show_default="100",
        ),
    ] = None,
    save_schedule: Annotated[
        str | None,
        typer.Option(
            help="every, or log: steps 1, 2, 4 … and then every N.", rich_help_panel=_SAVE, show_default="every"
        ),
    ] = None,
    resume_every: Annotated[
        int | None,
        typer.Option(
            help="Save a resume point (with optimizer state) every N steps.", rich_help_panel=_SAVE, show_default="250"
        ),
    ] = None,
    keep_resume: Annotated[
        int | None,
        typer.Option(
            help="How many resume points to keep, spread over the run.", rich_help_panel=_SAVE, show_default="4"
        ),
    ] = None,
    tensorboard: Annotated[
        bool, typer.Option("--tensorboard", help="Also write TensorBoard events.", rich_help_panel=_SAVE)
    ] = False,
    wandb: Annotated[
        str | None,
        typer.Option(help="Also log to this Weights & Biases project.", rich_help_panel=_SAVE, show_default=False),
    ] = None,
    assign: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="Any field of the config: --set model.d_model=128. Repeatable; --fields lists them.",
            rich_help_panel=_RUN,
            show_default=False,
        ),
    ] = None,
    resume: Annotated[
        Path | None, typer.Option(help="Continue this run where it stopped.", rich_help_panel=_RUN, show_default=False)
    ] = None,
    name: Annotated[
        str | None, typer.Option(help="Name of the run.", rich_help_panel=_RUN, show_default="MIXER-TASK-NUMBER")
    ] = None,
    runs: Annotated[
        Path | None,
        typer.Option(
            help="Folder that holds the runs.", rich_help_panel=_RUN, show_default="$CIRCUITSCOPE_RUNS or runs"
        ),
    ] = None,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Check everything, print the resolved config and stop.", rich_help_panel=_RUN),
    ] = False,
    fields: Annotated[
        bool,
        typer.Option(
            "--fields",
            help="List every field of the config with type, default, unit and meaning, and stop. A word after it picks"
            " some: --fields warmup, --fields task.mqar, --fields mamba.",
            rich_help_panel=_RUN,
        ),
    ] = False,
) -> None:
    """Train a model on a recall task and save checkpoints densely.

    With no options: a 2-layer attention model learns multi-query associative recall, in a minute or
    two on 2 CPU cores. The run lands in runs/NAME with its config, metrics and checkpoints; a run that
    was stopped or killed continues with --resume to the same bits.

    --set sets any field of the config; `circuitscope train --fields` lists them with their meaning.

    torchrun --nproc-per-node=2 -m circuitscope train … trains one run in two processes, each on its
    own GPU or on CPU threads of its own; docs/training.md says how.
    """
    flags = {
        "recipe": recipe,
        "model.preset": model,
        "model.mixers": mixers,
        "model.n_layers": layers,
        "model.d_model": d_model,
        "model.mixers.*.n_heads": heads,
        "model.positions": positions,
        "task.name": task,
        "task.length": length,
        "task.pairs": pairs,
        "task.vocab_size": vocab_size,
        "task.examples": examples,
        "train.steps": steps,
        "train.batch_size": batch_size,
        "train.lr": lr,
        "train.weight_decay": weight_decay,
        "train.warmup": warmup,
        "train.schedule": schedule,
        "train.clip": clip,
        "train.seed": seed,
        "train.eval_every": eval_every,
        "train.early_stop": early_stop,
        "train.device": device,
        "train.precision": precision,
        "train.deterministic": deterministic or None,
        "train.threads": threads,
        "train.save_every": save_every,
        "train.save_schedule": save_schedule,
        "train.resume_every": resume_every,
        "train.keep_resume": keep_resume,
        "train.tensorboard": tensorboard or None,
        "train.wandb": wandb,
    }
    if model is not None and mixers is not None:
        raise UserError("give --model or --mixers, not both")
    given: dict[str, Any] = {path: value for path, value in flags.items() if value is not None}
    if fields:
        if given or assign or resume or name or runs or dry_run:
            raise typer.BadParameter("--fields takes no other option, only a word that picks some of the fields")
        _print_fields("" if config is None else str(config))
        return
    _run(config, given, assign or [], resume, name, runs, dry_run)


def _print_fields(word: str) -> None:
    """The fields that a word stands for, or all of them: a table for each section, narrow enough for any terminal."""
    from circuitscope.cli.table import print_table
    from circuitscope.config.fields import find, parts, recipe_parts

    for number, part in enumerate(find(word) if word else [*parts(), *recipe_parts()]):
        print("\n" * bool(number) + f"{part.name}: {part.about}\nset by: circuitscope train {part.usage}")
        if part.fields:
            lines = [
                (row.field if first else "", line)
                for row in part.fields
                for first, line in zip((True, False), row.in_words().split("\n"), strict=False)
            ]
            recipe = part.name.startswith("recipe.")
            print_table(("field", "value" if recipe else "meaning, type, unit, default"), lines)
        else:
            print("no options")


def _run(
    path: Path | None,
    given: dict[str, Any],
    assign: list[str],
    resumed: Path | None,
    name: str | None,
    root: Path | None,
    dry_run: bool,
) -> None:
    import sys

    if resumed is not None and (path or given or assign or name or root or dry_run):
        raise UserError(
            "--resume continues a run as it was configured and takes no other option;"
            " to change something start a new run"
        )
    config, recipe = (None, "") if resumed is not None else _config(path, given, assign)
    if dry_run and config is not None:
        from circuitscope.runs.run import check_free
        from circuitscope.training.feasible import check_feasible

        check_free(name, root)
        check_feasible(config)
        print(f"# {recipe}\n" * bool(recipe) + config.dump(), end="")
        return
    from circuitscope import api  # after the config is known to be good: this brings TransformerLens, seconds of it
    from circuitscope.progress import watching
    from circuitscope.training.ranks import leads

    progress = watching(sys.stdout, stays=True, heading=recipe)
    if resumed is not None:
        run = api.resume(resumed, progress=progress)
    else:
        run = api.train(config, root=root, name=name, progress=progress)
    if leads():
        _summary(run)


def _config(path: Path | None, given: dict[str, Any], assign: list[str]) -> tuple["RunConfig", str]:
    """The config that a file and flags make, checked, and the recipe that it took, in a few words."""
    from circuitscope.config import RunConfig, override, parse_assignments, read_yaml, recipes
    from circuitscope.errors import UserError

    for path_to in ("task.examples", "train.clip"):
        if given.get(path_to) == "none":
            given[path_to] = None
    assigned = parse_assignments(assign)
    for path_given in given.keys() & assigned.keys():
        raise UserError(f"'{path_given}' is given twice: by --set and by an option of its own; give it once")
    changes = given | assigned
    config = RunConfig.load(path, changes) if path else RunConfig.parse(override({}, changes))
    whole = {field: value for field, value in changes.items() if not field.startswith("model.mixers.")}
    return config, recipes.words(override(read_yaml(path) if path else {}, whole))


def _summary(run: Any) -> None:
    """Where the run is and how it did."""
    rows = run.metrics
    task = run.config.task
    held_out = rows[rows.split == "validation"] if len(rows) else rows
    if not len(held_out):  # metrics.jsonl was damaged or taken away
        print(f"{len(run.steps)} checkpoints")
        print(f"run: {run.path}")
        return
    last = held_out.iloc[-1]
    when = ""
    if task.metric == "accuracy" and len(reached := held_out[held_out.accuracy >= 0.99]):
        when = f", 99% first at step {int(reached.iloc[0].step)}"
    print(f"validation {' '.join(task.shown(last[task.metric]).split())} at step {int(last.step)}{when}")
    if run.status.get("looks"):
        print(escaped(run.status.get("message", "")))
    print(f"trained in {last.get('seconds', 0):.0f} s, {len(run.steps)} checkpoints")
    print(f"run: {escaped(run.path)}")
