"""`circuitscope models`: the models that can be trained, their sizes, and the names of their hooks."""

from typing import Annotated, Any

import typer

app = typer.Typer(no_args_is_help=False, help="List the models with their sizes, or the hooks of one.")

_WIDE = 112  # columns in which sizes and descriptions stand side by side
_FROM_INPUT = ("batch", "pos", "dest", "src")  # axes whose size the input decides, not the model


@app.callback(invoke_without_command=True)
def list_models(
    context: typer.Context,
    d_model: Annotated[int, typer.Option(help="Width at which to count.")] = 64,
    layers: Annotated[int | None, typer.Option(help="Number of layers.", show_default="the model's own")] = None,
    length: Annotated[int, typer.Option(help="Sequence length at which to count.")] = 64,
) -> None:
    """List the models: parameters, recurrent state in floats, training FLOPs per token, and what they reach."""
    if context.invoked_subcommand is not None:
        return
    from rich.console import Console
    from rich.table import Table

    from circuitscope import models
    from circuitscope.config.reached import in_words
    from circuitscope.errors import UserError
    from circuitscope.models.accounting import parameters, state_size, training_flops_per_token, without_weights
    from circuitscope.models.presets import PRESETS

    console = Console()
    table, told = (Table(box=None, padding=(0, 2, 0, 0)) for _ in range(2))
    for one in (table, told):
        one.add_column("model", no_wrap=True)
    for column in ("parameters", "state", "MFLOPs"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("solves (64, 4)", no_wrap=True)
    beside = console.width >= _WIDE
    (table if beside else told).add_column("what it is")

    def add(name: str, *sizes: str, about: str) -> None:
        table.add_row(name, *sizes, in_words(name), *([about] if beside else []))
        if not beside:
            told.add_row(name, about)

    impossible: list[UserError] = []
    for name, preset in PRESETS.items():
        options = {} if layers is None else {"n_layers": layers}
        try:
            with without_weights():
                model = models.model(name, d_model=d_model, max_length=length, **options)
        except UserError as error:
            impossible.append(error)
            add(name, "–", "–", "–", about=f"not possible here: {error}")
            continue
        state = state_size(model)
        add(
            name,
            f"{parameters(model).total:,}",
            "grows" if state is None else f"{state:,}",
            f"{training_flops_per_token(model, length) / 1e6:.2f}",
            about=preset.about,
        )
    if len(impossible) == len(PRESETS):
        raise impossible[0]
    console.print(table)
    if not beside:
        print()
        console.print(told)
    print()
    print(f"counted at width {d_model}, length {length}, vocabulary 8,192; state: floats per sequence, or 'grows'")
    print("if it grows with the length; MFLOPs: millions of FLOPs per token, forward and backward")
    print("solves (64, 4): lowest test accuracy over the seeds of studies/recipes with the model's own")
    print("recipe on MQAR (64, 4), and minutes on one thread; untuned: with the recipe of a relative")
    print("hooks of a model: circuitscope models hooks NAME; to train it: circuitscope train --model NAME")


@app.command()
def hooks(
    name: Annotated[str, typer.Argument(help="Name of the model.")],
    d_model: Annotated[int, typer.Option(help="Width.")] = 64,
) -> None:
    """Print the hook names of a model and the shapes of their activations."""
    import torch
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from circuitscope import models
    from circuitscope.memory import check_fits
    from circuitscope.models.accounting import parameters, without_weights

    with without_weights():
        size = 4 * parameters(models.model(name, d_model=d_model)).total
    check_fits(size, torch.device("cpu"), f"a model of width {d_model:,}", "use a smaller --d-model")
    model = models.model(name, d_model=d_model).eval()
    tokens = torch.zeros(1, 2, dtype=torch.long)
    with torch.no_grad():
        _, cache = model.run_with_cache(tokens, names_filter=lambda hook: True)
    table = Table("hook", "shape", "", box=None, padding=(0, 2, 0, 0))
    for hook, point in model.hook_dict.items():
        if hook in cache.cache_dict:
            shape = _shape(point, cache.cache_dict[hook].shape)
            table.add_row(hook, Text(shape), "on demand" if hook in model.on_demand else "")
    Console(highlight=False).print(table)


def _shape(point: Any, sizes: tuple[int, ...]) -> str:
    """The names of a hook point's axes, with the sizes that the model decides: [batch, pos, channel 64, state 16]."""
    named = [axis if axis in _FROM_INPUT else f"{axis} {size}" for axis, size in zip(point.axes, sizes, strict=True)]
    return f"[{', '.join(named)}]"
