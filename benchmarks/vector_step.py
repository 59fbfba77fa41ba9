"""(n) Our training step on vectors: attention against plain PyTorch, and Mamba against itself with mambapy's scan."""

from collections.abc import Callable
from contextlib import ExitStack
from itertools import cycle
from unittest.mock import patch

import torch

from benchmarks.plain_model import MaterializedAttention, PlainSequenceModel
from benchmarks.rows import Row, Section, alternate, faster
from benchmarks.scan import by_mambapy
from benchmarks.workload import take_step, trainer_of
from circuitscope.config import RunConfig
from circuitscope.mixers import mamba
from circuitscope.training.trainer import Trainer

_POINTS, _BATCH = 41, 64
_SIZE = f"linear regression, {_POINTS} points, 2 layers, d 64, batch {_BATCH}"
_OURS = "ours is Trainer.update with batch generation, clipping and checks for NaN"
_PLAIN = (
    f"{_OURS}. The other side is plain PyTorch with the same weights: no hooks, answers at every position, attention"
    " with its pattern in memory, the squared error where there is a label, AdamW(fused=False), no clipping, ready-made"
    " batches. Both sides run in one process, so the other side also benefits from our malloc settings. First it was"
    " checked that losses on equal weights agree to 1e-4 of their size"
)
_MAMBAPY = (
    f"{_OURS}. The other side is the same with MambaBlock.selective_scan of mambapy, unchanged, in place of our scan."
    " First it was checked that losses on equal weights agree to 1e-4 of their size"
)


def measure(quick: bool) -> Section:
    rounds, calls = (1, 1) if quick else (20, 3)
    return Section([_attention(rounds, calls), _mamba(rounds, calls)])


def _config(preset: str) -> RunConfig:
    """The paper's sizes of the task: 20 coordinates."""
    sizes = {"dims": 20, "points": _POINTS, "n_layers": 2, "d_model": 64, "batch_size": _BATCH}
    return RunConfig.build(preset, "linear_regression", recipe="plain", steps=10_000, device="cpu", **sizes)


def _attention(rounds: int, calls: int) -> Row:
    with trainer_of(_config("attention")) as trainer:
        plain = PlainSequenceModel(trainer.model, MaterializedAttention(trainer.task.max_length)).train()
        batch = trainer.task.batch(0, size=_BATCH, seed=trainer.seed)
        with torch.no_grad():
            ours = trainer.task.loss(trainer.model, batch)[0].item()
            _check_same(ours, _squared_error(plain(batch.inputs), batch.labels).item())
        mine, other = alternate([lambda: take_step(trainer), _plain_step(trainer, plain)], rounds, calls)
    return faster(f"training step, attention, {_SIZE}", mine, other, 1.0, _PLAIN)


def _plain_step(trainer: Trainer, model: PlainSequenceModel) -> Callable[[], None]:
    """The step of an ordinary trainer, on batches made beforehand."""
    train = trainer.config.train
    batches = [trainer.task.batch(step, size=_BATCH, seed=trainer.seed) for step in range(16)]
    upcoming = cycle((batch.inputs, batch.labels) for batch in batches)
    optimizer = torch.optim.AdamW(
        model.parameters(),
        lr=train.lr,
        betas=(train.beta1, train.beta2),
        weight_decay=train.weight_decay,
        fused=False,
    )

    def step() -> None:
        inputs, labels = next(upcoming)
        optimizer.zero_grad()
        _squared_error(model(inputs), labels).backward()
        optimizer.step()

    return step


def _squared_error(answers: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Mean over the labels, which are nan where there is none."""
    labelled = ~labels.isnan()
    return (answers[labelled] - labels[labelled]).square().mean()


def _mamba(rounds: int, calls: int) -> Row:
    config, scan = _config("mamba"), by_mambapy()
    with ExitStack() as opened:
        ours, other = (opened.enter_context(trainer_of(config)) for _ in range(2))

        def with_mambapy() -> None:
            with patch.object(mamba, "selective_scan", scan):
                take_step(other)

        batch = ours.task.batch(0, size=_BATCH, seed=ours.seed)
        with torch.no_grad():
            mine = ours.task.loss(ours.model, batch)[0].item()
            with patch.object(mamba, "selective_scan", scan):
                _check_same(mine, other.task.loss(other.model, batch)[0].item())
        fused, parallel = alternate([lambda: take_step(ours), with_mambapy], rounds, calls)
    return faster(f"training step, mamba, {_SIZE}, against mambapy's scan", fused, parallel, 2.0, _MAMBAPY)


def _check_same(ours: float, other: float) -> None:
    """Equal weights and an equal batch give equal losses, or the comparison means nothing."""
    if not abs(ours - other) <= 1e-4 * abs(ours):
        raise RuntimeError(f"the sides differ: losses {ours} and {other}")
