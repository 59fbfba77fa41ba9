"""Repeats a stretch of a run with denser checkpoints.

A run is exactly repeatable. The trainer makes the same updates again from the nearest resume point, and wherever the
run has a checkpoint, the repeated weights must equal it bit by bit.
"""

import shutil
from dataclasses import dataclass, field

import torch

from circuitscope.devices import choose_device
from circuitscope.errors import UserError
from circuitscope.progress import Progress, Silent
from circuitscope.runs.checkpoints import Tensors, checkpoint_name, snapshot, write_checkpoint
from circuitscope.runs.damage import DamagedFile
from circuitscope.runs.run import Run
from circuitscope.training.device import set_up
from circuitscope.training.trainer import Trainer


@dataclass
class Repetition:
    """The result of repeating a stretch.

    equal    steps with an earlier checkpoint that the repeated weights equal bit by bit
    added    steps that have a checkpoint now and had none before
    differs  the first step with an earlier checkpoint that the repeated weights do not equal, and the largest
             difference of a weight; no new checkpoint after the last equal step is kept
    """

    began: int
    equal: list[int] = field(default_factory=list)
    added: list[int] = field(default_factory=list)
    differs: tuple[int, float] | None = None


def repeat(run: Run, first: int, last: int, every: int, progress: Progress | None = None) -> Repetition:
    """Makes the updates up to `last` again and saves a checkpoint every `every` steps from `first` on.

    New checkpoints are added to the run once an earlier checkpoint at a later step has been found equal.
    """
    progress = progress or Silent()
    config = run.config
    last = min(last, run.steps[-1] if run.steps else 0)
    if every < 1 or first < 0 or first > last:
        have = f"its last checkpoint is at step {run.steps[-1]}" if run.steps else "it has no checkpoints"
        raise UserError(f"cannot repeat steps {first} to {last} every {every} of {run.path}: {have}")
    if config.train.threads is None and run.threads is not None:
        config = config.model_copy(update={"train": config.train.model_copy(update={"threads": run.threads})})
    device = choose_device(config.train.device)
    lock = run.lock()
    waiting = run.path / "checkpoints" / ".repeated"
    trainer = Trainer(run, config, device, progress)
    try:
        with set_up(device, config.train), progress:
            trainer.build()
            trainer.rewind(before=first)
            began = trainer.step
            saved = [s for s in run.steps if began < s]
            end = min((s for s in saved if s >= last), default=saved[-1] if saved else began)  # it proves all before it
            waiting.mkdir(exist_ok=True)
            out = Repetition(began)
            progress.say(f"repeating steps {began} to {end} of {run.path}")
            _go(trainer, run, out, set(saved), range(first, last + 1, every), end, progress)
            return out
    finally:
        shutil.rmtree(waiting, ignore_errors=True)
        lock.release()


def _go(
    trainer: Trainer, run: Run, out: Repetition, saved: set[int], wanted: range, last: int, progress: Progress
) -> None:
    pending: list[int] = []
    progress.start("repeat", last, trainer.step)
    if trainer.step in wanted and trainer.step not in run.steps:
        pending.append(_keep(trainer, run))
    while trainer.step < last:
        loss, _ = trainer.update()
        trainer.step += 1
        step = trainer.step
        progress.advance(step, float(loss), len(out.added) + len(pending))
        if step in saved:
            try:
                worst = _largest_difference(run.checkpoints.load(step), trainer.model)
            except (DamagedFile, OSError) as error:
                progress.say(f"warning: checkpoint {step} cannot be compared: {error}")
                continue
            if worst > 0:
                out.differs = (step, worst)
                return
            out.equal.append(step)
            for done in pending:
                name = checkpoint_name(done)
                (run.checkpoints.folder / ".repeated" / name).rename(run.checkpoints.folder / name)
            out.added += pending
            pending = []
        elif step in wanted:
            pending.append(_keep(trainer, run))


def _keep(trainer: Trainer, run: Run) -> int:
    """Sets the weights aside until a checkpoint of the run proves them right."""
    path = run.checkpoints.folder / ".repeated" / checkpoint_name(trainer.step)
    write_checkpoint(path, trainer.step, snapshot(trainer.model.state_dict().items()), run.digest)
    return trainer.step


def _largest_difference(saved: Tensors, model: torch.nn.Module) -> float:
    now = snapshot(model.state_dict().items())
    if saved.keys() != now.keys() or any(saved[n].shape != now[n].shape for n in now):
        return float("inf")
    return max(float((saved[n] - now[n]).abs().max()) if not torch.equal(saved[n], now[n]) else 0.0 for n in now)
