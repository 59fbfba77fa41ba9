"""`circuitscope doctor`: the device and the packages that compute on this machine, and why."""


def doctor() -> None:
    """Show what this machine computes with: device, threads, the package for each kernel, and why not another."""
    import platform
    from importlib import metadata

    import torch
    from rich.console import Console
    from rich.table import Table

    from circuitscope.kernels.backends import KERNELS, who_serves
    from circuitscope.training.device import choose_device

    console = Console(highlight=False)
    device = choose_device("auto")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    console.print(
        f"python {platform.python_version()}, torch {torch.__version__}, CPU threads: {torch.get_num_threads()}"
    )
    console.print(f"device: {device.type}, where training computes in {str(dtype).removeprefix('torch.')} by default")
    table = Table("kernel", "computed by", "why not by another", box=None, padding=(0, 2, 0, 0))
    for kernel in KERNELS:
        name, refusals = who_serves(kernel, device, dtype)
        table.add_row(kernel, name, "; ".join(refusals))
    console.print(table)
    packages = Table("optional package", "version", box=None, padding=(0, 2, 0, 0))
    for name in ("mamba-ssm", "flash-attn", "flash-linear-attention", "ray", "tensorboard", "wandb"):
        try:
            packages.add_row(name, metadata.version(name))
        except metadata.PackageNotFoundError:
            packages.add_row(name, "not installed")
    console.print(packages)
