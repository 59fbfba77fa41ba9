"""The ground that is walked on: tiny runs and a tiny study, a fresh copy of them for every input, and caps on the work.

Capped, and so not walked: training makes two updates and then jumps to its last step; evaluations read two batches;
a run that would be much larger than the tiny ones is stopped before its first evaluation; the number of threads stays
as it is; files are not forced onto the disk; nothing is sent to Weights & Biases.
"""

import os
import shutil
from pathlib import Path
from typing import Any

import yaml

NAMES = ("attention", "mamba", "lstm", "vectors", "stopped")
STUDY = "studies/tiny"
EXAMPLES = "examples.parquet"
SEQUENCES = 4
_TINY: dict[str, Any] = {
    "length": 16,
    "pairs": 2,
    "vocab_size": 64,
    "d_model": 8,
    "n_layers": 1,
    "steps": 20,
    "save_every": 10,
    "resume_every": 10,
    "batch_size": 4,
    "eval_every": 4,
    "eval_batches": 2,
    "eval_batch_size": 8,
    "log_every": 2,
    "threads": 1,
    "device": "cpu",
}
_MOST_WORK = 1e9  # multiplications of one batch, about


class Capped(BaseException):
    """The input asks for more work than this walk does."""


def build(folder: Path) -> None:
    """Trains the runs: four that finished, some of them analyzed, and one that stopped half-way."""
    import circuitscope as cs
    from circuitscope.analysis.probes import Definition, probe
    from circuitscope.tasks.export import export

    runs = folder / "runs"
    for name in ("attention", "mamba", "lstm"):
        cs.train(model=name, name=name, root=runs, **_TINY)
    on_vectors = {name: value for name, value in _TINY.items() if name not in ("length", "pairs", "vocab_size")}
    cs.train(model="mamba", task="linear_regression", name="vectors", root=runs, dims=3, points=5, **on_vectors)
    cs.analysis.analysis_results(
        runs / "attention", ["scores", "phases", "circuit", "causal", "decay"], sequences=SEQUENCES
    )
    cs.analysis.analysis_results(runs / "mamba", ["scores", "decay"], sequences=SEQUENCES)
    probe(cs.Run(runs / "attention"), Definition.load("own-token"), sequences=30)
    _build_study(folder / STUDY, runs)
    export(cs.task("mqar", length=16, pairs=2, vocab_size=64), folder / EXAMPLES, examples=4)
    stopped = runs / "stopped"
    shutil.copytree(runs / "attention", stopped, ignore=shutil.ignore_patterns("*-00000020.*", "analysis"))
    (stopped / "status.json").write_text('{"state": "stopped", "step": 10, "message": "", "pid": 1}\n')


def _build_study(folder: Path, runs: Path) -> None:
    """Makes a study with a criterion of each kind, and runs both of its trials."""
    from circuitscope.cli.sweep import sweep

    folder.mkdir(parents=True)
    parts = {"model": ("d_model", "n_layers"), "task": ("length", "pairs", "vocab_size")}
    base = {part: {name: _TINY[name] for name in names} for part, names in parts.items()}
    elsewhere = {name for names in parts.values() for name in names}
    base["train"] = {name: value for name, value in _TINY.items() if name not in elsewhere}
    grid = {"base": {"recipe": "plain", **base}, "axes": {"train.seed": [1], "train.lr": [1e-3, 1e-2]}}
    criteria = [
        {"name": "a column", "quantity": "last_test_accuracy", "rate": "best", "holds_if": {"at_least": 0.95}},
        {"name": "a window", "quantity": "window", "holds_if": {"at_least": 0.5}, "otherwise": "undecided"},
        {"name": "a bump", "quantity": "bump_without_accuracy", "holds_if": {"at_most": 0.5}},
    ]
    study = {"question": "Does it work?", "source": "nowhere", "claim": "It works.", "criteria": criteria}
    (folder / "grid.yaml").write_text(yaml.safe_dump(grid))
    (folder / "study.yaml").write_text(yaml.safe_dump(study))
    sweep(folder, jobs=1, runs=runs)


class Cell:
    """A fresh copy of the ground, in which one input acts; it is the working folder meanwhile."""

    def __init__(self, ground: Path, cell: Path):
        self.ground, self.path = ground, cell
        self._before = os.getcwd()

    def __enter__(self) -> Path:
        shutil.rmtree(self.path, ignore_errors=True)
        shutil.copytree(self.ground, self.path, symlinks=True)
        os.chdir(self.path)
        return self.path

    def __exit__(self, *error: object) -> None:
        os.chdir(self._before)
        shutil.rmtree(self.path, ignore_errors=True)


def cap() -> None:
    """Puts the caps on this process."""
    import torch

    from circuitscope.training.trainer import Trainer

    os.environ["WANDB_MODE"] = "disabled"
    os.fsync = lambda file: None  # type: ignore[assignment]
    torch.set_num_threads(1)
    torch.set_num_threads = lambda n: None  # type: ignore[assignment]
    update, evaluate = Trainer.update, Trainer._evaluate

    def updates(self: Any, measure: bool = False) -> Any:
        found = update(self, measure)
        if self.step >= 1:
            self.step = max(self.step, self.config.train.steps - 1)
        return found

    def evaluates(self: Any, record: Any) -> Any:
        train = self.config.train
        parameters = sum(p.numel() for p in self.model.parameters())
        rows = max(train.batch_size, train.eval_batch_size)
        if rows * self.task.max_length * (parameters + self.task.max_length) > _MOST_WORK:
            raise Capped
        if train.eval_batches > 2:
            self.config = self.config.model_copy(update={"train": train.model_copy(update={"eval_batches": 2})})
        return evaluate(self, record)

    Trainer.update, Trainer._evaluate = updates, evaluates  # type: ignore[method-assign]
