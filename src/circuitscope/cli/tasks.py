"""`circuitscope tasks`: the tasks that a model can be trained on, and examples of them."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from circuitscope.cli.table import print_table
from circuitscope.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from rich.text import Text
    from torch import Tensor

    from circuitscope.tasks import Batch, Role, Task

app = typer.Typer(no_args_is_help=False, help="List the tasks, show examples of one, or export them.")


_Assigned = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Any option of the task: --set filler=zero.", show_default=False),
]
_LONGEST = 100_000  # tokens in an example that is printed


@app.callback(invoke_without_command=True)
def list_tasks(context: typer.Context) -> None:
    """List the tasks."""
    if context.invoked_subcommand is not None:
        return
    from circuitscope.tasks import TASKS

    rows = []
    for name in sorted(TASKS):
        cls = TASKS[name]
        fields = [field for field in cls.model_fields if field not in ("name", "version")]
        rows.append((name, _about(cls), ", ".join(fields)))
    print_table(("task", "what it is", "options"), rows)
    print("show one with: circuitscope tasks show NAME; its options: circuitscope train --fields task.NAME")


@app.command()
def show(
    name: Annotated[str, typer.Argument(help="Name of the task.")],
    step: Annotated[int, typer.Option(help="Number of the batch.")] = 0,
    count: Annotated[int, typer.Option("--examples", help="How many examples.", min=1)] = 2,
    length: Annotated[
        int | None, typer.Option(help="Sequence length.", show_default="short enough for a screen")
    ] = None,
    pairs: Annotated[int | None, typer.Option(help="Key-value pairs.", show_default="few enough for a screen")] = None,
    assign: _Assigned = None,
) -> None:
    """Print small examples of a task, with roles in colour and the labels below."""
    from rich.console import Console

    from circuitscope import tasks
    from circuitscope.config import parse_assignments
    from circuitscope.tasks import Role

    cls = tasks.TASKS[name]
    given = {key: value for key, value in {"length": length, "pairs": pairs}.items() if value is not None}
    shown = tasks.task(name, **(dict(cls.small) | given | parse_assignments(assign or [])))
    if shown.max_length > _LONGEST:
        raise UserError(f"examples of more than {_LONGEST:,} tokens are not printed, got {shown.max_length:,}")
    batch = shown.batch(step, size=count)
    key, numbers = shown.address(step, "train", count)
    console = Console(highlight=False)
    console.print(f"[bold]{name}[/bold]: {_about(cls)}")
    for row in range(count):
        console.print()
        for line in shown.at_step(step, "train").function(key, int(numbers[row])):
            console.print(line, markup=False, soft_wrap=True)
        console.print(_example(shown, batch, row))
        for line in shown.remarks(batch, row):
            console.print(line, markup=False, soft_wrap=True)
    there = {Role(number) for number in batch.layout.roles.unique().tolist()}
    console.print(_legend([*cls.roles, *sorted(there - set(cls.roles))], cls.about_roles))


@app.command()
def export(
    name: Annotated[str, typer.Argument(help="Name of the task.")],
    out: Annotated[Path, typer.Argument(help="Parquet file to write.")],
    count: Annotated[int, typer.Option("--examples", help="How many examples.", min=1)] = 3000,
    split: Annotated[str, typer.Option(help="train, validation or test.")] = "test",
    seed: Annotated[int, typer.Option(help="Seed of the examples.")] = 0,
    assign: _Assigned = None,
) -> None:
    """Write examples of a task to a Parquet file: tokens or vectors, labels and roles, with a digest.

    `circuitscope tasks check FILE` compares a file with its digest.
    """
    from typing import get_args

    from circuitscope import tasks
    from circuitscope.config import parse_assignments
    from circuitscope.errors import escaped, unknown
    from circuitscope.tasks.export import export as write

    task = tasks.task(name, **parse_assignments(assign or []))
    if split not in get_args(tasks.Split):
        raise unknown("split", split, get_args(tasks.Split))
    found = write(task, out, examples=count, split=split, seed=seed)  # type: ignore[arg-type]
    print(f"{escaped(out)}: {count:,} examples of {name}, split {escaped(split)}, seed {seed}, digest {found}")


@app.command()
def check(file: Annotated[Path, typer.Argument(help="File that export has written.")]) -> None:
    """Check that an exported file still holds the examples that were written to it."""
    from circuitscope.errors import escaped
    from circuitscope.tasks.export import check as checked

    about = checked(file)
    print(escaped(f"{file}: {about['examples']:,} examples of {about['task']}, digest {about['digest']}, as written"))


def _about(cls: type) -> str:
    return (cls.__doc__ or "").partition("\n")[0]


def _example(task: "Task", batch: "Batch", row: int) -> "Text":
    """What the example is, in a form that a person can check by eye."""
    if batch.inputs.is_floating_point():
        return _of_vectors(batch, row)
    return _of_tokens(batch, row, getattr(task, "spelled", str))


def _of_vectors(batch: "Batch", row: int) -> "Text":
    """One position per line: role, vector, and the label after an arrow; above them the weight vector, if any."""
    from rich.text import Text

    from circuitscope.tasks import Role

    lines = []
    if batch.weights is not None:
        lines.append(Text(f"w        {_numbers(batch.weights[row])}"))
    labelled = batch.has_label()[row]
    for i, (vector, role) in enumerate(zip(batch.inputs[row], batch.layout.roles[row], strict=True)):
        line = Text(f"{Role(int(role)).name:8} {_numbers(vector)}", style=Role(int(role)).colour)
        lines.append(line.append(f"  → {_numbers(batch.labels[row, i])}" if labelled[i] else "", style="bold"))
    return Text("\n").join(lines)


def _numbers(vector: "Tensor") -> str:
    return " ".join(f"{float(x):6.2f}" for x in vector)


def _of_tokens(batch: "Batch", row: int, spelled: "Callable[[int], str]") -> "Text":
    """Tokens above their labels, with a dot where there is no label."""
    from rich.text import Text

    from circuitscope.tasks import NO_LABEL, Role

    every = {*batch.tokens.flatten().tolist(), *batch.labels.flatten().tolist()} - {NO_LABEL}
    width = max(len(spelled(token)) for token in every) + 1
    tokens, labels = Text("tokens"), Text("labels")
    for token, label, role in zip(batch.tokens[row], batch.labels[row], batch.layout.roles[row], strict=True):
        tokens.append(f"{spelled(int(token)):>{width}}", style=Role(int(role)).colour)
        blank = label == NO_LABEL
        labels.append(f"{'·' if blank else spelled(int(label)):>{width}}", style="dim" if blank else "bold")
    return Text("\n").join([tokens, labels])


def _legend(roles: "Sequence[Role]", about: "Mapping[Role, str]") -> "Text":
    from rich.text import Text

    width = max(len(role.name) for role in roles)
    lines = [Text("")]
    for role in roles:
        lines.append(
            Text(f"{role.name:{width}}  ", style=role.colour).append(about.get(role, role.about), style="default")
        )
    lines.append(
        Text(f"{'label':{width}}  ", style="bold").append("the answer that is expected there", style="default")
    )
    return Text("\n").join(lines)
