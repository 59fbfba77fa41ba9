"""`circuitscope doctor`: the device and the packages that compute on this machine, and why; and a check of both."""

from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    import torch

_PACKAGES = {  # the name to install, and the module to import
    "mamba-ssm": "mamba_ssm",
    "flash-attn": "flash_attn",
    "flash-linear-attention": "fla",
    "ray": "ray",
    "tensorboard": "tensorboard",
    "wandb": "wandb",
}


def doctor(
    check: Annotated[
        bool,
        typer.Option(
            "--check",
            help="Also check it, in about a minute: every kernel against its reference, a run that is killed and"
            " resumed, and a few speeds. It ends in a table to paste into an issue.",
        ),
    ] = False,
    device: Annotated[
        str, typer.Option(help="The device to look at: auto, cpu, cuda or mps.", show_default="auto")
    ] = "auto",
) -> None:
    """Show what this machine computes with: device, threads, the package for each kernel, and why not another."""
    import torch
    from rich.console import Console
    from rich.table import Table

    from circuitscope.kernels.backends import KERNELS, who_serves
    from circuitscope.training.device import choose_device, precision_on
    from circuitscope.training.matrix_unit import in_words

    console = Console(highlight=False)
    chosen = choose_device(device)
    precision = precision_on(chosen, "auto")
    dtype = torch.bfloat16 if precision == "bfloat16" else torch.float32
    console.print(_versions(chosen))
    console.print(f"device: {chosen.type}, where training computes in {precision} by default")
    if chosen.type == "cpu" and (said := in_words()):
        console.print(said)
    table = Table("kernel", "computed by", "why not by another", box=None, padding=(0, 2, 0, 0))
    for kernel in KERNELS:
        name, refusals = who_serves(kernel, chosen, dtype)
        table.add_row(kernel, name, "; ".join(refusals))
    console.print(table)
    packages = Table("optional package", "version", box=None, padding=(0, 2, 0, 0))
    for name in _PACKAGES:
        packages.add_row(name, _installed(name))
    console.print(packages)
    if check:
        _check(chosen)


def _versions(device: "torch.device") -> str:
    """What computes here: python, torch, the threads, and the GPU if there is one."""
    import platform

    import torch

    gpu = ""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        gpu = f", {torch.cuda.get_device_name(device)} with {free / 1e9:.0f} of {total / 1e9:.0f} GB free"
    version = f"torch {torch.__version__}"
    return f"python {platform.python_version()}, {version}, CPU threads: {torch.get_num_threads()}{gpu}"


def _installed(name: str) -> str:
    """The version of a package, that it is not installed, or that only half of it is."""
    from importlib import metadata, util

    try:
        version = metadata.version(name)
    except Exception:  # a broken installation fails in many ways
        version = None
    try:
        found = util.find_spec(_PACKAGES[name]) is not None
    except Exception:
        found = False
    if version is not None and found:
        return str(version)
    if version is None and not found:
        return "not installed"
    half = "files without a version" if version is None else f"version {version} without files to import"
    return f"half installed: {half}; install it again"


def _check(device: "torch.device") -> None:
    """Prints each finding as it is made to stderr, and all of them as one table at the end."""
    import sys
    import time
    from itertools import chain

    from circuitscope.checkup.findings import as_markdown
    from circuitscope.checkup.kernels import ALLOWED, check_kernels
    from circuitscope.checkup.training import check_speed, check_training
    from circuitscope.errors import RunFailed

    began, findings = time.monotonic(), []
    for found in chain(check_kernels(device), check_training(device), check_speed(device)):
        findings.append(found)
        if sys.stderr.isatty():
            print(f"{found.what}: {found.result}", file=sys.stderr)
    wrong = sum(found.right is False for found in findings)
    bounds = "; ".join(
        f"{str(dtype).removeprefix('torch.')} at most {most:.0e}, gradients {of_gradients:.0e}"
        for dtype, (most, of_gradients) in ALLOWED.items()
    )
    print(
        f"\n{_versions(device)}\n\n{as_markdown(findings)}\n\n"
        f"Errors of kernels are shares of the largest number that should come out: {bounds}.\n"
        f"Checked in {time.monotonic() - began:.0f} s.",
        flush=True,
    )
    if wrong:
        raise RunFailed(f"{wrong} of {len(findings)} checks went wrong; please open an issue with the table above")
