"""Pure functions of the step: the learning rate, and whether a checkpoint or a resume point is saved."""

import math

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


def saves_checkpoint(step: int, config: TrainConfig) -> bool:
    """Whether weights are saved after `step` updates: at 0, the last and every N; with log also 1, 2, 4 … up to N."""
    if step in (0, config.steps) or step % config.save_every == 0:
        return True
    return config.save_schedule == "log" and step < config.save_every and step & (step - 1) == 0


def saves_resume_point(step: int, config: TrainConfig) -> bool:
    """Whether a resume point is saved after `step` updates. Step 0 needs none: it follows from the seed."""
    return step > 0 and (step % config.resume_every == 0 or step == config.steps)
