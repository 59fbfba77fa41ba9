"""`circuitscope doctor`: which kernels are in use here, and why."""


def doctor() -> None:
    """Say what this machine computes with: devices, threads, kernels and the reason for each."""
    import platform
    from importlib import metadata

    import torch
    from rich.console import Console
    from rich.table import Table

    from circuitscope.kernels.report import kernel_paths
    from circuitscope.training.device import choose_device

    console = Console(highlight=False)
    device = choose_device("auto")
    console.print(
        f"python {platform.python_version()}, torch {torch.__version__}, {torch.get_num_threads()} CPU threads"
    )
    console.print(f"device: {device.type}")
    table = Table("kernel", "path", "why", box=None, padding=(0, 2, 0, 0))
    for kernel, path, reason in kernel_paths(device):
        table.add_row(kernel, path, reason)
    console.print(table)
    packages = Table("optional package", "version", box=None, padding=(0, 2, 0, 0))
    for name in ("mamba-ssm", "flash-attn", "flash-linear-attention", "ray", "tensorboard", "wandb"):
        try:
            packages.add_row(name, metadata.version(name))
        except metadata.PackageNotFoundError:
            packages.add_row(name, "not installed")
    console.print(packages)
