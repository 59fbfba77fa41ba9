"""Where models bind a value to its key: trains each on an easy MQAR, looks for its circuit, and writes places.csv.

    python studies/binding_places/places.py runs/places            # trains what is missing, then writes the table
    python studies/binding_places/places.py runs/places mamba h3   # only these; their rows take the place of older ones

Each model trains on one thread until 99% of the validation queries are right or its steps are over. `places.csv` has a
row for each model, step and place that carries the step; a step that was not found has a row with the place where the
knockout costs most. `sentences.md` is what `circuitscope analyze --circuit` says of each model.
"""

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd

import circuitscope as cs
from circuitscope.analysis.causal.parts import Circuit, Part
from circuitscope.analysis.checkpoints.runner import circuits

HERE = Path(__file__).parent
COMMON: dict[str, Any] = {
    "recipe": "plain",
    "n_layers": 1,
    "length": 16,
    "pairs": 4,
    "vocab_size": 64,
    "examples": None,
    "early_stop": 0.99,
    "warmup": 0.05,
    "weight_decay": 0.1,
    "steps": 3000,
    "save_every": 250,
    "threads": 1,
}
MODELS: dict[str, dict[str, Any]] = {
    "attention_conv_k": {"lr": 3e-3},
    "deltanet": {"lr": 3e-3},
    "mamba": {"lr": 5e-3},
    "mamba2": {"lr": 3e-3},
    # the README says what else was tried for the three below
    "h3": {"lr": 5e-3, "head_dim": 16},
    "based": {"lr": 5e-3, "n_layers": 2, "steps": 1500},
    "hyena": {"lr": 5e-3, "vocab_size": 16, "pairs": 2, "d_model": 128, "steps": 1000},
    "based-1-layer": {"model": "based", "lr": 3e-3, "steps": 1500},
    # the larger vocabulary; one layer of attention cannot recall, and its sentence has to say so
    "attention-512": {"model": "attention", "lr": 3e-3, "vocab_size": 512, "steps": 1500},
    "attention_conv_k-512": {"model": "attention_conv_k", "lr": 3e-3, "vocab_size": 512},
    "deltanet-512": {"model": "deltanet", "lr": 5e-3, "vocab_size": 512},
    "mamba-512": {"model": "mamba", "lr": 1.2e-2, "beta2": 0.95, "vocab_size": 512, "steps": 4000},
}


def trained(name: str, root: Path) -> cs.Run:
    """The run of a model, trained unless it is there."""
    if (root / name / "config.yaml").exists():
        return cs.Run(root / name)
    return cs.train(root=root, name=name, **{"model": name, **COMMON, **MODELS[name]})


def rows(name: str, run: cs.Run, found: Circuit) -> Iterator[dict[str, Any]]:
    """A row for each step: every place whose knockout costs enough, or the one that costs most where none does."""
    task = run.config.task
    on = ", ".join(f"{size} {number}" for size, number in task.sizes().items())
    what = {"model": name, "layers": run.config.model.n_layers, "task": f"{task.name}, {on}"}
    what |= {"vocabulary": task.needs()["vocab_size"], "step": run.steps[-1]}
    chosen = (found.binding, found.recall, found.carry)
    for step in ("binding", "recall", "carry"):
        tried = [part for part in found.tried if part.step == step]
        used = [part for part in tried if part.used] or sorted(tried, key=_lost)[-1:]
        for part in used:
            yield {
                **what,
                "accuracy": part.effect.before,
                "part": step,
                "edges": part.edges,
                "place": part.place,
                "weight": part.weight,
                "lost": part.effect.lost,
                "stderr": part.effect.stderr,
                "used": part.used,
                "chosen": found.solved and part in chosen,
            }


def _lost(part: Part) -> float:
    return part.effect.lost


def main() -> None:
    """Trains, looks, writes."""
    parse = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parse.add_argument("runs", type=Path)
    parse.add_argument("models", nargs="*", help=f"some of: {', '.join(MODELS)}; by default all")
    given = parse.parse_args()
    if unknown := [name for name in given.models if name not in MODELS]:
        parse.error(f"unknown model {unknown[0]!r}; expected some of: {', '.join(MODELS)}")
    table, said = HERE / "places.csv", HERE / "sentences.md"
    for name in given.models or MODELS:
        run = trained(name, given.runs)
        found = circuits(run, steps=[run.steps[-1]])[run.steps[-1]]
        new = pd.DataFrame(rows(name, run, found)).round(4)
        if table.exists():
            old = pd.read_csv(table)
            new = pd.concat([old[old.model != name], new])
        order = {model: place for place, model in enumerate(MODELS)}
        new.sort_values("model", key=lambda names: names.map(order), kind="stable").to_csv(table, index=False)
        _say(said, name, found.sentences())
        print(f"## {name}", *found.sentences(), sep="\n", flush=True)


def _say(path: Path, name: str, sentences: list[str]) -> None:
    """Writes the sentences of a model in place of its older ones, the models in their order."""
    parts = path.read_text().split("\n## ")[1:] if path.exists() else []
    said = {part.partition("\n")[0]: part.partition("\n")[2].strip() for part in parts}
    said[name] = "\n".join(f"- {sentence}" for sentence in sentences)
    body = [f"## {model}\n\n{said[model]}\n" for model in MODELS if model in said]
    path.write_text("\n".join(["# What `circuitscope analyze --circuit` says of each model\n", *body]))


if __name__ == "__main__":
    main()
