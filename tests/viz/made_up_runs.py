"""Runs and tables with known numbers, for figures to draw."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from circuitscope.analysis.causal.interventions import Effect
from circuitscope.analysis.causal.parts import Circuit, Part
from circuitscope.analysis.probes.over_run import COLUMNS as PROBE_COLUMNS
from circuitscope.analysis.registry import ANALYSES
from circuitscope.config import RunConfig
from circuitscope.runs.run import Run

_OF_HEADS = ("pattern", "delta", "linear_attention")  # the other factors have a matrix for each channel

_ONE_HEAD = (("median", 1.0), ("q25", 1.0), ("q75", 1.0))


def made_up_run(
    root: Path, name: str = "made-up", *, scale: float = 1.0, steps: int = 2000, every: int = 50, **options: Any
) -> Run:
    """Loss 9 · scale falls to 1 in a sigmoid around step 1000 of `steps`, accuracy rises there; no checkpoints."""
    folder = root / name
    folder.mkdir(parents=True)
    sizes = {"length": 16, "pairs": 4, "vocab_size": 64, "d_model": 8}
    config = RunConfig.build(None if "mixers" in options else "attention", "mqar", **{**sizes, **options})
    (folder / "config.yaml").write_text(config.dump())
    rng = np.random.default_rng(len(name))
    rows: list[dict[str, Any]] = []
    for step in range(0, steps + 1, every):
        turned = 1 / (1 + np.exp(-(step - 1000) / 40))
        loss, accuracy = scale * (9 - 8 * turned), turned
        if step:
            rows.append({"step": step, "split": "train", "loss": 0.9 * loss, "accuracy": accuracy})
        rows.append(
            {
                "step": step,
                "split": "validation",
                "loss": loss,
                "accuracy": accuracy,
                "loss_per_batch": (loss + rng.normal(size=4) * 0.1).tolist(),
                "accuracy_per_batch": np.clip(accuracy + rng.normal(size=4) * 0.05, 0, 1).tolist(),
            }
        )
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return Run(folder)


def score_table(
    places: dict[tuple[str, int, int | None, str], list[float]], steps: list[int], run: str = "made-up"
) -> pd.DataFrame:
    """A table as `analyze` gives it: (score, layer, head, factor) → values by step, standard error 0.02."""
    rows = [
        {
            "run": run,
            "step": step,
            "layer": layer,
            "head": head,
            "factor": factor,
            "unit": "head" if factor in _OF_HEADS else "channel",
            "score": score,
            "weighting": "raw" if factor == "pattern" else "abs",
            "value": value,
            "stderr": 0.02,
            "n": 256,
        }
        for (score, layer, head, factor), values in places.items()
        for step, value in zip(steps, values, strict=True)
    ]
    columns = ANALYSES["scores"].table_columns
    return pd.DataFrame(rows, columns=list(columns)).astype(columns)


def made_up_circuit(*parts: tuple[str, str, int, int | None, str]) -> Circuit:
    """A circuit that solves the task, of parts (step, edges, layer, head, factor)."""
    effect = Effect(before=1.0, after=0.1, lost=0.9, stderr=0.01, n=64)
    found = {
        step: Part(step, edges, layer, head, factor, head is not None, 0.9, 0.01, (0, 0.9), effect)
        for step, edges, layer, head, factor in parts
    }
    return Circuit(list(found.values()), found.get("binding"), found.get("recall"), None, 0.25)


def decay_table(
    kappas: dict[int, dict[int, float]], length: int = 32, run: str = "made-up", heads: int = 3, r2: float = 0.95
) -> pd.DataFrame:
    """The table of the analysis decay: m(δ) = 2 exp(−κ δ) in the median, for κ by layer and step.

    With several heads the quartiles are half and double the median; with one they are the median.
    """
    rows = []
    for layer, by_step in kappas.items():
        for step, kappa in by_step.items():
            base = {"run": run, "step": step, "layer": layer, "head": None, "factor": "phi", "stderr": 0.0, "n": 8}
            for word, factor in (("median", 1.0), ("q25", 0.5), ("q75", 2.0)) if heads > 1 else _ONE_HEAD:
                for lag in range(length):
                    value = 2 * factor * float(np.exp(-kappa * lag))
                    rows.append({**base, "quantity": f"profile_{word}", "lag": lag, "value": value})
                rows.append({**base, "quantity": f"kappa_{word}", "lag": None, "value": kappa * factor})
            rows += [{**base, "quantity": "profile", "lag": lag, "value": 1.0} for lag in range(length)]
            rows.append({**base, "quantity": "kappa_r2_median", "lag": None, "value": r2})
            rows += [{**base, "head": h, "quantity": "kappa", "lag": None, "value": kappa} for h in range(heads)]
    columns = ANALYSES["decay"].table_columns
    return pd.DataFrame(rows, columns=list(columns)).astype(columns)


def probe_table(
    hooks: list[str], roles: list[str], steps: list[int], run: str = "made-up", chance: float = 0.25
) -> pd.DataFrame:
    """A table as `probe` gives it: accuracy grows from 0.3 with the step and the hook; the control stays at 0.28."""
    rows = []
    for step in steps:
        for h, hook in enumerate(hooks):
            for role in roles:
                accuracy = 0.3 + 0.6 * step / max(*steps, 1) * (h + 1) / len(hooks)
                rows.append(
                    {
                        "run": run,
                        "step": step,
                        "layer": h,
                        "hook": hook,
                        "role": role,
                        "probe": "bound-value",
                        "metric": "accuracy",
                        "accuracy": accuracy,
                        "low": accuracy - 0.05,
                        "high": accuracy + 0.05,
                        "control": 0.28,
                        "selectivity": accuracy - 0.28,
                        "chance": chance,
                        "majority": 0.26,
                        "n_train": 100,
                        "n_test": 50,
                    }
                )
    return pd.DataFrame(rows, columns=list(PROBE_COLUMNS)).astype(PROBE_COLUMNS)
