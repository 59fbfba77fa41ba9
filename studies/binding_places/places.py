"""Where one-layer models bind a value to its key: trains them on MQAR (16, 4) and reads the circuit of each.

    python studies/binding_places/places.py runs/places            # trains what is missing, then writes the tables
    python studies/binding_places/places.py runs/places mamba h3   # only these models

Each model trains on one thread, for half a minute to two, until 99% of the validation queries are right or its steps
are over. `circuits.csv` then holds every place that was tried, with its knockout, and `sentences.md` what
`circuitscope analyze --circuit` says of each model.
"""

import argparse
from pathlib import Path
from typing import Any

import pandas as pd

HERE = Path(__file__).parent
COMMON: dict[str, Any] = {
    "recipe": "plain",
    "n_layers": 1,
    "length": 16,
    "pairs": 4,
    "vocab_size": 512,
    "examples": None,
    "early_stop": 0.99,
    "warmup": 0.05,
    "weight_decay": 0.1,
    "steps": 3000,
    "save_every": 250,
    "threads": 1,
}
MODELS: dict[str, dict[str, Any]] = {
    "attention": {"lr": 2e-3, "steps": 1500},
    "attention_conv_k": {"lr": 3e-3},
    "deltanet": {"lr": 3e-3},
    "mamba": {"lr": 5e-3},
    "mamba2": {"lr": 3e-3},
    "based": {"lr": 2e-3, "steps": 1500},
    # at width 64 and vocabulary 512 these two stay below 20% for 3,000 steps
    "h3": {"lr": 2e-3, "vocab_size": 64, "d_model": 128, "steps": 1500},
    "hyena": {"lr": 2e-3, "vocab_size": 64, "d_model": 128, "steps": 1500},
}


def trained(name: str, root: Path) -> Any:
    """The run of a model, trained unless it is there."""
    import circuitscope as cs

    if (root / name / "config.yaml").exists():
        return cs.Run(root / name)
    return cs.train(model=name, root=root, name=name, **COMMON | MODELS[name])


def main() -> None:
    """Trains, reads, writes the tables."""
    parse = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parse.add_argument("runs", type=Path)
    parse.add_argument("models", nargs="*", help=f"some of: {', '.join(MODELS)}; by default all")
    given = parse.parse_args()
    if unknown := [name for name in given.models if name not in MODELS]:
        parse.error(f"unknown model {unknown[0]!r}; expected some of: {', '.join(MODELS)}")
    chosen = given.models or list(MODELS)
    runs = {name: trained(name, given.runs) for name in chosen}
    from circuitscope.analysis.checkpoints.runner import circuits

    tables, text = [], ["# What `analyze --circuit` says", ""]
    for name, run in runs.items():
        step = run.steps[-1]
        found = circuits(run, steps=[step])[step]
        text += [f"## {name}, step {step}", "", *(f"- {sentence}" for sentence in found.sentences()), ""]
        rows = [
            {"model": name, "part": p.step, "edges": p.edges, "place": p.place, "weight": p.weight,
             "before": p.effect.before, "lost": p.effect.lost, "stderr": p.effect.stderr,
             "chosen": p in found.parts}
            for p in found.tried
        ]  # fmt: skip
        tables.append(pd.DataFrame(rows).round(4))
    if len(chosen) == len(MODELS):
        pd.concat(tables).to_csv(HERE / "circuits.csv", index=False)
        (HERE / "sentences.md").write_text("\n".join(text))
    print("\n".join(text))


if __name__ == "__main__":
    main()
