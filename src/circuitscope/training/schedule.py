"""Pure functions of the step: the learning rate, what is saved when, which resume points stay."""

import math

from circuitscope.training.config import TrainConfig


def learning_rate(step: int, config: TrainConfig) -> float:
    """Rate of the update that takes step to step + 1: linear warmup, then constant, linear or cosine to 0."""
    warmup = math.ceil(config.warmup * config.steps)
    if step < warmup:
        return config.lr * (step + 1) / warmup
    progress = (step - warmup) / max(1, config.steps - warmup)
    if config.schedule == "linear":
        return config.lr * (1 - progress)
    if config.schedule == "cosine":
        return config.lr * 0.5 * (1 + math.cos(math.pi * progress))
    return config.lr


def saves_checkpoint(step: int, config: TrainConfig) -> bool:
    """Whether weights are saved after `step` updates: first, last, every N; with log also 1, 2, 4 … up to N."""
    if step in (0, config.steps) or step % config.save_every == 0:
        return True
    return config.save_schedule == "log" and step < config.save_every and step & (step - 1) == 0


def saves_resume_point(step: int, config: TrainConfig) -> bool:
    """Whether a resume point is saved after `step` updates. Step 0 needs none: it follows from the seed."""
    return step > 0 and (step % config.resume_every == 0 or step == config.steps)


def spread(steps: list[int], keep: int) -> list[int]:
    """The `keep` resume points to hold on to: the newest, and earlier ones with even gaps.

    Drops one at a time the point whose absence leaves the smallest gap, counting from step 0. Applied
    after every save it keeps the largest gap within about twice the best possible.
    """
    kept = sorted(steps)
    while len(kept) > keep:
        before = [0, *kept]
        gaps = [kept[i + 1] - before[i] for i in range(len(kept) - 1)]
        if not gaps:
            break
        del kept[gaps.index(min(gaps))]
    return kept
