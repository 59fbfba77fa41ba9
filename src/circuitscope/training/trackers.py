"""Optional copies of metrics.jsonl in TensorBoard and Weights & Biases, made only if the config asks for them."""

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from circuitscope.config import RunConfig
from circuitscope.errors import UserError
from circuitscope.runs.run import Run

Track = Callable[[dict[str, Any]], None]


class Trackers:
    """The trackers that a config asks for. Each receives every row of metrics and is closed at the end."""

    def __init__(self, config: RunConfig, run: Run):
        self.config, self.run = config, run
        self.told: list[Track] = []

    def __enter__(self) -> "Trackers":
        with ExitStack() as closing:
            if self.config.train.tensorboard:
                self.told.append(_tensorboard(self.run, closing))
            if self.config.train.wandb is not None:
                self.told.append(_wandb(self.config, self.run, self.config.train.wandb, closing))
            self._closing = closing.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._closing.close()

    def track(self, row: dict[str, Any]) -> None:
        for track in self.told:
            track(row)


def check_trackers(config: RunConfig) -> None:
    """Refuses a config, before there is a run, if a tracker's package is missing."""
    if config.train.tensorboard:
        try:
            import torch.utils.tensorboard  # noqa: F401
        except Exception:
            raise UserError("train.tensorboard needs the package tensorboard: pip install tensorboard") from None
    if config.train.wandb is not None:
        try:
            import wandb  # noqa: F401
        except Exception:
            raise UserError("train.wandb needs the package wandb: pip install wandb") from None


def _numbers(row: dict[str, Any]) -> dict[str, float]:
    """What a row says of the loss, the metric, the rate and the gradients, under names such as `validation/loss`."""
    left_out = ("step", "split", "tokens", "seconds")
    return {f"{row['split']}/{k}": v for k, v in row.items() if k not in left_out and not isinstance(v, list)}


def _tensorboard(run: Run, closing: ExitStack) -> Track:
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(str(run.path / "tensorboard"))  # type: ignore[no-untyped-call]
    closing.callback(writer.close)  # type: ignore[no-untyped-call]

    def track(row: dict[str, Any]) -> None:
        for name, value in _numbers(row).items():
            writer.add_scalar(name, value, row["step"])  # type: ignore[no-untyped-call]
        writer.flush()  # type: ignore[no-untyped-call]

    return track


def _wandb(config: RunConfig, run: Run, project: str, closing: ExitStack) -> Track:
    """A run of Weights & Biases under a random id, which our run keeps so that resuming finds it again.

    The folder's name is not enough, because several machines may use the same one. Older runs have no id and use it.
    """
    import wandb

    session = wandb.init(
        project=project,
        name=run.name,
        id=run.environment.get("wandb_id", run.name),
        resume="allow",
        config=config.model_dump(mode="json"),
        dir=run.path,
        reinit="create_new",
    )
    closing.callback(session.finish)

    def track(row: dict[str, Any]) -> None:
        session.log(_numbers(row), step=row["step"])

    return track
