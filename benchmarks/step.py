"""(a) Our training step against the plain reference step on the same model."""

from collections.abc import Callable
from itertools import cycle

import torch
import torch.nn.functional as F

from benchmarks.plain_model import MaterializedAttention, PlainLM
from benchmarks.rows import Row, Section, alternate, faster
from benchmarks.workload import SHAPES, Shape, take_step, trainer_at
from circuitscope.kernels.cross_entropy import linear_cross_entropy
from circuitscope.tasks import NO_LABEL
from circuitscope.training.trainer import Trainer

_TARGETS = (7.0, 6.0, 3.5)
_ROUNDS = (20, 15, 12)
_NOTE = (
    "ours is Trainer.update with batch generation, clipping and checks for NaN. The other side is plain PyTorch:"
    " logits at every position, attention with its pattern in memory, F.cross_entropy(ignore_index=-100),"
    " AdamW(fused=False), no clipping, ready-made batches. Both sides run in one process, so the other side also"
    " benefits from our malloc settings. First it was checked that losses on equal weights agree to 1e-4."
)


def measure(quick: bool) -> Section:
    rows = [
        _row(shape, target, 1 if quick else rounds, 1 if quick else 3)
        for shape, target, rounds in zip(SHAPES, _TARGETS, _ROUNDS, strict=True)
    ]
    return Section(rows)


def _row(shape: Shape, target: float, rounds: int, calls: int) -> Row:
    with trainer_at(shape) as trainer:
        plain = PlainLM(trainer.model, MaterializedAttention(shape.length)).train()
        _check_same(trainer, plain)
        ours, other = alternate([lambda: take_step(trainer), _plain_step(trainer, plain)], rounds, calls)
    return faster(f"training step, {shape}", ours, other, target, _NOTE)


def _plain_step(trainer: Trainer, model: PlainLM) -> Callable[[], None]:
    """The step of an ordinary trainer, on batches made beforehand."""
    train, task = trainer.config.train, trainer.config.task
    batches = [task.batch(step, size=train.batch_size, seed=trainer.seed) for step in range(16)]
    upcoming = cycle((batch.tokens, batch.labels) for batch in batches)
    optimizer = torch.optim.AdamW(
        model.parameters(),
        lr=train.lr,
        betas=(train.beta1, train.beta2),
        weight_decay=train.weight_decay,
        fused=False,
    )

    def step() -> None:
        tokens, labels = next(upcoming)
        optimizer.zero_grad()
        logits = model(tokens)
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=NO_LABEL)
        loss.backward()
        optimizer.step()

    return step


@torch.no_grad()
def _check_same(trainer: Trainer, plain: PlainLM) -> None:
    """Equal weights and an equal batch give equal losses, or the comparison means nothing."""
    sizes = [sum(p.numel() for p in model.parameters()) for model in (trainer.model, plain)]
    batch = trainer.config.task.batch(0, size=trainer.config.train.batch_size, seed=trainer.seed)
    where, target = batch.labelled()
    ours = linear_cross_entropy(trainer.model.hidden(batch.tokens, where), trainer.model.W_U.T, target).item()
    logits = plain(batch.tokens).flatten(0, 1)
    other = F.cross_entropy(logits, batch.labels.flatten(), ignore_index=NO_LABEL).item()
    if sizes[0] != sizes[1] or not abs(ours - other) <= 1e-4:
        raise RuntimeError(f"the sides differ: {sizes[0]} and {sizes[1]} parameters, losses {ours} and {other}")
