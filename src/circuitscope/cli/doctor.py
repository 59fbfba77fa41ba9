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


_GPU_PACKAGES = ("mamba-ssm", "flash-attn", "flash-linear-attention")


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

    from circuitscope.devices import choose_device
    from circuitscope.kernels.backends import KERNELS, who_serves
    from circuitscope.training.device import precision_on
    from circuitscope.training.matrix_unit import in_words

    console = Console(highlight=False)
    chosen = choose_device(device)
    precision = precision_on(chosen, "auto")
    dtype = torch.bfloat16 if precision == "bfloat16" else torch.float32
    console.print(_versions(chosen), soft_wrap=True)
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
    """What computes here: circuitscope, python, torch, Triton, the threads, and the GPU if there is one."""
    import platform

    import torch

    from circuitscope import __version__

    gpu = ""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        capability = ".".join(map(str, torch.cuda.get_device_capability(device)))
        gpu = f", {torch.cuda.get_device_name(device)} (capability {capability})"
        gpu += f" with {free / 1e9:.0f} of {total / 1e9:.0f} GB free"
    parts = [f"circuitscope {__version__}", f"python {platform.python_version()}", f"torch {torch.__version__}"]
    return f"{', '.join(parts)}, triton {_installed('triton')}, CPU threads: {torch.get_num_threads()}{gpu}"


def _installed(name: str) -> str:
    """The version of a package, that it is not installed, or that only half of it is."""
    from importlib import metadata, util

    try:
        version = metadata.version(name)
    except Exception:  # a broken installation fails in many ways
        version = None
    try:
        found = util.find_spec(_PACKAGES.get(name, name)) is not None
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
        f"{str(dtype).removeprefix('torch.')}, {most:.0e} for an output and {of_gradients:.0e} for a gradient"
        for dtype, (most, of_gradients) in ALLOWED.items()
    )
    judged = sum(found.right is not None for found in findings)
    packages = ", ".join(f"{name} {_installed(name)}" for name in _GPU_PACKAGES)
    print(
        f"\n{_versions(device)}\n{packages}\n\n{as_markdown(findings)}\n\n"
        f"{judged - wrong} of {judged} checks are right; the {len(findings) - judged} rows without a verdict only say"
        " how long something takes.\n"
        "A kernel is held against a plain reference in float64. How far it is off is a share of the largest number that"
        " should come out, and in brackets stands the input whose gradient is worst. Allowed are, in"
        f" {bounds}.\n"
        f"Checked in {time.monotonic() - began:.0f} s.",
        flush=True,
    )
    if wrong:
        raise RunFailed(f"{wrong} of {len(findings)} checks went wrong; please open an issue with the table above")
