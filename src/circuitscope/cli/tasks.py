"""`circuitscope tasks`: what there is to train on, and what it looks like."""

from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.text import Text

    from circuitscope.tasks import Batch, Task

app = typer.Typer(no_args_is_help=False, help="List the tasks, or show an example of one.")

_COLOURS = {
    "KEY": "bold cyan",
    "VALUE": "bold yellow",
    "QUERY": "bold magenta",
    "FILLER": "dim",
    "START": "green",
    "BLOCK": "cyan",
}


@app.callback(invoke_without_command=True)
def list_tasks(context: typer.Context) -> None:
    """List the tasks."""
    if context.invoked_subcommand is not None:
        return
    from rich.console import Console
    from rich.table import Table

    from circuitscope import tasks

    table = Table("task", "what it is", "options", box=None, padding=(0, 2, 0, 0))
    for name in tasks.names():
        cls = tasks.task_class(name)
        fields = [f for f in cls.model_fields if f not in ("name", "version")]
        table.add_row(name, (cls.__doc__ or "").splitlines()[0], ", ".join(fields))
    Console().print(table)
    print("show one with: circuitscope tasks show NAME")


@app.command()
def show(
    name: Annotated[str, typer.Argument(help="Name of the task.")],
    step: Annotated[int, typer.Option(help="Which batch.")] = 0,
    count: Annotated[int, typer.Option("--examples", help="How many examples.", min=1)] = 2,
    length: Annotated[
        int | None, typer.Option(help="Sequence length; small unless told, to fit a screen.", show_default=False)
    ] = None,
    pairs: Annotated[int | None, typer.Option(help="Key-value pairs.", show_default=False)] = None,
    assign: Annotated[
        list[str] | None, typer.Option("--set", help="Any option of the task: --set filler=zero.", show_default=False)
    ] = None,
) -> None:
    """Print a small example of a task, its roles in colour and its labels below."""
    from rich.console import Console

    from circuitscope import tasks
    from circuitscope.config import parse_assignments

    small = {
        "mqar": {"length": 24, "pairs": 3, "vocab_size": 64},
        "ar": {"length": 16, "pairs": 3},
        "induction": {"block": 6, "repeats": 3, "vocab_size": 64},
    }
    options = small.get(tasks.task_class(name).model_fields["name"].default, {})
    given = {"length": length, "pairs": pairs}
    options = options | {k: v for k, v in given.items() if v is not None} | parse_assignments(assign or [])
    task = tasks.task(name, **options)
    batch = task.batch(step, size=count)
    console = Console(highlight=False)
    console.print(f"[bold]{name}[/bold]: {(type(task).__doc__ or '').splitlines()[0]}")
    for row in range(count):
        console.print(_example(batch, task, row))
    console.print(_legend(batch))


def _example(batch: "Batch", task: "Task", row: int) -> "Text":
    """Tokens over labels; a dot where there is no label."""
    from rich.text import Text

    from circuitscope.tasks import NO_LABEL, Role

    width = len(str(task.vocab_size - 1)) + 1
    tokens, labels = Text("tokens"), Text("labels")
    for token, label, role in zip(batch.tokens[row], batch.labels[row], batch.layout.roles[row], strict=True):
        tokens.append(f"{int(token):>{width}}", style=_COLOURS[Role(int(role)).name])
        labels.append(
            f"{'·' if label == NO_LABEL else int(label):>{width}}", style="dim" if label == NO_LABEL else "bold yellow"
        )
    return Text("\n").join([Text(""), tokens, labels])


def _legend(batch: "Batch") -> "Text":
    from rich.text import Text

    from circuitscope.tasks import Role

    line = Text("\n")
    for role in sorted(set(batch.layout.roles.flatten().tolist())):
        line.append(f"{Role(role).name.lower()}  ", style=_COLOURS[Role(role).name])
    line.append("label", style="bold yellow")
    return line
