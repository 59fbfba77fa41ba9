"""The learning rate as a function of the step, and the time that it makes."""

import math
from collections.abc import Sequence

from circuitscope.config.train import TrainConfig


def learning_rate(step: int, config: TrainConfig) -> float:
    """The rate of the update from step to step + 1: linear warmup, then constant, linear to 0, or cosine to 0.

    What falls does so every `schedule_every` steps, counted from the end of the warmup.
    """
    warmup = math.ceil(config.warmup * config.steps) if config.warmup_steps is None else config.warmup_steps
    if step < warmup:
        return config.lr * (step + 1) / warmup
    since = (step - warmup) // config.schedule_every * config.schedule_every
    progress = since / max(1, config.steps - warmup)
    if config.schedule == "linear":
        return config.lr * (1 - progress)
    if config.schedule == "cosine":
        return config.lr * 0.5 * (1 + math.cos(math.pi * progress))
    return config.lr


def learning_time(steps: Sequence[float], config: TrainConfig) -> list[float]:
    """t = Σ lr over all updates before each step: the clock by which gradient flow runs, whatever the schedule."""
    last = int(max(steps, default=0))
    times = [0.0]
    for step in range(last):
        times.append(times[-1] + learning_rate(step, config))
    return [times[int(step)] for step in steps]
