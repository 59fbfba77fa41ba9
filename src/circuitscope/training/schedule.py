"""Pure functions of the step: whether a checkpoint or a resume point is saved."""

from circuitscope.config.train import TrainConfig


def saves_checkpoint(step: int, config: TrainConfig) -> bool:
    """Whether weights are saved after `step` updates: at 0, the last and every N; with log also 1, 2, 4 … up to N."""
    if step in (0, config.steps) or step % config.save_every == 0:
        return True
    return config.save_schedule == "log" and step < config.save_every and step & (step - 1) == 0


def saves_resume_point(step: int, config: TrainConfig) -> bool:
    """Whether a resume point is saved after `step` updates. Step 0 needs none: it follows from the seed."""
    return step > 0 and (step % config.resume_every == 0 or step == config.steps)
