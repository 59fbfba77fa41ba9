"""A short run, the same run killed and resumed, and how fast training steps are, on the device that is there."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from circuitscope.checkup.findings import Finding
from circuitscope.config import RunConfig
from circuitscope.errors import RunFailed, UserError
from circuitscope.progress import Silent
from circuitscope.runs.checkpoints import begin_snapshot
from circuitscope.runs.run import Run, create_run
from circuitscope.training.device import precision_on, set_up
from circuitscope.training.trainer import Trainer, resume, train

_SMALL: dict[str, Any] = {"length": 32, "pairs": 4, "vocab_size": 256, "d_model": 32, "batch_size": 32, "seed": 0}
_STEPS, _EVERY = 400, 50
_PATIENCE = 120  # seconds until a killed run must have reached its first resume point
_TIMED: tuple[tuple[str, dict[str, Any]], ...] = (
    ("attention", {}),
    ("mamba", {}),
)  # models whose step is timed, with their default sizes
_WARM, _MEASURED = 5, 20  # steps


def check_training(device: torch.device) -> Iterator[Finding]:
    """A run to its end, and whether a killed one ends with the same weights."""
    config = RunConfig.build(
        model="attention",
        recipe="plain",
        device=device.type,
        steps=_STEPS,
        save_every=_EVERY,
        resume_every=_EVERY,
        eval_every=_STEPS,
        threads=torch.get_num_threads(),
        lr=3e-3,
        **_SMALL,
    )
    by = f"{device.type}, {precision_on(device, config.train.precision)}"
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        try:
            whole = train(config, root=root, name="whole")
        except (RunFailed, UserError, RuntimeError) as error:
            yield Finding("a short run", by, f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}", False)
            return
        losses = whole.metrics[whole.metrics.split == "validation"].loss.tolist()
        yield Finding(
            "a short run",
            by,
            f"validation loss {losses[0]:.3f} to {losses[-1]:.3f} in {_STEPS} steps",
            losses[-1] < losses[0],
        )
        yield _killed_and_resumed(whole, root, by)


def _killed_and_resumed(whole: Run, root: Path, by: str) -> Finding:
    what = "killed and resumed"
    command = [sys.executable, "-m", "circuitscope", "train", str(whole.path / "config.yaml")]
    with subprocess.Popen(
        [*command, "--name", "killed", "--runs", str(root)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as process:
        reached = _waits_for(root / "killed" / "resume" / f"step-{_EVERY:08d}.safetensors", process)
        os.kill(process.pid, signal.SIGKILL)
    if not reached:
        return Finding(what, by, f"the run to be killed did not come to step {_EVERY}", False)
    killed = Run(root / "killed")
    at = max(killed.checkpoints.resume_steps())
    if killed.status.get("state") == "finished":
        return Finding(what, by, "the run ended before it was killed", None)
    weights, expected = (resume(killed).checkpoints.load(_STEPS), whole.checkpoints.load(_STEPS))
    if all(torch.equal(weights[name], expected[name]) for name in expected):
        return Finding(what, by, f"resumed from step {at}: the same bits at step {_STEPS}", True)
    worst = max(float((weights[name] - expected[name]).abs().max()) for name in expected)
    asked = " (without --deterministic, some kernels of a GPU add in no fixed order)" if "cpu" not in by else ""
    return Finding(what, by, f"resumed from step {at}: weights differ by up to {worst:.1e}{asked}", "cpu" not in by)


def _waits_for(path: Path, process: "subprocess.Popen[bytes]") -> bool:
    until = time.monotonic() + _PATIENCE
    while not path.exists():
        if process.poll() is not None or time.monotonic() > until:
            return path.exists()
        time.sleep(0.002)
    return True


def check_speed(device: torch.device) -> Iterator[Finding]:
    """Milliseconds per step of two models in their default sizes, of making a batch, and of beginning a checkpoint."""
    for name, options in _TIMED:
        config = RunConfig.build(model=name, device=device.type, **options)
        with tempfile.TemporaryDirectory() as folder, set_up(device, config.train):
            trainer = Trainer(create_run(config, root=folder), config, device, Silent())
            trainer.build()
            sizes = f"{config.model.n_layers} layers of {name}, d {config.model.d_model}, L {config.task.max_length}"
            by = f"{device.type}, {precision_on(device, config.train.precision)}"
            step = _timed(trainer, device)
            yield Finding(f"training step, {sizes}, batch {config.train.batch_size}", by, f"{step:.1f} ms", None)
            saving = _timed(trainer, device, saving=True)
            yield Finding("the same with a checkpoint begun at every step", by, f"{saving:.1f} ms", None)
    began = time.perf_counter()
    for number in range(_MEASURED):
        config.task.batch(number, size=config.train.batch_size)
    yield Finding("making its batch", "cpu", f"{(time.perf_counter() - began) / _MEASURED * 1e3:.1f} ms", None)


def _timed(trainer: Trainer, device: torch.device, saving: bool = False) -> float:
    """Milliseconds per step; the device is done with all steps before the clock is read."""
    coming = []
    began = 0.0
    for number in range(_WARM + _MEASURED):
        if number == _WARM:
            _wait(device)
            began = time.perf_counter()
        trainer.update()
        trainer.step += 1
        if saving:
            coming.append(begin_snapshot(trainer.step, trainer.model.state_dict().items()))
    _wait(device)
    elapsed = time.perf_counter() - began
    for arrive in coming:
        arrive()
    return elapsed / _MEASURED * 1e3


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()
