"""One run trained by several processes, its ranks, which `torchrun --nproc-per-node=2 -m circuitscope train …` starts.

Every rank holds the whole model and makes the whole batch of a step, which costs little, and computes the loss of a
slice of it. A loss is a mean over labels, and slices need not have equally many. So each rank weights its loss by its
share of the labels, and the sum of the gradients over ranks is the gradient of the whole batch: training is that of one
process up to the order in which numbers are added. Everything after the sum (clipping, checks, AdamW) sees the same
numbers on all ranks, so weights stay equal without being sent.

The sum is one `all_reduce` of all gradients in a row. `DistributedDataParallel` would overlap it with the backward
pass, but it takes the mean over ranks, wants to wrap the model, whose hooks and names this package relies on, and saves
little for models of a few megabytes.

Rank 0 alone writes, prints and holds the lock of the run. Whatever decides how a run goes on is agreed upon: held-out
batches are shared out and their results summed, and a signal that one rank got stops all after the same step. If a rank
dies, the others notice at the next sum, and torchrun ends what is left.

The trainer asks `Alone`, one process that is all there is, or `Ranks`, and does not know which.
"""

import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from circuitscope.errors import RunFailed, UserError
from circuitscope.progress import Progress, Silent
from circuitscope.runs.run import Run
from circuitscope.tasks import Batch
from circuitscope.training.record import Record, Unrecorded

_PATIENCE = timedelta(minutes=10)  # for a rank that lives and does not answer
_trainings = 0  # of this process, so that the messages of two in a row do not mix


class RankLost(RunFailed):
    """Another rank has died."""


class Alone:
    """One process that trains by itself."""

    number, count = 0, 1

    def shared(self, make: Callable[[], Run]) -> Run:
        """The run that rank 0 makes."""
        return make()

    def record(self, run: Run) -> Record:
        """Where this rank writes what happens to the run."""
        return Record(run)

    def part(self, batch: Batch) -> Batch:
        """The examples of a batch on which this rank computes."""
        return batch

    def backward(self, loss: Tensor, model: nn.Module, part: Batch, batch: Batch) -> Tensor:
        """Gives the model the gradient of the whole batch, from the loss of this rank's part, and returns the loss."""
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    def mean(self, value: Tensor, part: Batch, batch: Batch) -> Tensor:
        """The mean over the labels of the whole batch, from the mean over those of this rank's part."""
        return value

    def own(self, numbers: range) -> range:
        """The numbers, of held-out batches for example, that are this rank's to work on."""
        return numbers

    def sum(self, values: Sequence[float]) -> list[float]:
        """The sums over ranks."""
        return list(values)

    def any(self, here: bool) -> bool:
        """Whether something is so on any rank."""
        return here

    def check_alike(self, step: int, model: nn.Module) -> None:
        """Makes sure that all ranks go on from the same step and weights."""

    def leave(self) -> None:
        """Waits until all ranks are here, which ends their work together; whoever has died meanwhile is not missed."""


class Ranks(Alone):
    """One of several processes that train a run together."""

    def __init__(self, device: torch.device):
        global _trainings
        _trainings += 1
        store, self.number, self.count = _meet(_PATIENCE)
        self.store = dist.PrefixStore(f"circuitscope-{_trainings}", store)  # type: ignore[attr-defined]
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"  # flags are summed on the CPU
        try:
            dist.init_process_group(
                backend, store=self.store, rank=self.number, world_size=self.count, timeout=_PATIENCE
            )
        except RuntimeError as error:
            raise self._lost() from error

    def shared(self, make: Callable[[], Run]) -> Run:
        if self.number == 0:
            run = make()
            self.store.set("run", str(run.path.resolve()))
            return run
        return Run(self.store.get("run").decode())

    def record(self, run: Run) -> Record:
        return Record(run) if self.number == 0 else Unrecorded(run)

    def part(self, batch: Batch) -> Batch:
        first, last = (len(batch) * n // self.count for n in (self.number, self.number + 1))
        return batch.part(slice(first, last))

    def backward(self, loss: Tensor, model: nn.Module, part: Batch, batch: Batch) -> Tensor:
        share = _share(part, batch)
        (loss * share).backward()  # type: ignore[no-untyped-call]
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        whole = torch.cat([*(g.flatten() for g in gradients), _weighted(loss.detach(), share).view(1)])
        if not share:  # the mean over no labels is no number
            whole.zero_()
        self._sum(whole)
        for gradient, summed in zip(gradients, whole[:-1].split([g.numel() for g in gradients]), strict=True):
            gradient.copy_(summed.view_as(gradient))
        return whole[-1]

    def mean(self, value: Tensor, part: Batch, batch: Batch) -> Tensor:
        whole = _weighted(value, _share(part, batch)).clone()
        self._sum(whole)
        return whole

    def own(self, numbers: range) -> range:
        return numbers[self.number :: self.count]

    def sum(self, values: Sequence[float]) -> list[float]:
        summed = torch.tensor(values, dtype=torch.float64)
        self._sum(summed)
        return summed.tolist()

    def any(self, here: bool) -> bool:
        return self.sum([float(here)])[0] > 0

    def check_alike(self, step: int, model: nn.Module) -> None:
        mine = [float(step), float(sum(p.detach().double().sum() for p in model.parameters()))]
        every = self.sum([x for rank in range(self.count) for x in (mine if rank == self.number else [0.0, 0.0])])
        if any(every[2 * rank : 2 * rank + 2] != every[:2] for rank in range(self.count)):
            steps = ", ".join(f"{x:.0f}" for x in every[::2])
            raise RunFailed(
                f"the {self.count} ranks do not start from the same weights (they are at the steps {steps});"
                " all machines must see the same folder of runs and have the same versions"
            )

    def leave(self) -> None:
        with suppress(RankLost):
            self.any(True)
        dist.destroy_process_group()

    def _sum(self, values: Tensor) -> None:
        try:
            dist.all_reduce(values)
        except RuntimeError as error:
            raise self._lost() from error

    def _lost(self) -> RankLost:
        return RankLost(f"rank {self.number} of {self.count} has lost another, which died or cannot be reached")


def join(device: torch.device, batch_size: int) -> Alone:
    """The ranks that torchrun has started, or this process alone. Every rank gets a device of its own if it can."""
    if not _together():
        return Alone()
    count, place = int(os.environ["WORLD_SIZE"]), int(os.environ["LOCAL_RANK"])
    if batch_size < count:
        raise UserError(
            f"train.batch_size: {batch_size} examples cannot be shared out to {count} ranks; use {count} or more"
        )
    if device.type == "cuda" and place >= torch.cuda.device_count():
        raise UserError(
            f"torchrun --nproc-per-node: rank {place} on this machine has no GPU of its own;"
            f" there are {torch.cuda.device_count()}"
        )
    if device.type not in ("cpu", "cuda"):
        raise UserError(f"device '{device.type}' cannot be used by several ranks; use cpu or cuda")
    if dist.is_initialized():
        raise UserError("torch.distributed is in use already in this process; circuitscope sets it up by itself")
    if device.type == "cuda":
        torch.cuda.set_device(place)
    return Ranks(device)


def leads() -> bool:
    """Whether this process is rank 0, which prints and writes; a process alone is."""
    return not _together() or os.environ["RANK"] == "0"


def told(progress: Progress | None) -> Progress:
    """Whom this process tells of its progress: nobody, unless it is rank 0."""
    return progress if progress and leads() else Silent()


def speaks_first() -> bool:
    """Whether this process may say why it ends: of all ranks, the first that asks, since the others end because of it.

    torchrun's own process keeps the count, so that it does not matter which rank has died.
    """
    if not _together():
        return True
    try:
        return bool(_meet(timedelta(seconds=5))[0].add("circuitscope-said", 1) == 1)
    except (RuntimeError, ValueError):  # torchrun's own process is gone
        return True


def _meet(patience: timedelta) -> tuple[Any, int, int]:
    """The store of words that all ranks share, kept by torchrun; this rank's number; and how many there are."""
    found: tuple[Any, int, int] = next(dist.rendezvous("env://", timeout=patience))  # type: ignore[attr-defined]
    return found


def _together() -> bool:
    return dist.is_available() and dist.is_torchelastic_launched() and int(os.environ.get("WORLD_SIZE", "1")) > 1


def _share(part: Batch, batch: Batch) -> float:
    return part.label_count / max(1, batch.label_count)


def _weighted(value: Tensor, share: float) -> Tensor:
    return value * share if share else torch.zeros_like(value)
