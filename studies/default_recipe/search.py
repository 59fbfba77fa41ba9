"""The search behind the default recipe of `circuitscope train`.

Two stages, each a table of runs on MQAR (64, 4): `variants` changes one thing at a time around a
base recipe, for one seed; `seeds` runs the candidates for five. A row gives the step at which
validation accuracy first reached 99%. Runs go two at a time with one thread each and stop at 99%; rows
already in the table are not run again.

    python studies/default_recipe/search.py variants
    python studies/default_recipe/search.py seeds
"""

import argparse
import csv
import tempfile
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
LIMIT = 1500
BASE: dict[str, Any] = {
    "lr": 2e-3,
    "schedule": "constant",
    "batch_size": 64,
    "weight_decay": 0.1,
    "beta2": 0.999,
    "clip": 1.0,
    "warmup": 0.1,
    "examples": 20_000,
    "filler": "clean",
    "init": "gpt2",
    "rescale_residual": False,
}
VARIANTS: list[dict[str, Any]] = [
    {},
    {"lr": 1e-3},
    {"lr": 1.5e-3},
    {"lr": 3e-3},
    {"schedule": "linear"},
    {"schedule": "cosine"},
    {"examples": 10_000},
    {"examples": 50_000},
    {"examples": None},
    {"filler": "random"},
    {"filler": "zero"},
    {"rescale_residual": True},
]
CANDIDATES: list[dict[str, Any]] = [
    {"lr": 1e-3, "weight_decay": 1.0},
    {"lr": 1.5e-3},
    {"lr": 1.5e-3, "weight_decay": 1.0},
    {},
]
SEEDS = (0, 1, 2, 3, 4)


def measure(change: dict[str, Any], seed: int) -> dict[str, Any]:
    """Trains one recipe until 99% or the limit."""
    import circuitscope as cs

    with tempfile.TemporaryDirectory() as folder:
        run = cs.train(
            root=folder,
            **BASE | change,
            seed=seed,
            steps=LIMIT,
            threads=1,
            eval_every=25,
            early_stop=0.99,
            save_every=LIMIT,
            resume_every=LIMIT,
        )
        rows = run.metrics
    held = rows[rows.split == "validation"]
    half = held[held.accuracy >= 0.5].step.min()
    solved = held[held.accuracy >= 0.99].step.min()
    return {
        "recipe": describe(change),
        "seed": seed,
        "step_50": "" if half != half else int(half),
        "step_99": "" if solved != solved else int(solved),
        "best_accuracy": round(float(held.accuracy.max()), 4),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stage", choices=["variants", "seeds"])
    parser.add_argument("--processes", type=int, default=2)
    args = parser.parse_args()
    jobs = [(v, 0) for v in VARIANTS] if args.stage == "variants" else [(c, s) for c in CANDIDATES for s in SEEDS]
    table = HERE / f"{args.stage}.csv"
    rows = read(table)
    done = {(row["recipe"], int(row["seed"])) for row in rows}
    with ProcessPoolExecutor(args.processes, mp_context=get_context("spawn")) as pool:
        futures = [pool.submit(measure, *job) for job in jobs if (describe(job[0]), job[1]) not in done]
        for future in as_completed(futures):
            rows.append(future.result())
            order = {(describe(change), seed): i for i, (change, seed) in enumerate(jobs)}
            rows.sort(key=lambda row: order[row["recipe"], int(row["seed"])])
            write(table, rows)
            print(f"{len(rows)}/{len(jobs)}", future.result(), flush=True)


def describe(change: dict[str, Any]) -> str:
    return ", ".join(f"{k}={v}" for k, v in change.items()) or "base"


def read(table: Path) -> list[dict[str, Any]]:
    """Rows of an earlier, unfinished search: they are not run again."""
    if not table.exists():
        return []
    with open(table, newline="") as file:
        return list(csv.DictReader(file))


def write(table: Path, rows: list[dict[str, Any]]) -> None:
    with open(table, "w", newline="") as file:
        writer = csv.DictWriter(file, rows[0].keys(), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    main()
