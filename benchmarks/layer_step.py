"""(j) A training step of every preset at its smallest, against attention's: time and memory."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest.mock import patch

import torch

from benchmarks.effective_attention import extra_memory, megabytes
from benchmarks.rows import Row, Section, alternate, costs, duration, markdown, spread
from benchmarks.workload import SHAPES, take_step, temporary_folder
from circuitscope.config import RunConfig
from circuitscope.models.presets import PRESETS
from circuitscope.progress import Silent
from circuitscope.runs.run import create_run
from circuitscope.training import device as device_module
from circuitscope.training.device import set_up
from circuitscope.training.trainer import Trainer

_SHAPE = SHAPES[0]
_LAYERS = {"mamba_one_hybrid": 2}  # at one layer it would have no attention; all others have 1 as they count it
_AT_MOST = {"mamba": 3.0, "mamba2": 3.0, "deltanet": 3.0}
_NOTE = (
    "Trainer.update, batch generation included, of a preset with one layer as the preset counts it (mamba_one_hybrid:"
    f" two), vocabulary 8,192, {_SHAPE}; the other side is the one-layer attention preset, in turns with each. The row"
    " of attention against itself shows how much is chance"
)
_MEMORY = (
    f"### Memory of a step ({_SHAPE})\n\nPeak resident memory that one step adds to the memory between steps (which"
    " holds weights and optimizer state), measured after three other steps in a child process that maps every block of"
    " 64 kB or more by itself, so that only memory in use counts. A run keeps more, by its own malloc settings."
)


def measure(quick: bool) -> Section:
    rounds, calls = (1, 1) if quick else (20, 3)
    rows, blocks = [], {}
    with _trainer_of("attention") as attention:
        for preset in PRESETS:
            with _trainer_of(preset) as trainer:
                blocks[preset] = trainer.model.config.n_layers
                ours, other = alternate([_steps(trainer), _steps(attention)], rounds, calls)
            rows.append(_row(preset, ours, other))
    peaks = dict(zip(PRESETS, extra_memory(_ready, [(preset,) for preset in PRESETS]), strict=True))
    lines = [
        [preset, str(blocks[preset]), megabytes(peak), f"{peak / peaks['attention']:.2f}"]
        for preset, peak in peaks.items()
    ]
    table = markdown(["preset", "blocks", "extra memory", "over attention's"], lines)
    return Section(rows, f"{_MEMORY}\n\n{table}")


def _row(preset: str, ours: list[float], other: list[float]) -> Row:
    name = f"training step, {preset} against attention"
    if preset in _AT_MOST:
        return costs(name, ours, other, _AT_MOST[preset], _NOTE)
    ratios = [a / b for a, b in zip(ours, other, strict=True)]
    return Row(name, duration(ours), duration(other), spread(ratios, "{:.3f}"), "–", None, _NOTE)


def _steps(trainer: Trainer) -> Callable[[], None]:
    return lambda: take_step(trainer)


@contextmanager
def _trainer_of(preset: str) -> Iterator[Trainer]:
    """A trainer on a temporary run of a preset at its smallest."""
    config = RunConfig.build(
        preset,
        "mqar",
        n_layers=_LAYERS.get(preset, 1),
        d_model=_SHAPE.d_model,
        length=_SHAPE.length,
        pairs=_SHAPE.pairs,
        vocab_size=8192,
        batch_size=_SHAPE.batch,
        steps=10_000,
        device="cpu",
    )
    device = torch.device("cpu")
    with temporary_folder() as folder, set_up(device, config.train):
        run = create_run(config, root=folder, device="cpu", threads=torch.get_num_threads())
        trainer = Trainer(run, config, device, Silent())
        trainer.build()
        yield trainer


@contextmanager
def _ready(preset: str) -> Iterator[Callable[[], object]]:
    """A step, after three others, without the malloc settings of a run: they keep what is freed."""
    with patch.object(device_module, "keep_freed_memory"), _trainer_of(preset) as trainer:
        for _ in range(3):
            take_step(trainer)
        yield _steps(trainer)
