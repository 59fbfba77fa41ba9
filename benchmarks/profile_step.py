"""Where the time of our step goes: by section of `Trainer.update`, and by operator."""

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.rows import Section, duration, markdown
from benchmarks.workload import SHAPES, Shape, take_step, trainer_at
from circuitscope.tasks import token_task
from circuitscope.training.trainer import Trainer

_REST = "rest (rate, checks, accuracy when logged)"


def measure(quick: bool) -> Section:
    shape, steps = SHAPES[0], 3 if quick else 200
    with trainer_at(shape) as trainer:
        sections = section_seconds(trainer, steps)
        operators = _operators(trainer, 3 if quick else 50)
    total = [sum(parts) for parts in zip(*sections.values(), strict=True)]
    lines = [
        [name, duration(taken), f"{statistics.median(t / s for t, s in zip(taken, total, strict=True)):.1%}"]
        for name, taken in sections.items()
    ]
    lines.append(["whole step", duration(total), "100%"])
    parts = markdown(["part", "median", "share"], lines)
    return Section(text="\n\n".join([_title(shape, steps), parts, operators]))


def _title(shape: Shape, steps: int) -> str:
    return f"### Where the time of our step goes ({shape})\n\nWall time in `Trainer.update` over {steps} steps."


def section_seconds(trainer: Trainer, steps: int) -> dict[str, list[float]]:
    """Seconds per section [section][step]. The functions that `update` calls are timed where they stand."""
    parts = {
        "batch": (trainer, "_batch"),
        "forward": (trainer.model, "hidden"),
        "loss": (token_task, "linear_cross_entropy"),
        "backward": (torch.Tensor, "backward"),
        "clip": (torch.nn.utils, "clip_grad_norm_"),
        "optimizer": (trainer.optimizer, "step"),
        "zero_grad": (trainer.optimizer, "zero_grad"),
    }
    for _ in range(min(5, steps)):
        take_step(trainer)
    seconds: dict[str, list[float]] = {name: [] for name in (*parts, _REST)}
    with _timed(parts) as spent:
        for _ in range(steps):
            spent.clear()
            began = time.perf_counter()
            take_step(trainer)
            total = time.perf_counter() - began
            if missing := parts.keys() - spent.keys():
                raise RuntimeError(f"Trainer.update no longer calls what is timed as {', '.join(sorted(missing))}")
            for name in parts:
                seconds[name].append(spent[name])
            seconds[_REST].append(total - sum(spent.values()))
    return seconds


@contextmanager
def _timed(parts: dict[str, tuple[Any, str]]) -> Iterator[dict[str, float]]:
    """Replaces each function by one that adds its time to the mapping that is returned."""
    spent: dict[str, float] = defaultdict(float)

    def timed(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                spent[name] += time.perf_counter() - began

        return call

    with ExitStack() as stack:
        for name, (owner, attribute) in parts.items():
            stack.enter_context(patch.object(owner, attribute, timed(name, getattr(owner, attribute))))
        yield spent


def _operators(trainer: Trainer, steps: int) -> str:
    """The operators with the most time of their own; the profiler adds some, so only shares are shown."""
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        for _ in range(steps):
            take_step(trainer)
    events = [(e.key, e.self_cpu_time_total, e.count) for e in profiled.key_averages()]
    total = sum(taken for _, taken, _ in events)
    largest = sorted(events, key=lambda e: -e[1])[:12]
    lines = [[f"`{name}`", f"{count / steps:.1f}", f"{taken / total:.1%}"] for name, taken, count in largest]
    return markdown(["operator", "calls per step", "share of operator time"], lines)
