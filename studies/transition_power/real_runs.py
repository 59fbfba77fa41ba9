"""Trains cheap real runs on MQAR (16, 4) and keeps their curves, to judge the detector on more than formulas.

    python studies/transition_power/real_runs.py [FOLDER]     # → real_runs.csv, real_curves.csv

Four kinds of run: labels shuffled, so that nothing can be learned but which tokens are values; one layer of attention,
which finds the values but cannot match keys; and two layers of attention, Mamba and DeltaNet, which can. Where recall
forms, the truth is a knockout: the recall edges of the last checkpoint's circuit are cut at every checkpoint, and the
circuit is there when that costs half of what it costs in the end. Runs that the tables hold are not trained again.
"""

import shutil
import sys
import tempfile
from pathlib import Path
from typing import Literal

import numpy as np
import pandas as pd

import circuitscope as cs
from circuitscope.analysis.causal.circuit import find_circuit
from circuitscope.analysis.causal.interventions import knock_out
from circuitscope.config.rate import learning_time
from circuitscope.tasks import MQAR, NO_LABEL
from circuitscope.tasks import register as register_task

HERE = Path(__file__).parent
RUNS, CURVES = HERE / "real_runs.csv", HERE / "real_curves.csv"
EVALUATIONS, CHECKPOINTS, SEEDS = 60, 30, 24


@register_task("mqar_shuffled")
class Shuffled(MQAR):
    """MQAR whose labels come from other sequences: the queries of an example get the answers of the next one."""

    name: Literal["mqar_shuffled"] = "mqar_shuffled"

    def generate(self, key, examples):
        batch, other = super().generate(key, examples), super().generate(key, examples + 1)
        labels = batch.labels.clone()
        labels[labels != NO_LABEL] = other.labels[other.labels != NO_LABEL]
        return type(batch)(batch.tokens, labels, batch.layout)


def trials():
    """(kind, options) of every run, the kinds in turn."""
    rates = (1e-3, 3e-3, 1e-2)
    models = (("attention", 1), ("attention", 2), ("mamba", 1), ("deltanet", 1))
    for seed in range(SEEDS):
        model, layers = models[seed % len(models)]
        lr = rates[seed // len(models) % len(rates)]
        yield "shuffled", {"task": "mqar_shuffled", "model": model, "n_layers": layers, "lr": lr, "steps": 420}
        yield "one layer", {"model": "attention", "n_layers": 1, "lr": (2e-3, 3e-3, 5e-3)[seed % 3], "steps": 600}
        yield "deltanet", {"model": "deltanet", "n_layers": 1, "lr": (1.5e-3, 3e-3)[seed % 2], "steps": 600}
        yield "two layers", {"model": "attention", "n_layers": 2, "lr": (1e-3, 1.5e-3)[seed % 2], **_DECAY}
        yield "mamba", {"model": "mamba", "n_layers": 1, "lr": (8e-3, 1.2e-2)[seed % 2], "beta2": 0.95, "steps": 1200}


_DECAY = {"weight_decay": 1.0, "examples": 20_000, "d_model": 64, "steps": 1500}
_COMMON = {
    "task": "mqar", "length": 16, "pairs": 4, "vocab_size": 128, "d_model": 32, "examples": None, "weight_decay": 0.1,
    "eval_batches": 4, "threads": 1, "recipe": "plain",
}  # fmt: skip


def curves(run, name):
    metrics = run.metrics
    held = metrics[metrics.split == "validation"]
    trained = metrics[metrics.split == "train"].set_index("step").loss
    return pd.DataFrame(
        {
            "run": name,
            "step": held.step.to_numpy(),
            "clock": learning_time(list(held.step), run.config.train),
            "loss": held.loss.to_numpy(),
            "accuracy": held.accuracy.to_numpy(),
            "train_loss": trained.reindex(held.step).to_numpy(),
        }
    )


def knocked_out(run):
    """Where recall is done at the end, and between which checkpoints its knockout begins to cost half of that."""
    batch = run.config.task.batch(0, split="test", size=256)
    part = find_circuit(run.load(), batch).recall
    if part is None:
        return {"place": "", "formed_after": np.nan, "formed_by": np.nan}
    heads = None if part.head is None else [part.head]
    lost = [
        knock_out(run.load(s), batch, part.edges, layer=part.layer, heads=heads, factor=part.factor).lost
        for s in run.steps
    ]
    at = int(np.argmax(np.array(lost) >= lost[-1] / 2))
    return {
        "place": f"{part.place} {part.edges}",
        "formed_after": run.steps[max(at - 1, 0)],
        "formed_by": run.steps[at],
    }


def main(folder):
    done = set(pd.read_csv(RUNS).run) if RUNS.exists() else set()
    for number, (kind, options) in enumerate(trials()):
        name = f"{kind} {number:03d}"
        if name in done:
            continue
        options = {**_COMMON, **options, "seed": number}
        every = options["steps"] // EVALUATIONS
        run = cs.train(
            **options,
            eval_every=every,
            log_every=every,
            save_every=options["steps"] // CHECKPOINTS,
            root=folder,
            name=name.replace(" ", "-"),
        )
        found = curves(run, name)
        truth = {} if kind in ("shuffled", "one layer") else knocked_out(run)
        row = {
            "run": name, "kind": kind, "model": options["model"], "layers": options["n_layers"], "lr": options["lr"],
            "accuracy": found.accuracy.iloc[-1], "place": "", "formed_after": np.nan, "formed_by": np.nan, **truth,
        }  # fmt: skip
        for path, frame in ((CURVES, found), (RUNS, pd.DataFrame([row]))):
            frame.to_csv(path, mode="a", header=not path.exists(), index=False, float_format="%.5g")
        print(*row.values(), flush=True)
        shutil.rmtree(run.path)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(sys.argv[1])
    else:
        with tempfile.TemporaryDirectory() as temporary:
            main(temporary)
