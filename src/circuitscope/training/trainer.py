"""The training loop: it steps, logs, evaluates and saves, and a stopped run resumes to the same bits.

A step depends only on the config, the step number, the weights and the moments of AdamW: the step number
determines the batch, the learning rate and what dropout drops, and there is no other state. (A resume point also holds
a count of clipped steps, which is only logged.)
"""

import math
import secrets
import shlex
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import torch

from circuitscope.config import RunConfig
from circuitscope.config.rate import learning_rate
from circuitscope.devices import choose_device, on_cpu
from circuitscope.errors import Diverged, RunFailed, Stopped
from circuitscope.memory import out_of_memory_in_words, ran_out
from circuitscope.models.build import build_model
from circuitscope.progress import Progress
from circuitscope.runs.damage import DamagedFile
from circuitscope.runs.metrics import MetricsLog, read_metrics
from circuitscope.runs.run import Run, RunState, create_run
from circuitscope.tasks import Batch, Split
from circuitscope.tasks.streams import stream_key
from circuitscope.training.ahead import Ahead
from circuitscope.training.device import autocast, precision_on, seeded, set_up
from circuitscope.training.diagnosis import diagnose
from circuitscope.training.feasible import check_feasible
from circuitscope.training.optimizer import (
    gradient_norms,
    make_optimizer,
    moments_of,
    parameter_groups,
    restore_moments,
)
from circuitscope.training.ranks import Alone, RankLost, join, told
from circuitscope.training.record import Record
from circuitscope.training.schedule import saves_checkpoint, saves_resume_point
from circuitscope.training.trackers import Trackers


def train(
    config: RunConfig, *, root: str | Path | None = None, name: str | None = None, progress: Progress | None = None
) -> Run:
    """Trains a new run from its config and returns it; under torchrun, all ranks train it together."""
    device = check_feasible(config)
    ranks = join(device, config.train.batch_size)
    environment = {
        "device": device.type,
        "precision": precision_on(device, config.train.precision),
        "threads": config.train.threads or torch.get_num_threads(),
        "ranks": ranks.count,
        "wandb_id": secrets.token_hex(8),
    }
    run = ranks.shared(lambda: create_run(config, root=root, name=name, **environment))
    _train(run, config, device, ranks, told(progress))
    return run


def resume(run: Run, *, progress: Progress | None = None) -> Run:
    """Continues a run from its newest readable resume point and reaches the weights of a run that never stopped."""
    progress = told(progress)
    if run.status.get("state") == "finished":
        step = run.status.get("step", max(run.steps, default="unknown"))
        progress.say(f"{run.path} is already finished, at step {step}")
        return run
    config = run.config
    device = choose_device(config.train.device)
    ranks = join(device, config.train.batch_size)
    threads, before = config.train.threads or torch.get_num_threads(), run.threads
    if before is not None and before != threads:
        progress.say(
            f"warning: {run.path} was started with {before} CPU threads and continues with {threads};"
            " its weights will differ in the last bits from an unbroken run"
        )
    if (was := run.environment.get("device")) is not None and was != device.type:
        progress.say(f"warning: {run.path} was started on {was} and continues on {device.type}; its bits will differ")
    if isinstance(was := run.environment.get("ranks"), int) and was != ranks.count:
        progress.say(
            f"warning: {run.path} was started by {was} ranks and continues with {ranks.count};"
            " its weights will differ in the last bits from an unbroken run"
        )
    _train(run, config, device, ranks, progress, resuming=True)
    return run


class Interrupted(Stopped):
    """SIGTERM or Ctrl-C arrived. The run was saved and can be resumed."""


def _train(
    run: Run, config: RunConfig, device: torch.device, ranks: Alone, progress: Progress, resuming: bool = False
) -> None:
    """Trains while holding the run's lock, and records how it ended, whatever happens."""
    record = ranks.record(run)
    lock = record.lock()
    trainer = Trainer(run, config, device, progress, ranks)
    try:
        with set_up(device, config.train), _catch_signals() as trainer.caught:
            trainer.go(resuming)
    except Interrupted as stop:
        _try_status(record, "stopped", trainer.step, str(stop))
        ranks.leave()
        raise
    except Diverged as error:
        _try_status(record, "diverged", trainer.step, str(error))
        ranks.leave()
        raise
    except KeyboardInterrupt:  # the second signal, which does not wait for the end of a step
        again = f"continue with: circuitscope train --resume {shlex.quote(str(run.path))}"
        message = f"stopped at once at step {trainer.step}, with nothing more saved; {again}"
        _try_status(record, "stopped", trainer.step, message)
        raise Interrupted(message, 128 + (trainer.caught or [signal.SIGINT])[0]) from None
    except BrokenPipeError:
        _try_status(record, "stopped", trainer.step, "the program that read the output has ended")
        raise
    except BaseException as error:
        why = _why_it_failed(error, run)
        _try_status(record, "failed", trainer.step, why or f"{type(error).__name__}: {error}")
        if not why:
            raise
        raise RunFailed(f"{why} (last checkpoint: step {max(run.steps, default='none')})") from error
    else:
        ranks.leave()
    finally:
        lock.release()


class Trainer:
    """Trains one run once, from its start or from a resume point. `step` counts the updates done."""

    def __init__(
        self, run: Run, config: RunConfig, device: torch.device, progress: Progress, ranks: Alone | None = None
    ):
        self.run, self.config, self.device, self.progress = run, config, device, progress
        self.ranks = ranks or Alone()
        self.task = config.task
        self.step = 0
        self.caught: list[int] = []
        self.seed = config.train.batch_seed

    def build(self) -> None:
        """Makes the model, which the seed determines, and its optimizer."""
        self.model = build_model(self.config.model, seed=self.config.train.seed).to(self.device).train()
        self.optimizer = make_optimizer(self.model, self.config.train)
        self.groups = parameter_groups(self.model)
        self.batches = Ahead(self._examples, self.config.train.steps, self.device)
        # How many steps since the last logged one had their gradient cut, and the first whose loss or gradient was not
        # finite. They are kept on the device and looked at when a row is due, so that no other step waits for them.
        self.clipped: torch.Tensor | None = torch.zeros((), device=self.device)
        self.first_bad = torch.full((), math.inf, device=self.device)

    def go(self, resuming: bool) -> None:
        cfg, record = self.config.train, self.ranks.record(self.run)
        self.build()
        with record.writer(cfg.keep_resume) as self.writer, self.progress:
            self.seconds = 0.0
            if resuming:
                self._restore()
            self.ranks.check_alike(self.step, self.model)
            log = record.log(resumed_from=(self.step or -1) if resuming else None)
            record.status("running", self.step)
            self.progress.start("", cfg.steps, self.step)
            with closing(log), record.trackers(self.config) as trackers:
                self._loop(log, trackers)
        found = diagnose(read_metrics(self.run.path, self.task.metric), self.config)
        record.status("finished", self.step, *((found.sentence, found.kind) if found else ()))

    def _loop(self, log: MetricsLog, trackers: Trackers) -> None:
        cfg = self.config.train
        before, began = self.seconds, time.monotonic()

        def record(row: dict[str, Any]) -> None:
            self.seconds = before + time.monotonic() - began
            row = {
                "step": self.step,
                **row,
                "lr": learning_rate(max(0, self.step - 1), cfg),
                "tokens": self.step * cfg.batch_size * self.task.max_length,
                "seconds": round(self.seconds, 3),
            }
            log.write(row)
            trackers.track(row)

        if self.step == 0:
            self._save()
            self._evaluate(record)
        while self.step < cfg.steps:
            log_this = (self.step + 1) % cfg.log_every == 0
            loss, metric = self.update(log_this)
            self.step += 1
            if log_this:
                row = self._measured(loss, metric)
                record(row)
                self.progress.advance(self.step, row["loss"], self.writer.written)
            reached = False
            if self.step % cfg.eval_every == 0 or self.step == cfg.steps:
                held_out = self._evaluate(record)
                reached = cfg.early_stop is not None and self.task.reached(held_out, cfg.early_stop)
            if reached or saves_checkpoint(self.step, cfg):
                self._save()
            if reached:  # no resume point here: a killed run that resumed from it would train past its end
                level = " ".join(self.task.shown(cfg.early_stop or 0.0).split())
                self.progress.say(f"validation {level} reached at step {self.step}")
                return
            stopping = self.ranks.any(bool(self.caught))
            if saves_resume_point(self.step, cfg) or stopping:
                self._save_resume_point()
            if stopping:
                self._stop()

    def _stop(self) -> NoReturn:
        """Ends the run after a signal, once everything is on the disk."""
        self.writer.flush()
        signum = (self.caught or [signal.SIGTERM])[0]  # another rank may have got it
        raise Interrupted(
            f"stopped by {signal.Signals(signum).name} at step {self.step};"
            f" continue with: circuitscope train --resume {shlex.quote(str(self.run.path))}",
            128 + signum,
        )

    @torch.enable_grad()
    def update(self, measure: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
        """Makes one update on batch number `self.step`; gives its loss and, if `measure` is set, its metric."""
        cfg = self.config.train
        batch, whole = self.batches[self.step]
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(self.step, cfg) * group["factor"]
        drawn = stream_key("dropout", cfg.seed, self.step)
        with autocast(self.device, cfg.precision), seeded(self.device, drawn):
            loss, metric = self.task.loss(self.model, batch)
        loss = self.ranks.backward(loss, self.model, batch, whole)
        by_group = gradient_norms(self.groups) if measure else None
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), cfg.clip or math.inf)
        if self.clipped is not None:
            self.clipped += norm > (cfg.clip or math.inf)
        self.norms = norm, by_group
        if self.device.type == "cpu":
            self._check(loss)
            self._check(norm, "gradient")
        else:
            fine = loss.isfinite() & norm.isfinite()
            self.first_bad = torch.where(fine, self.first_bad, self.first_bad.clamp(max=self.step))
        measured = self.ranks.mean(metric(), batch, whole) if measure else torch.tensor(math.nan)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss, measured

    def _measured(self, loss: torch.Tensor, metric: torch.Tensor) -> dict[str, Any]:
        """The row of a logged step, by one transfer from the device.

        Of gradients it says what they are before clipping: norms at this step, clipped steps since the last row.
        """
        norm, by_group = self.norms
        assert by_group is not None
        counted = [] if self.clipped is None else [self.clipped]
        loss, metric, norm, by_group, bad, *counted = on_cpu([loss, metric, norm, by_group, self.first_bad, *counted])
        self._check(loss)
        if math.isfinite(bad):
            raise self._diverged("loss or gradient is not finite", int(bad))
        share = {"clipped": float(*counted) / self.config.train.log_every} if counted else {}
        self.clipped = torch.zeros((), device=self.device)
        return {
            "split": "train",
            "loss": float(loss),
            self.task.metric: float(metric),
            "grad_norm": float(norm),
            **share,
            **{
                f"grad_norm/{name}": float(f"{value:.5g}")
                for name, value in zip(self.groups, by_group.tolist(), strict=True)
            },
        }

    def _examples(self, step: int) -> tuple[Batch, Batch]:
        """This rank's part of the batch of a step, on the device, and the whole of it."""
        whole = self._batch(step, "train", self.config.train.batch_size)
        return self.ranks.part(whole).to(self.device), whole

    def _batch(self, step: int, split: Split, size: int) -> Batch:
        return self.task.batch(step, split=split, size=size, seed=self.seed)

    @torch.no_grad()
    def _evaluate(self, record: Any) -> float:
        """Records loss and metric on the held-out batches, which are always the same, and returns the metric."""
        cfg = self.config.train
        losses, metrics = [0.0] * cfg.eval_batches, [0.0] * cfg.eval_batches
        self.model.eval()
        for i in self.ranks.own(range(cfg.eval_batches)):
            if self.caught and self.step == 0:
                break
            with autocast(self.device, cfg.precision):
                batch = self._batch(i, "validation", cfg.eval_batch_size)
                losses[i], metrics[i] = self.task.evaluate(self.model, batch)
        self.model.train()
        if self.ranks.any(bool(self.caught)) and self.step == 0:
            self._stop()  # there is nothing to save yet: the seed determines the start
        losses, metrics = self.ranks.sum(losses), self.ranks.sum(metrics)
        loss, metric = sum(losses) / len(losses), sum(metrics) / len(metrics)
        self._check(torch.tensor(loss), "validation loss")
        record(
            {
                "split": "validation",
                "loss": loss,
                self.task.metric: metric,
                "loss_per_batch": [round(x, 6) for x in losses],
                f"{self.task.metric}_per_batch": [round(x, 6) for x in metrics],
            }
        )
        self.progress.evaluated(self.step, loss, self.task.shown(metric), self.writer.written)
        return metric

    def _save(self) -> None:
        self._check_weights()
        self.writer.save(self.step, self.model)

    def _save_resume_point(self) -> None:
        self._check_weights()
        state = moments_of(self.optimizer, self.model)
        if self.clipped is not None:
            state["clipped"] = self.clipped
        self.writer.save_resume_point(self.step, self.model, state)

    def _restore(self) -> None:
        """Loads the newest readable resume point and sets the counters as they were."""
        self.rewind()
        self.writer.written = sum(s < self.step for s in self.writer.steps())
        before = (r for r in read_metrics(self.run.path) if r["step"] <= self.step)
        self.seconds = max((r.get("seconds", 0.0) for r in before), default=0.0)
        self.progress.say(f"resuming {self.run.path} from step {self.step}")

    def rewind(self, before: float = math.inf) -> None:
        """Loads the newest readable resume point at or before a step; without one, the model stays at its start."""
        saved = self.run.checkpoints
        for step in reversed([s for s in saved.resume_steps() if s <= before]):
            try:
                point = saved.load_resume_point(step)
                self.model.load_state_dict(point.weights)
                restore_moments(self.optimizer, self.model, point.moments, step)
                counted = point.moments.get("clipped")  # earlier releases did not count
                self.clipped = None if counted is None else counted.to(self.device)
            except (DamagedFile, OSError, RuntimeError, KeyError) as error:
                why = f"{error} is missing" if isinstance(error, KeyError) else " ".join(str(error).split())
                self.progress.say(f"warning: resume point {step} cannot be used: {why}")
                self.build()  # as it was, if half of the point was loaded
                continue
            self.step = step
            return

    def _check(self, value: torch.Tensor, what: str = "loss") -> None:
        if not math.isfinite(value.item()):
            raise self._diverged(f"{what} is {value.item()}", self.step)

    def _check_weights(self) -> None:
        """Makes sure that no checkpoint holds a weight that is not finite; on other devices, the writer does."""
        if self.device.type == "cpu":
            total = sum(p.detach().sum(dtype=torch.float64) for p in self.model.parameters())
            self._check(torch.as_tensor(total), "sum of the weights")

    def _diverged(self, what: str, step: int) -> Diverged:
        self.writer.flush()
        good = max((s for s in self.writer.steps() if s <= step), default=None)
        return Diverged(
            f"{what} at step {step}: the run diverged; try a smaller train.lr"
            f" than {self.config.train.lr:g}; last good checkpoint: step {good}"
        )


@contextmanager
def _catch_signals() -> Iterator[list[int]]:
    """Gives a list to which SIGTERM and SIGINT are appended; a second signal stops at once."""
    caught: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield caught
        return

    def note(signum: int, frame: FrameType | None) -> None:
        if caught:
            raise KeyboardInterrupt
        caught.append(signum)

    before = {s: signal.signal(s, note) for s in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield caught
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


def _why_it_failed(error: BaseException, run: Run) -> str:
    """What a person can do something about, in one sentence; "" for a bug."""
    if isinstance(error, RankLost):
        return f"{error}; continue with the same torchrun and: train --resume {shlex.quote(str(run.path))}"
    if isinstance(error, RunFailed):
        return str(error)
    if isinstance(error, OSError):
        return f"cannot write to {run.path}: {error.strerror}"
    if ran_out(error):
        said = out_of_memory_in_words(error)
        return f"out of memory: {said}; use a smaller batch_size, eval_batch_size, length, d_model or vocab_size"
    return ""


def _try_status(record: Record, state: RunState, step: int, message: str) -> None:
    """Records how a run ended, if it is still possible to write to the disk."""
    try:
        record.status(state, step, message)
    except OSError:
        pass
