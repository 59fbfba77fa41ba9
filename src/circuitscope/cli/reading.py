"""The option of every command that reads models: where it computes."""

from typing import Annotated

import typer

OnDevice = Annotated[
    str,
    typer.Option(
        "--device",
        help="Where to compute: auto, cpu, cuda or mps. Devices differ by rounding.",
        show_default="auto: cuda if there is one, otherwise cpu",
    ),
]
