"""Optional mirrors of metrics.jsonl: TensorBoard and Weights & Biases, only when asked for."""

from collections.abc import Callable
from typing import Any

from circuitscope.config import RunConfig
from circuitscope.errors import UserError
from circuitscope.runs.run import Run

Tracker = Callable[[dict[str, Any]], None]


def trackers_for(config: RunConfig, run: Run) -> list[Tracker]:
    """Functions that each take a row of metrics."""
    wanted = []
    if config.train.tensorboard:
        wanted.append(_tensorboard(run))
    if config.train.wandb is not None:
        wanted.append(_wandb(config, run, config.train.wandb))
    return wanted


def check_trackers(config: RunConfig) -> None:
    """Fails before a run is made if an asked-for package is missing."""
    if config.train.tensorboard:
        try:
            import torch.utils.tensorboard  # noqa: F401
        except Exception:
            raise UserError("train.tensorboard needs the package tensorboard: pip install tensorboard") from None


def _tensorboard(run: Run) -> Tracker:
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(str(run.path / "tensorboard"))  # type: ignore[no-untyped-call]

    def track(row: dict[str, Any]) -> None:
        for field in ("loss", "accuracy", "lr"):
            writer.add_scalar(f"{row['split']}/{field}", row[field], row["step"])  # type: ignore[no-untyped-call]
        writer.flush()  # type: ignore[no-untyped-call]

    return track


def _wandb(config: RunConfig, run: Run, project: str) -> Tracker:
    import wandb

    session = wandb.init(
        project=project, name=run.name, id=run.name, resume="allow", config=config.model_dump(mode="json"), dir=run.path
    )

    def track(row: dict[str, Any]) -> None:
        session.log({f"{row['split']}/{f}": row[f] for f in ("loss", "accuracy", "lr")}, step=row["step"])

    return track
