"""Does a circuit found at one length and number of pairs serve others? Cuts the same parts there; writes carries.csv.

It also draws figures/circuit-carries.png.

    python studies/circuit_carries/carries.py runs/nearby            # trains what is missing, then cuts
    python studies/circuit_carries/carries.py runs/nearby mamba      # only this one; its rows replace older ones

Every model is trained at MQAR (64, 4), vocabulary 512, with its recipe, until 99% of the validation queries are right.
`find_circuit` finds the parts that bind and recall there. The same parts are then cut, in the same model, on longer
sequences and with more pairs, which training never had.
"""

import argparse
from pathlib import Path
from typing import Any

import pandas as pd

import circuitscope as cs
from circuitscope.analysis import find_circuit, knock_out
from circuitscope.analysis.causal.parts import ENOUGH, Part
from circuitscope.config import RunConfig
from circuitscope.training.trainer import train
from circuitscope.viz.style import COLOURS, GREY, Sheet, look, save

HERE = Path(__file__).parent
MODELS = ("attention_rope", "mamba", "mamba2", "deltanet")
LENGTH, PAIRS, VOCABULARY = 64, 4, 512
SETTINGS = ((64, 4), (128, 4), (256, 4), (64, 8), (64, 16), (256, 16))
TOKENS = 64 * 256  # in the sequences of each setting


def trained(name: str, root: Path) -> cs.Run:
    """The run of a model, which is named by its digest; trained unless it is there."""
    config = RunConfig.build(
        name, "mqar", length=LENGTH, pairs=PAIRS, vocab_size=VOCABULARY, early_stop=0.99, seed=101, threads=1
    )
    path = root / config.digest
    return cs.Run(path) if (path / "config.yaml").exists() else train(config, root=root, name=config.digest)


def rows(name: str, run: cs.Run) -> list[dict[str, Any]]:
    """A row for each setting and part: the accuracy there, and what cutting the part costs."""
    model = run.load(step=run.steps[-1])
    found = None
    out = []
    for length, pairs in SETTINGS:
        task = cs.task("mqar", length=length, pairs=pairs, vocab_size=VOCABULARY)
        batch = task.batch(0, split="test", size=TOKENS // length)
        found = found or find_circuit(model, batch)
        for part in (found.binding, found.recall, found.carry):
            if part is None:
                continue
            effect = knock_out(model, batch, part.edges, layer=part.layer, heads=part.head, factor=_factor(part))
            out.append(
                {
                    "model": name,
                    "length": length,
                    "pairs": pairs,
                    "any_value": task.chance,
                    "accuracy": effect.before,
                    "part": part.step,
                    "edges": part.edges,
                    "place": part.place,
                    "lost": effect.lost,
                    "stderr": effect.stderr,
                    "used": effect.share >= ENOUGH and effect.lost > 3 * effect.stderr,
                }
            )
    return out


def _factor(part: Part) -> str:
    return "phi" if part.core else part.factor


def expected(table: pd.DataFrame) -> list[str]:
    """What the README says that was expected, and whether it is so, for each model."""
    out = []
    for name, of_model in table.groupby("model", sort=False):
        at = {size: part.accuracy.iloc[0] for size, part in of_model.groupby(["length", "pairs"])}
        longer = at[128, PAIRS] >= at[LENGTH, PAIRS] - 0.1
        recalls = of_model[of_model.accuracy > of_model.any_value + 0.02]
        same = bool(recalls.used.all())
        out.append(
            f"{name}: twice the length within 10 points: {'yes' if longer else 'no'}; the same parts are used in"
            f" {int(recalls.used.sum())} of {len(recalls)} cuts where it recalls: {'yes' if same else 'no'}"
        )
    return out


def figure(table: pd.DataFrame) -> Sheet:
    """Accuracy by setting, and the most that is left when one of the parts that were found at (64, 4) is cut."""
    x = range(len(SETTINGS))
    with look():
        sheet = Sheet(table=lambda: table, figsize=(6.4, 3.0), layout="constrained")
        axes = sheet.subplots()
        for name, colour in zip(MODELS, COLOURS, strict=False):
            part = table[table.model == name].assign(left=lambda rows: rows.accuracy - rows.lost)
            by = part.groupby(["length", "pairs"]).agg({"accuracy": "first", "left": "max"})
            axes.plot(x, [by.accuracy[size] for size in SETTINGS], "o-", color=colour, ms=4, label=name)
            axes.plot(x, [by.left[size] for size in SETTINGS], "x:", color=colour, ms=4)
        chance = [1 / pairs for _, pairs in SETTINGS]
        axes.plot(x, chance, "_", color=GREY, ms=22, label="any value of the context")
        axes.plot([], [], "x:", color=GREY, ms=4, label="with one part cut")
        axes.set_xticks(list(x), [f"({length}, {pairs})" for length, pairs in SETTINGS])
        axes.get_xticklabels()[0].set_fontweight("bold")
        axes.set_xlabel("(length, pairs); trained at the first alone")
        axes.set_ylabel("accuracy")
        axes.set_ylim(-0.03, 1.03)
        sheet.suptitle("Parts that bind and recall at (64, 4) do so at other lengths and numbers of pairs")
        sheet.legend(loc="outside right center", frameon=False)
    return sheet


def main() -> None:
    """Trains, cuts, writes."""
    parse = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parse.add_argument("runs", type=Path)
    parse.add_argument("models", nargs="*", help=f"some of: {', '.join(MODELS)}; by default all")
    given = parse.parse_args()
    if unknown := [name for name in given.models if name not in MODELS]:
        parse.error(f"unknown model {unknown[0]!r}; expected some of: {', '.join(MODELS)}")
    path = HERE / "carries.csv"
    for name in given.models or MODELS:
        new = pd.DataFrame(rows(name, trained(name, given.runs))).round(4)
        if path.exists():
            old = pd.read_csv(path)
            new = pd.concat([old[old.model != name], new])
        new.sort_values("model", key=lambda names: names.map(MODELS.index), kind="stable").to_csv(path, index=False)
        print(f"{name}: done", flush=True)
    table = pd.read_csv(path)
    if set(table.model) == set(MODELS):
        save(figure(table), HERE.parents[1] / "figures/circuit-carries.png")
    print(*expected(table), sep="\n")


if __name__ == "__main__":
    main()
