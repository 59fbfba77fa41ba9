"""`python -m benchmarks.paper_cost`: the first paper's settings, what each of them computes, and how long it takes.

The count is that of `models.accounting`, forward and backward, but with the unembedding at labels only, as training
does it. The least time is the count over the 312 · 10¹² products and sums of bfloat16 that an A100 does in a second at
most. No training comes near that with models this small: a step of a small model waits for the CPU, and norms, convs,
scans and the optimizer wait for memory. The paper says that its runs took 10 minutes to 18 hours, and not which of them
took how long. If its largest took 18 hours, that is a rate, and the estimate is the count over this rate.
"""

import math
from typing import NamedTuple

from benchmarks.rows import markdown
from circuitscope.config import RunConfig
from circuitscope.models.accounting import parameters, training_flops_per_token
from circuitscope.models.hooked_lm import HookedLM
from circuitscope.tasks import NO_LABEL

PEAK = 312e12  # of an A100, dense, in bfloat16
SHORTEST, LONGEST = 10 * 60, 18 * 3600  # seconds that the paper's runs took


class Setting(NamedTuple):
    """A point of the paper's grid: a mixer, its number of layers and width, and the sequences."""

    model: str
    layers: int
    d_model: int
    length: int
    pairs: int

    @property
    def options(self) -> str:
        """What follows `circuitscope train --recipe paper`."""
        sizes = f"--layers {self.layers} --d-model {self.d_model} --length {self.length} --pairs {self.pairs}"
        return f"--model {self.model} {sizes}"

    @property
    def config(self) -> RunConfig:
        return RunConfig.build(
            model=self.model,
            recipe="paper",
            n_layers=self.layers,
            d_model=self.d_model,
            length=self.length,
            pairs=self.pairs,
        )


SETTINGS = [
    Setting(model, *sizes)
    for sizes in ((1, 64, 64, 4), (2, 256, 128, 8), (2, 512, 256, 16), (2, 2048, 512, 64))
    for model in ("attention", "mamba")
]


def training_flops(config: RunConfig) -> tuple[int, int]:
    """Parameters of a run's model, and the FLOPs of all its steps."""
    model, batch, length = HookedLM(config.model), config.task.batch(0, size=1), config.task.max_length
    labels = int((batch.labels != NO_LABEL).sum())
    unembedding = 3 * 2 * model.W_U.numel()
    per_sequence = length * (training_flops_per_token(model, length) - unembedding) + labels * unembedding
    return parameters(model).total, per_sequence * config.train.batch_size * config.train.steps


def table() -> str:
    """A row for each setting, and what the paper's times say about the rate and about small models."""
    configs = [setting.config for setting in SETTINGS]
    sizes, flops = zip(*map(training_flops, configs), strict=True)
    rate = max(flops) / LONGEST
    lines = [
        [
            f"`{setting.options}`",
            f"{size / 1e6:.1f} M",
            f"{config.train.steps:,} of {config.train.batch_size}",
            f"{count:.1e}",
            _time(count / PEAK),
            _time(count / rate),
        ]
        for setting, config, size, count in zip(SETTINGS, configs, sizes, flops, strict=True)
    ]
    least = min(config.train.steps for config in configs)
    return (
        markdown(["options", "parameters", "steps", "FLOPs", "least time", "estimate"], lines)
        + f"\n\nIf the largest took 18 hours, it computed {rate / 1e12:.0f} TFLOPS, {rate / PEAK:.0%} of the peak."
        + f"\nIf the smallest took 10 minutes, each of its {least:,} steps took {SHORTEST / least * 1e3:.0f} ms."
    )


def _time(seconds: float) -> str:
    for most, unit, size in ((120, "s", 1), (7200, "min", 60), (math.inf, "h", 3600)):
        if seconds < most:
            return f"{seconds / size:.0f} {unit}" if seconds >= 1 else "under 1 s"
    raise ValueError(f"{seconds} is no time")


if __name__ == "__main__":
    print(table())
